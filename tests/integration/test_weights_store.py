"""Large anchors in a store and deltas on the log: a receiver takes both, or keeps its current version."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rose.schemas.record import Record
from rose.schemas.weights import WeightChunk, WeightManifest
from rose.schemas.wire import EncodedRecord
from rose.topics.admin import create_topics
from rose.topics.catalog import Partitions, Topic
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.weights import chunk_stores
from rose.workers.weights.checks import Refusal
from rose.workers.weights.chunk_stores import AnchorStore
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.publish import WeightPublisher
from rose.workers.weights.receive import WeightReceiver
from rose.workers.weights.trust import make_trust
from tests.integration.test_weights import MODEL, SHAPES, WAIT_SECONDS, assert_equal, staged, tensors_of
from tests.support.brokers import AnyBroker

pytestmark = pytest.mark.slow

MODEL_BYTES = sum(tensor.nbytes for tensor in tensors_of(0).values())


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=2))
    return settings


@pytest.fixture
def store(tmp_path: Path) -> AnchorStore:
    return AnchorStore(str(tmp_path))


@contextmanager
def receiving(settings: BusSettings, store: AnchorStore | None) -> Iterator[WeightReceiver]:
    receiver = WeightReceiver(settings, make_trust(settings, MODEL, WeightsConfig()), shapes=SHAPES, store=store)
    receiver.start()
    try:
        yield receiver
    finally:
        receiver.stop()


def publish(publisher: WeightPublisher, version: int) -> WeightManifest:
    return publisher.publish(tensors_of(version).items(), version).result()


def test_new_receiver_takes_the_anchor_from_the_store_and_deltas_from_the_log(
    settings: BusSettings, store: AnchorStore, tmp_path: Path
) -> None:
    with WeightPublisher(settings, MODEL, store=store) as publisher:
        anchor, delta = publish(publisher, 0), publish(publisher, 1)
    assert (anchor.files, delta.files) == ((next(tmp_path.iterdir()).name,), ())
    with receiving(settings, store) as receiver:
        assert_equal(staged(receiver), tensors_of(1))


def test_small_model_stays_on_the_log(settings: BusSettings, store: AnchorStore, tmp_path: Path) -> None:
    with WeightPublisher(settings, MODEL, store=store, store_above_bytes=MODEL_BYTES) as publisher:
        assert publish(publisher, 0).files == ()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("harm", ["rotten", "cut short", "gone", "no store"])
def test_anchor_unlike_its_manifest_is_refused(
    settings: BusSettings, store: AnchorStore, tmp_path: Path, harm: str
) -> None:
    publisher = WeightPublisher(settings, MODEL, store=store)
    file = tmp_path / publish(publisher, 0).files[0]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if harm == "rotten":
        file.write_bytes(content)
    elif harm == "cut short":
        file.write_bytes(content[: len(content) // 2])
    elif harm == "gone":
        file.unlink()
    reason = {"rotten": Refusal.WRONG_DIGEST, "cut short": Refusal.WRONG_CHUNK}.get(harm, Refusal.MISSING_CHUNK)
    with receiving(settings, None if harm == "no store" else store) as receiver:
        assert receiver.refused(reason, WAIT_SECONDS) == 1
        with WeightPublisher(settings, MODEL) as other:
            publish(other, 1)
        assert_equal(staged(receiver), tensors_of(1))


def test_unneeded_anchor_files_are_deleted(settings: BusSettings, store: AnchorStore, tmp_path: Path) -> None:
    with WeightPublisher(settings, MODEL, anchor_every=0, store=store) as publisher:
        files = [publish(publisher, version).files[0] for version in range(4)]
    assert {file.name for file in tmp_path.iterdir()} == set(files[2:])


def test_tensors_may_change_during_publication(settings: BusSettings, store: AnchorStore) -> None:
    tensors = tensors_of(0)
    with WeightPublisher(settings, MODEL) as publisher:
        published = publisher.publish(tensors.items(), 0)
        for tensor in tensors.values():
            tensor.zero_()
        published.result()
    with receiving(settings, store) as receiver:
        assert_equal(staged(receiver), tensors_of(0))


class CountingWriter(Writer):
    """A writer that tracks the largest number of unacknowledged chunk bytes."""

    on_their_way = 0
    most = 0

    def write(self, topic: Topic, record: Record | EncodedRecord[Any], **options: Any) -> None:
        assert isinstance(record, WeightChunk)
        size, tell = len(record.payload), options.pop("on_delivery")

        def delivered(partition: int, offset: int) -> None:
            self.on_their_way -= size
            tell(partition, offset)

        self.on_their_way += size
        self.most = max(self.most, self.on_their_way)
        super().write(topic, record, on_delivery=delivered, **options)


def test_anchor_waits_for_a_slow_uplink_instead_of_filling_memory(
    settings: BusSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_stores, "MAX_UNACKED_BYTES", 4 * chunk_stores.CHUNK_BYTES)
    writer = CountingWriter(settings, "test")
    sink = chunk_stores.LogChunkSink(writer, 2)
    payload = bytes(20 * chunk_stores.CHUNK_BYTES)
    stored = chunk_stores.put_payload(sink, payload, model_id=MODEL, version=1, tensor="embed")
    sink.close()
    assert sorted((each.partition, each.offset) for each in stored) == [(p, o) for p in range(2) for o in range(10)]
    assert writer.most <= 4 * chunk_stores.CHUNK_BYTES
