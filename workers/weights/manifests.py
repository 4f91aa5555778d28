"""Manifests on the log: their keys, and the chain of versions that leads to the newest one of a model.

Keeps true: the newest is that of the highest version; of two for one version, the later.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from schemas.weights import WeightManifest
from topics.catalog import MANIFESTS
from topics.log import read_back
from topics.reader import Reader
from topics.records import Envelope
from topics.settings import BusSettings

FIRST_LOOK = 32
"""Offsets looked at from the end of the topic; then eight times as many, as long as something is missing."""

PLACE = (MANIFESTS, 0)
"""Manifests lie in one partition, so versions have an order."""


@dataclass(frozen=True, slots=True)
class PlacedManifest:
    manifest: WeightManifest
    offset: int


def manifest_key(manifest: WeightManifest) -> str:
    return f"{manifest.model_id}/{manifest.version}"


@dataclass(slots=True)
class Lineage:
    """The manifests of one model that a follower knows, and how they build on each other."""

    model_id: str
    versions: dict[int, PlacedManifest] = field(default_factory=dict)

    def learn(self, envelopes: Iterable[Envelope]) -> None:
        """Take in what was read from the topic."""
        for envelope in envelopes:
            manifest = envelope.record
            if not isinstance(manifest, WeightManifest) or manifest.model_id != self.model_id:
                continue
            known = self.versions.get(manifest.version)
            if known is None or known.offset < envelope.offset:
                self.versions[manifest.version] = PlacedManifest(manifest, envelope.offset)

    @property
    def newest(self) -> PlacedManifest | None:
        return self.versions[max(self.versions)] if self.versions else None

    def path(self, version: int, *, since: int | None = None) -> list[PlacedManifest] | None:
        """The versions after `since`, or from an anchor on if it is None, that lead to `version`; None if one lacks."""
        path: list[PlacedManifest] = []
        at: int | None = version
        while at is not None and at != since:
            placed = self.versions.get(at)
            if placed is None or (path and placed.manifest.version >= path[-1].manifest.version):
                return None
            path.append(placed)
            at = placed.manifest.base_version
        return path[::-1] if at == since else None

    def forget_before(self, version: int) -> None:
        """Drop what no path to `version` or a later one can need: all before its anchor."""
        path = self.path(version)
        if path:
            anchor = path[0].manifest.version
            self.versions = {number: placed for number, placed in self.versions.items() if number >= anchor}


def find_lineage(settings: BusSettings, model_id: str) -> tuple[Lineage, int]:
    """The model's newest manifest on the log with all it builds on, as far as that is there; and the next offset.

    Raises TopicMissing or BusError.
    """
    reader = Reader(settings, "rose-weights", group="weights")
    try:
        low, high = reader.watermarks(PLACE)
    finally:
        reader.close()
    look = FIRST_LOOK
    while True:
        begin = max(low, high - look)
        envelopes = list(read_back(settings, {PLACE: begin}, client_id="rose-weights"))
        lineage = Lineage(model_id)
        lineage.learn(envelopes)
        newest = lineage.newest
        if begin == low or (newest is not None and lineage.path(newest.manifest.version) is not None):
            return lineage, max(high, envelopes[-1].offset + 1 if envelopes else 0)
        look *= 8


def newest_manifest(settings: BusSettings, model_id: str) -> WeightManifest | None:
    """The model's newest manifest on the log. Raises TopicMissing or BusError."""
    lineage, _ = find_lineage(settings, model_id)
    return lineage.newest.manifest if lineage.newest else None
