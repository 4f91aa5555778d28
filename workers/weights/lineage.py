"""Chooses the version to take next: from the versions of a run, how they build on each other, and which have failed.

Keeps true
- The newest version that a path leads to is tried first; if it is refused, the next best is tried.
- Only versions that are newer than the held one are tried, and no manifest is tried again after it has failed. So no
  broken manifest, of whatever number, prevents a valid one from being taken.
- A break in a chain costs at most one anchor, not one for each version: no path contains a failed manifest. If the held
  version may be the cause, the manifest is tried once more on a path from an anchor.
- When nothing is left to try, versions before the newest anchor are forgotten, except the path to the held version. A
  receiver that can take no version also remembers only one chain, and one sentence for each failure.

Pure: manifests are verified before they are added, and paths are followed elsewhere.

Example:
    added: anchor 0, then 1 on 0, 2 on 1        -> try 0, 1, 2
    held 2; added 3 on 2, 4 on 3                -> try 3, 4
    3 failed, a chunk of it is missing          -> nothing: the path to 4 contains 3
    added 5 on 4, then anchor 6, 7 on 6         -> nothing at 5, then try 6, 7
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rose.schemas.weights import Order, WeightManifest
from rose.workers.weights.checks import BASE_REFUSALS, Refusal, VersionRefused


@dataclass(frozen=True, slots=True)
class Placed:
    """A trusted manifest and its offset."""

    manifest: WeightManifest
    offset: int

    @property
    def order(self) -> Order:
        """Epoch and version number, by which versions are compared."""
        return self.manifest.order


Path = Sequence[Placed]
"""Versions to apply in this order: the first is an anchor or builds on the held version, the last is the target."""


@dataclass(slots=True)
class Lineage:
    """The versions of one run that one receiver knows."""

    versions: dict[Order, list[Placed]] = field(default_factory=dict)
    """Manifests of each version, by order and sorted by offset. There are several if the version was published again as
    an anchor, or after a failure."""
    held: Order | None = None
    """The version that the receiver holds."""
    failed: dict[int, VersionRefused] = field(default_factory=dict)
    """Manifests that have failed, by offset; no path contains them."""
    suspects: dict[int, VersionRefused] = field(default_factory=dict)
    """Manifests that failed on top of the held version, by offset; they are tried once more on a path from an
    anchor."""

    def on_manifest(self, manifest: WeightManifest, offset: int) -> None:
        """Add a trusted manifest of the run. A known manifest changes nothing."""
        placed = self.versions.setdefault(manifest.order, [])
        if all(each.offset != offset for each in placed):
            placed.append(Placed(manifest, offset))
            placed.sort(key=lambda each: each.offset)

    @property
    def newest(self) -> Placed | None:
        """The newest known version, as published last; None if there is none."""
        return self.versions[max(self.versions)][-1] if self.versions else None

    def next_path(self) -> Path | None:
        """The cheapest path to the newest reachable version; None if there is nothing to try."""
        upon_held, from_anchors = self._paths(upon_held=True), self._paths(upon_held=False)
        newer = [order for order in (*upon_held, *from_anchors) if self._is_newer(order)]
        if not newer:
            return None
        aim = max(newer)
        return min((paths[aim] for paths in (upon_held, from_anchors) if aim in paths), key=payload_bytes)

    def on_taken(self, placed: Placed) -> None:
        """The receiver holds this version now. Versions that no later path can need are forgotten."""
        self.held = placed.order
        whole = self._paths(upon_held=False).get(placed.order)
        if whole is None:
            return
        begin, needed = whole[0].order, self._below_newer()
        self.versions = {order: found for order, found in self.versions.items() if order >= begin or order in needed}

    def forget_useless(self) -> None:
        """Forget versions that are needed only by versions before the newest anchor.

        Called when nothing is left to try.

        Failures are remembered, because the manifests are added again when the log is read again.
        """
        anchors = [
            order
            for order, found in self.versions.items()
            if any(placed.manifest.base_version is None for placed in found)
        ]
        if not anchors:
            return
        to_held = [] if self.held is None else self._paths(upon_held=False).get(self.held, [])
        kept, newest = {placed.order for placed in to_held}, max(anchors)
        self.versions = {order: found for order, found in self.versions.items() if order >= newest or order in kept}

    def on_refused(self, path: Path, placed: Placed, why: VersionRefused) -> None:
        """Record that following `path` failed at `placed`."""
        upon_held = path[0].manifest.base_version is not None
        where = self.suspects if upon_held and why.refusal in BASE_REFUSALS else self.failed
        # A copy without traceback, which would keep tensors in memory.
        where[placed.offset] = VersionRefused(why.refusal, str(why))

    def blocked(self) -> tuple[Placed, VersionRefused] | None:
        """Return the manifest that makes the newest version unreachable, and why.

        None if the newest version is held or reachable.
        """
        at = self.newest
        if at is None or not self._is_newer(at.order) or self._leads_to(at.order):
            return None
        while True:
            why = self.failed.get(at.offset) or self.suspects.get(at.offset)
            if why is not None:
                return at, why
            base = at.manifest.base_version
            below = self.versions.get((at.manifest.epoch, base)) if base is not None and _sort_key(at) else None
            if not below:
                return at, VersionRefused(Refusal.WRONG_BASE, f"version {base}, on which it builds, is not on the log")
            at = below[-1]

    def _leads_to(self, order: Order) -> bool:
        return any(order in self._paths(upon_held=upon_held) for upon_held in (True, False))

    def _below_newer(self) -> set[Order]:
        """Return the versions that versions newer than the held one may build on.

        They may be older than an anchor in between.
        """
        found: set[Order] = set()
        above = [order for order in self.versions if self._is_newer(order)]
        while above:
            for placed in self.versions[above.pop()]:
                base = placed.manifest.base_version
                if base is None or placed.offset in self.failed or not _sort_key(placed):
                    continue
                order = placed.manifest.epoch, base
                if order in self.versions and order not in found:
                    found.add(order)
                    above.append(order)
        return found

    def _is_newer(self, order: Order) -> bool:
        return self.held is None or order > self.held

    def _paths(self, *, upon_held: bool) -> dict[Order, list[Placed]]:
        """Return the cheapest path to every version, by order.

        `upon_held`: the paths begin at the held version, otherwise at an anchor.
        """
        paths: dict[Order, list[Placed]] = {}
        if upon_held:
            if self.held is None:
                return paths
            paths[self.held] = []
        passed_over = self.failed.keys() | (self.suspects.keys() if upon_held else set())
        for order in sorted(self.versions):
            if upon_held and not self._is_newer(order):
                continue
            ways: list[list[Placed]] = []
            for placed in self.versions[order]:
                base = placed.manifest.base_version
                if placed.offset in passed_over:
                    continue
                if base is None:
                    ways += [] if upon_held else [[placed]]
                elif _sort_key(placed) and (before := paths.get((placed.manifest.epoch, base))) is not None:
                    ways.append([*before, placed])
            if ways:
                paths[order] = min(ways, key=payload_bytes)
        return paths


def payload_bytes(path: Path) -> int:
    """Payload bytes of all versions of a path."""
    return sum(placed.manifest.payload_bytes for placed in path)


def _sort_key(placed: Placed) -> bool:
    base = placed.manifest.base_version
    return base is None or base < placed.manifest.version
