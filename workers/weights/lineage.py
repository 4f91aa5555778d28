"""Which version to take next: what is known of a run's versions, how they build on each other, and which have failed.

Keeps true
- The newest version that some path leads to is tried first; if it is refused, the next best one is.
- Nothing is tried that is not newer than what is held, and nothing is tried again that has failed. So no manifest, of
  whatever number and however broken, keeps an honest one from being taken.
- A break in a chain costs one anchor at most, not one a version: no path goes through a manifest that failed. Where the
  fault may lie in what is held, it is tried once more from an anchor.
- Once nothing is left to try, what lies before the newest anchor is forgotten, but for the way to what is held: also a
  receiver that can take nothing remembers one chain, and of what failed a sentence each.

Pure: manifests are believed before they come here, and whether a path can be followed is tried elsewhere.

Example
    learned: anchor 0, then 1 on 0, 2 on 1      -> try 0, 1, 2
    held 2; learned 3 on 2, 4 on 3              -> try 3, 4
    3 failed, a chunk of it is missing          -> nothing: the way to 4 leads through 3
    learned 5 on 4, then anchor 6, 7 on 6       -> nothing at 5, then try 6, 7
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rose.schemas.weights import Order, WeightManifest
from rose.workers.weights.checks import BASE_REFUSALS, Refusal, VersionRefused


@dataclass(frozen=True, slots=True)
class Placed:
    """A manifest that is believed, and where it lies."""

    manifest: WeightManifest
    offset: int

    @property
    def order(self) -> Order:
        return self.manifest.order


Path = Sequence[Placed]
"""Versions that build on each other: the first is an anchor or builds on what is held, the last is the aim."""


@dataclass(slots=True)
class Lineage:
    """The versions of one run as one receiver knows them."""

    versions: dict[Order, list[Placed]] = field(default_factory=dict)
    """One version may come several times, the later the last: stored whole again, or written again after a failure."""
    held: Order | None = None
    """What the receiver has."""
    failed: dict[int, VersionRefused] = field(default_factory=dict)
    """By offset, manifests that no path goes through any more."""
    suspects: dict[int, VersionRefused] = field(default_factory=dict)
    """By offset, manifests that failed upon what is held: they are tried once more from an anchor."""

    def on_manifest(self, manifest: WeightManifest, offset: int) -> None:
        """Take in a manifest of the run; one that is known already changes nothing."""
        placed = self.versions.setdefault(manifest.order, [])
        if all(each.offset != offset for each in placed):
            placed.append(Placed(manifest, offset))
            placed.sort(key=lambda each: each.offset)

    @property
    def newest(self) -> Placed | None:
        return self.versions[max(self.versions)][-1] if self.versions else None

    def next_path(self) -> Path | None:
        """The way to the best version that may be had, the cheaper of two; None if there is nothing to try."""
        upon_held, from_anchors = self._paths(upon_held=True), self._paths(upon_held=False)
        newer = [order for order in (*upon_held, *from_anchors) if self._is_newer(order)]
        if not newer:
            return None
        aim = max(newer)
        return min((paths[aim] for paths in (upon_held, from_anchors) if aim in paths), key=payload_bytes)

    def on_taken(self, placed: Placed) -> None:
        """The receiver has this version now; what no later path can need is forgotten."""
        self.held = placed.order
        whole = self._paths(upon_held=False).get(placed.order)
        if whole is None:
            return
        begin, needed = whole[0].order, self._below_newer()
        self.versions = {order: found for order, found in self.versions.items() if order >= begin or order in needed}

    def forget_useless(self) -> None:
        """Nothing is left to try: forget what only a version before the newest anchor could still be built on.

        What has failed stays known as such: it may be learned again, when the log is read again.
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
        """A path could be followed up to this version of it."""
        upon_held = path[0].manifest.base_version is not None
        where = self.suspects if upon_held and why.refusal in BASE_REFUSALS else self.failed
        where[placed.offset] = VersionRefused(why.refusal, str(why))  # a traceback holds all that was in memory

    def blocked(self) -> tuple[Placed, VersionRefused] | None:
        """Why the newest version is not to be had, and the manifest that is to blame; None if it is held or may be."""
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
        """What versions newer than the held one could be built on: older than an anchor, maybe, that lies between."""
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
        """The cheapest path to every version that can be built upon what is held, or from an anchor on."""
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
    """What it costs to follow the path."""
    return sum(placed.manifest.payload_bytes for placed in path)


def _sort_key(placed: Placed) -> bool:
    base = placed.manifest.base_version
    return base is None or base < placed.manifest.version
