"""Version numbers and epochs of a run. Pure.

Keeps true
- A number never stands for two policies: the next number is above every number on the log and every number used since.
- A run that goes back begins an epoch whose versions are newer than all earlier ones, including those that the log has
  lost.
- Only the newest version may be published again under its number.
- Only trusted manifests count. Without keys, a number too large to have been reached by counting does not count either.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from rose.schemas.errors import RoseError
from rose.schemas.weights import WeightManifest

MAX_VERSION = 2**52
"""Manifests with larger numbers are ignored. Half of the range of numbers, so that a run never reaches the end of the
range."""


class VersionTaken(RoseError):
    """The version number stands for another policy."""

    def __init__(self, version: int, free: int) -> None:
        super().__init__(
            f"version {version} cannot be published: up to {free - 1} all numbers are taken on the log. Publish "
            f"version {free} or leave the number out; a run that goes back begins a new epoch (`begin_epoch`)"
        )


@dataclass(slots=True)
class VersionNumbers:
    """The numbering of one run, kept by its publisher."""

    newest: WeightManifest | None = None
    """The newest manifest of the run, from the log or published since, without its tensors and slices."""
    highest: int = -1
    """Highest number of all runs of the model."""
    epoch: int = 0
    """Epoch of the next version."""

    def learn(self, manifests: Iterable[WeightManifest], run: str) -> None:
        """Add manifests from the log, of all runs of the model with the same key."""
        for manifest in manifests:
            if manifest.version >= MAX_VERSION or manifest.epoch >= MAX_VERSION:
                continue
            self.highest = max(self.highest, manifest.version)
            if manifest.run == run and (self.newest is None or manifest.order >= self.newest.order):
                self.newest = manifest
        if self.newest is not None:
            self.epoch = max(self.epoch, self.newest.epoch)

    @property
    def next_version(self) -> int:
        """The lowest free number."""
        return self.highest + 1

    def begin_epoch(self, *, epoch: int = -1, version: int = -1) -> int:
        """Begin an epoch whose versions are newer than all earlier ones. Returns the lowest free number.

        `epoch` and `version`: those of the policy that the run resumes from, which the log may have lost; -1 if
        unknown.
        """
        self.epoch = max(epoch, -1 if self.newest is None else self.newest.epoch) + 1
        self.highest = max(self.highest, version)
        return self.next_version

    def take(self, manifest: WeightManifest) -> None:
        """Use the manifest's number. Raises VersionTaken if the number is not free."""
        self.check(manifest.version, manifest.digest)
        self.highest = max(self.highest, manifest.version)
        self.newest = msgspec.structs.replace(manifest, tensors=(), slices=())  # they are large

    def check(self, version: int, digest: bytes) -> None:
        """Check that a version number may be used.

        Raises VersionTaken unless the number is free, or is that of the newest version and the policy is the same.
        """
        newest = self.newest
        again = newest is not None and (newest.order, newest.digest) == ((self.epoch, version), digest)
        if version <= self.highest and not again:
            raise VersionTaken(version, self.next_version)
