"""Policy versions over a real broker: a receiver takes a whole and proven version, or keeps the one it has."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch
from confluent_kafka import Producer, TopicPartition
from torch import Tensor

from schemas.weights import WeightChunk, WeightManifest
from tests.brokers import AnyBroker
from topics.admin import create_topics, reach
from topics.bus import Writer
from topics.catalog import CHUNKS, MANIFESTS, Partitions
from topics.settings import BusSettings
from workers.weights.layout import Refusal
from workers.weights.manifests import manifest_key, newest_manifest
from workers.weights.publish import WeightPublisher, tensors_digest
from workers.weights.receive import StagedVersion, WeightReceiver

MODEL = "policy"
WAIT_SECONDS = 60.0
"""A version that is not there by then has been lost."""


def tensors_of(seed: int, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A small model: some chunks of one tensor, a tensor without axes, an empty one."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed": (1000, 700), "norm": (64,), "scale": (), "none": (0, 4)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


SHAPES = {name: tuple(tensor.shape) for name, tensor in tensors_of(0).items()}


class Trainer:
    """The side that publishes."""

    def __init__(self, settings: BusSettings) -> None:
        self.settings = settings
        self.writer = Writer(settings, "test")
        self._publisher = WeightPublisher(settings, MODEL)

    def publish(self, version: int, *, tensors: dict[str, Tensor] | None = None) -> WeightManifest:
        """Store the chunks of a version; its manifest is not on the log yet."""
        named = (tensors_of(version) if tensors is None else tensors).items()
        return self._publisher.publish(named, version, step=version, published_at=0.0)

    def write(self, *manifests: WeightManifest) -> None:
        for manifest in manifests:
            self.writer.write(MANIFESTS, manifest, key=manifest_key(manifest))
        self.writer.flush()


@pytest.fixture
def trainer(broker: AnyBroker, namespace: str) -> Trainer:
    settings = BusSettings(broker.bootstrap, namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=2))
    return Trainer(settings)


@contextmanager
def receiving(settings: BusSettings) -> Iterator[WeightReceiver]:
    receiver = WeightReceiver(settings, MODEL, shapes=SHAPES)
    receiver.start()
    try:
        yield receiver
    finally:
        receiver.stop()


def staged(receiver: WeightReceiver) -> StagedVersion:
    version = receiver.staged(WAIT_SECONDS)
    assert version is not None, "no version was staged"
    return version


def assert_equal(version: StagedVersion, tensors: dict[str, Tensor]) -> None:
    assert version.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert version.tensors[name].dtype == tensor.dtype
        assert torch.equal(version.tensors[name], tensor), name


def replace_chunk(trainer: Trainer, manifest: WeightManifest, number: int, **change: object) -> WeightManifest:
    """Store a changed chunk, and point the manifest at it."""
    ref = manifest.chunks[number]
    rows = tensors_of(manifest.version)[ref.tensor][ref.row_start : ref.row_start + ref.rows]
    chunk = WeightChunk(
        model_id=MODEL,
        version=manifest.version,
        tensor=ref.tensor,
        row_start=ref.row_start,
        rows=ref.rows,
        payload=rows.numpy().tobytes(),
    )
    places: list[tuple[int, int]] = []
    changed = msgspec.structs.replace(chunk, **change)
    trainer.writer.write(CHUNKS, changed, key=ref.tensor, on_delivery=lambda *place: places.append(place))
    trainer.writer.flush()
    moved = msgspec.structs.replace(ref, partition=places[0][0], offset=places[0][1])
    chunks = [*manifest.chunks[:number], moved, *manifest.chunks[number + 1 :]]
    return msgspec.structs.replace(manifest, chunks=tuple(chunks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_version_arrives_bit_for_bit(trainer: Trainer, dtype: torch.dtype) -> None:
    tensors = tensors_of(1, dtype=dtype)
    manifest = trainer.publish(1, tensors=tensors)
    assert len(manifest.chunks) > len([tensor for tensor in tensors.values() if tensor.numel()])
    assert manifest.digest == tensors_digest(tensors.items())
    with receiving(trainer.settings) as receiver:
        trainer.write(manifest)
        version = staged(receiver)
        assert version.version == 1
        assert_equal(version, tensors)
        assert receiver.staged() is None


def test_chunks_without_a_manifest_are_no_version_and_a_joiner_takes_the_newest(trainer: Trainer) -> None:
    trainer.write(trainer.publish(1), trainer.publish(2))
    trainer.publish(3)
    with receiving(trainer.settings) as receiver:
        version = staged(receiver)
        assert version.version == 2
        assert_equal(version, tensors_of(2))
        trainer.write(trainer.publish(4))
        assert staged(receiver).version == 4


def test_a_joiner_finds_its_model_far_behind_those_of_others(trainer: Trainer) -> None:
    mine = trainer.publish(1)
    trainer.write(mine)
    others = [msgspec.structs.replace(mine, model_id="other", version=version) for version in range(100)]
    trainer.write(*others)
    found, begin = newest_manifest(trainer.settings, MODEL)
    assert found is not None
    assert (found.manifest, found.offset) == (mine, 0)
    assert begin == 101
    with receiving(trainer.settings) as receiver:
        assert staged(receiver).version == 1


def test_a_manifest_that_comes_again_is_staged_once(trainer: Trainer) -> None:
    manifest = trainer.publish(1)
    with receiving(trainer.settings) as receiver:
        trainer.write(manifest)
        assert staged(receiver).version == 1
        trainer.write(manifest, trainer.publish(2))
        assert staged(receiver).version == 2
        assert receiver.staged() is None


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"payload": bytes(256)}, Refusal.WRONG_DIGEST),
        ({"payload": bytes(255)}, Refusal.WRONG_CHUNK),
        ({"version": 7}, Refusal.WRONG_CHUNK),
        ({"encoding": "sparse"}, Refusal.UNSUPPORTED),
    ],
)
def test_a_chunk_that_is_not_what_it_should_be_refuses_the_version(
    trainer: Trainer, change: dict[str, object], refusal: Refusal
) -> None:
    with receiving(trainer.settings) as receiver:
        trainer.write(trainer.publish(1))
        assert staged(receiver).version == 1
        honest = trainer.publish(2)
        norm = next(number for number, ref in enumerate(honest.chunks) if ref.tensor == "norm")
        trainer.write(replace_chunk(trainer, honest, norm, **change))
        assert receiver.refused(refusal, WAIT_SECONDS) == 1
        assert receiver.staged() is None
        trainer.write(trainer.publish(2))
        assert_equal(staged(receiver), tensors_of(2))


def test_tensors_of_another_version_are_refused_by_the_digest_of_the_whole(trainer: Trainer) -> None:
    mixed = msgspec.structs.replace(trainer.publish(1), digest=trainer.publish(2).digest)
    with receiving(trainer.settings) as receiver:
        trainer.write(mixed)
        assert receiver.refused(Refusal.WRONG_DIGEST, WAIT_SECONDS) == 1


@pytest.mark.parametrize("where", ["beyond_the_end", "no_such_partition"])
def test_a_place_that_the_log_does_not_have_is_a_missing_chunk(trainer: Trainer, where: str) -> None:
    manifest = trainer.publish(1)
    change = {"offset": 10**6} if where == "beyond_the_end" else {"partition": 99}
    away = msgspec.structs.replace(manifest.chunks[0], **change)
    with receiving(trainer.settings) as receiver:
        trainer.write(msgspec.structs.replace(manifest, chunks=(away, *manifest.chunks[1:])))
        assert receiver.refused(Refusal.MISSING_CHUNK, WAIT_SECONDS) == 1


def test_chunks_that_retention_has_deleted_refuse_the_version(trainer: Trainer) -> None:
    old = trainer.publish(1)
    cut = TopicPartition(
        trainer.settings.topic(CHUNKS), 0, max(ref.offset for ref in old.chunks if ref.partition == 0) + 1
    )
    trainer.publish(2)
    admin = reach(trainer.settings)
    for deleted in admin.delete_records([cut]).values():
        deleted.result()
    with receiving(trainer.settings) as receiver:
        trainer.write(old)
        assert receiver.refused(Refusal.MISSING_CHUNK, WAIT_SECONDS) == 1
        trainer.write(trainer.publish(3))
        assert staged(receiver).version == 3


def test_a_chunk_that_does_not_decode_is_a_missing_chunk(trainer: Trainer) -> None:
    manifest = trainer.publish(1)
    places: list[int] = []
    producer = Producer(trainer.settings.producer("test"))
    producer.produce(
        trainer.settings.topic(CHUNKS),
        b"\xc1",
        partition=0,
        on_delivery=lambda _, message: places.append(message.offset()),
    )
    producer.flush()
    broken = msgspec.structs.replace(manifest.chunks[0], partition=0, offset=places[0])
    with receiving(trainer.settings) as receiver:
        trainer.write(msgspec.structs.replace(manifest, chunks=(broken, *manifest.chunks[1:])))
        assert receiver.refused(Refusal.MISSING_CHUNK, WAIT_SECONDS) == 1


def test_a_tensor_that_the_model_does_not_have_refuses_the_version(trainer: Trainer) -> None:
    with receiving(trainer.settings) as receiver:
        trainer.write(trainer.publish(1, tensors={**tensors_of(1), "extra": torch.zeros(3)}))
        assert receiver.refused(Refusal.UNKNOWN_TENSOR, WAIT_SECONDS) == 1
        trainer.write(trainer.publish(2, tensors={**tensors_of(2), "norm": torch.zeros(65)}))
        assert receiver.refused(Refusal.BAD_SHAPE, WAIT_SECONDS) == 1


def test_a_manifest_of_an_aborted_transaction_is_no_version(trainer: Trainer) -> None:
    manifest = trainer.publish(1)
    writer = Writer(trainer.settings, "test", transactional_id="test")
    writer.begin()
    writer.write(MANIFESTS, manifest, key=manifest_key(manifest))
    writer.flush()
    writer.abort()
    with receiving(trainer.settings) as receiver:
        trainer.write(trainer.publish(0))
        assert staged(receiver).version == 0
