"""Manifests on the log: the key, and the newest one of a model.

Keeps true: the newest is that of the highest version; of two for one version, the later.
"""

from dataclasses import dataclass

from schemas.weights import WeightManifest
from topics.bus import Envelope, Reader
from topics.catalog import MANIFESTS
from topics.log import read_back
from topics.settings import BusSettings

FIRST_LOOK = 32
"""Offsets looked at from the end of the topic; then eight times as many, as long as the model is not found."""

PLACE = (MANIFESTS, 0)
"""Manifests lie in one partition, so versions have an order."""


@dataclass(frozen=True, slots=True)
class PlacedManifest:
    manifest: WeightManifest
    offset: int


def manifest_key(manifest: WeightManifest) -> str:
    return f"{manifest.model_id}/{manifest.version}"


def newest(envelopes: list[Envelope], model_id: str) -> PlacedManifest | None:
    """The newest manifest of the model among records of the topic."""
    found = [
        PlacedManifest(envelope.record, envelope.offset)
        for envelope in envelopes
        if isinstance(envelope.record, WeightManifest) and envelope.record.model_id == model_id
    ]
    return max(found, key=lambda placed: (placed.manifest.version, placed.offset), default=None)


def newest_manifest(settings: BusSettings, model_id: str) -> tuple[PlacedManifest | None, int]:
    """The model's newest manifest on the log, and the offset from which later ones will come.

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
        found = newest(envelopes, model_id)
        if found is not None or begin == low:
            return found, max(high, envelopes[-1].offset + 1 if envelopes else 0)
        look *= 8
