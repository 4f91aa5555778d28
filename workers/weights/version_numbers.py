"""The numbers of versions, and the epochs of a run.

Keeps true
- A number is never used for two policies: what comes next is above every number on the log and every one used since.
- Who goes back begins a new epoch, whose versions are newer than all before, whatever their numbers; before is also
  what the log has lost.
- The newest version may be stored whole again under its number, and no other.
- Only manifests that are believed count; without keys a number that nobody can have counted up to counts neither.

Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from rose.schemas.errors import RoseError
from rose.schemas.weights import WeightManifest

MAX_VERSION = 2**52
"""Half of what a number may be: who begins above the highest below this never comes to the end."""


class VersionTaken(RoseError):
    """A number that another policy has."""

    def __init__(self, version: int, free: int) -> None:
        super().__init__(
            f"version {version} cannot be published: up to {free - 1} all numbers are taken on the log. Publish "
            f"version {free} or leave the number out; a run that goes back begins a new epoch (`begin_epoch`)"
        )


@dataclass(slots=True)
class VersionNumbers:
    """Of one run, as its publisher keeps it."""

    newest: WeightManifest | None = None
    """Of the run on the log, and since then as published, without what it says of tensors and slices."""
    highest: int = -1
    """Of all runs of the model."""
    epoch: int = 0
    """Of the version that is published next."""

    def learn(self, manifests: Iterable[WeightManifest], run: str) -> None:
        """Take in what is on the log, of this run and of others of the same model and key."""
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
        """The lowest number that is free."""
        return self.highest + 1

    def begin_epoch(self, *, epoch: int = -1, version: int = -1) -> int:
        """Go back: what is published next is newer than all before. Returns the lowest number that is free.

        `epoch` and `version`: of the policy that is gone on from, which the log may have lost.
        """
        self.epoch = max(epoch, -1 if self.newest is None else self.newest.epoch) + 1
        self.highest = max(self.highest, version)
        return self.next_version

    def take(self, manifest: WeightManifest) -> None:
        """Publish it; raises VersionTaken if its number is not free."""
        self.check(manifest.version, manifest.digest)
        self.highest = max(self.highest, manifest.version)
        self.newest = msgspec.structs.replace(manifest, tensors=(), slices=())  # of a large model they are many

    def check(self, version: int, digest: bytes) -> None:
        """Raises VersionTaken unless the number is free, or that of the newest version, which is the same policy."""
        newest = self.newest
        again = newest is not None and (newest.order, newest.digest) == ((self.epoch, version), digest)
        if version <= self.highest and not again:
            raise VersionTaken(version, self.next_version)
