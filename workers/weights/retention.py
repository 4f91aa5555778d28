"""Chunks that no version needs any more are deleted, from the log and from the anchor store.

Keeps true: whatever a version from a model's last anchor but one on can need stays, for every model on the topic; a
receiver that is in the middle of the older chain finishes it.
"""

from collections import defaultdict

import structlog
from confluent_kafka import KafkaException, TopicPartition

from schemas.weights import WeightManifest
from topics.admin import reach
from topics.catalog import CHUNKS, MANIFESTS
from topics.errors import BusError
from topics.log import read_back
from topics.settings import BusSettings
from workers.weights.anchor_store import AnchorStore, StoreError
from workers.weights.shelves import lowest_offsets

ANCHORS_KEPT = 2
"""Of each model: the newest, and the one before it."""

log = structlog.get_logger("weights")


def release_chunks(settings: BusSettings, store: AnchorStore | None = None) -> None:
    """Delete what lies before the first chunk that is still needed, and the files of versions before.

    A broker or store that does not allow it is a warning: what retention it has itself deletes them later.
    """
    try:
        _release(settings, store)
    except (KafkaException, BusError, StoreError) as error:
        log.warning("not deleted", reason=str(error))


def _release(settings: BusSettings, store: AnchorStore | None) -> None:
    manifests: dict[str, list[WeightManifest]] = defaultdict(list)
    for envelope in read_back(settings, {(MANIFESTS, 0): 0}, client_id="rose-weights"):
        if isinstance(envelope.record, WeightManifest):
            manifests[envelope.record.model_id].append(envelope.record)
    alive = {model_id: live(found) for model_id, found in manifests.items()}
    needed = lowest_offsets(place for found in alive.values() for manifest in found for place in manifest.first)
    if needed:
        name = settings.topic(CHUNKS)
        places = [TopicPartition(name, partition, offset) for partition, offset in needed.items()]
        admin = reach(settings)  # whose end would leave the futures waiting
        for deleted in admin.delete_records(places).values():
            deleted.result()
    if store is not None:
        for model_id, found in alive.items():
            store.release(model_id, before=min(manifest.version for manifest in found))


def live(manifests: list[WeightManifest]) -> list[WeightManifest]:
    """Those of one model that can still be needed."""
    anchors = sorted(manifest.version for manifest in manifests if manifest.base_version is None)
    oldest = anchors[-ANCHORS_KEPT:][0] if anchors else 0
    return [manifest for manifest in manifests if manifest.version >= oldest]
