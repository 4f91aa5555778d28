"""Policy versions on a real broker: a receiver takes a complete proven version, or keeps its current version."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest
import torch
from confluent_kafka import Producer, TopicPartition
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from rose.schemas.errors import UsageError
from rose.schemas.weights import WeightChunk, WeightManifest
from rose.topics.admin import connect, create_topics
from rose.topics.catalog import CHUNKS, MANIFESTS, Partitions, Retention
from rose.topics.log_reader import read_whole_topics
from rose.topics.reader import Reader
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.weights import manifests
from rose.workers.weights.checks import Refusal
from rose.workers.weights.codec import Changes
from rose.workers.weights.config import DEFAULT_RUN, WeightsConfig
from rose.workers.weights.gpu_changes import ChangeCollector
from rose.workers.weights.layout import Box, digest_of
from rose.workers.weights.manifests import sign_manifest
from rose.workers.weights.publish import WeightPublisher
from rose.workers.weights.receive import StagedVersion, WeightReceiver
from rose.workers.weights.trust import make_trust
from tests.support.brokers import AnyBroker, kafka_first
from tests.support.fake_triton_kernels import failing_collect, fake_collect, forgetful_collect, use_kernels
from tests.support.weights_fixtures import newest_manifest

pytestmark = [pytest.mark.slow, kafka_first]

MODEL = "policy"
WAIT_SECONDS = 60.0
"""A version that has not arrived within this time is lost."""


def tensors_of(seed: int, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return a small model: a tensor of several chunks, a scalar tensor, and an empty tensor."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed": (1000, 700), "norm": (64,), "scale": (), "none": (0, 4)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


SHAPES = {name: tuple(tensor.shape) for name, tensor in tensors_of(0).items()}


class Trainer:
    """The publishing side."""

    def __init__(self, settings: BusSettings, *, run: str = DEFAULT_RUN) -> None:
        self.settings = settings
        self.writer = Writer(settings, "test")
        self._publisher = WeightPublisher(settings, MODEL, run=run)

    def publish(self, version: int, *, tensors: dict[str, Tensor] | None = None) -> WeightManifest:
        """Store the chunks of a version without its manifest."""
        named = (tensors_of(version) if tensors is None else tensors).items()
        return self._publisher.put(self._publisher.snapshot(named), version, step=version, published_at=0.0)

    def write(self, *manifests: WeightManifest, key: Ed25519PrivateKey | None = None) -> None:
        for manifest in manifests:
            sign_manifest(manifest, key).write(self.writer)
        self.writer.flush()


@pytest.fixture
def trainer(broker: AnyBroker, namespace: str) -> Trainer:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=2))
    return Trainer(settings)


@contextmanager
def receiving(
    settings: BusSettings, key: Ed25519PrivateKey | None = None, *, run: str = DEFAULT_RUN, **options: object
) -> Iterator[WeightReceiver]:
    """Run a receiver. `key` is that of the trainer."""
    trust = dataclasses.replace(
        make_trust(settings, MODEL, WeightsConfig(run=run)), key=None if key is None else key.public_key()
    )
    receiver = WeightReceiver(settings, trust, **({"shapes": SHAPES} | options))  # type: ignore[arg-type]
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


def slice_of(manifest: WeightManifest, tensor: str) -> int:
    """Return the first slice of a tensor."""
    return next(n for n, piece in enumerate(manifest.slices) if manifest.tensors[piece.tensor].name == tensor)


def with_ref(manifest: WeightManifest, number: int, **change: object) -> WeightManifest:
    """Return the manifest with another reference to the first chunk of a slice."""
    piece = manifest.slices[number]
    moved = msgspec.structs.replace(piece.chunks[0], **change)
    piece = msgspec.structs.replace(piece, chunks=(moved, *piece.chunks[1:]))
    return msgspec.structs.replace(manifest, slices=(*manifest.slices[:number], piece, *manifest.slices[number + 1 :]))


def replace_chunk(trainer: Trainer, manifest: WeightManifest, number: int, **change: object) -> WeightManifest:
    """Store a changed chunk of a slice with one chunk; return a manifest that refers to it."""
    piece = manifest.slices[number]
    name = manifest.tensors[piece.tensor].name
    chunk = WeightChunk(model_id=MODEL, version=manifest.version, tensor=name, part=0, payload=b"")
    places: list[tuple[int, int]] = []
    changed = msgspec.structs.replace(chunk, **change)
    trainer.writer.write(CHUNKS, changed, key=name, on_delivery=lambda *place: places.append(place))
    trainer.writer.flush()
    return with_ref(manifest, number, partition=places[0][0], offset=places[0][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_version_is_received_bit_for_bit(trainer: Trainer, dtype: torch.dtype) -> None:
    tensors = tensors_of(1, dtype=dtype)
    manifest = trainer.publish(1, tensors=tensors)
    assert max(len(piece.chunks) for piece in manifest.slices) > 1
    assert manifest.digest == WeightPublisher(trainer.settings, MODEL).snapshot(tensors.items()).digest()
    with receiving(trainer.settings) as receiver:
        trainer.write(manifest)
        version = staged(receiver)
        assert version.version == 1
        assert_equal(version, tensors)
        assert receiver.staged() is None


@pytest.mark.parametrize("collect", [fake_collect, forgetful_collect, failing_collect])
def test_versions_are_right_whatever_a_gpu_collects(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, collect: Callable[..., list[Changes]]
) -> None:
    """All versions are collected before the first is published, and the tensors change in place."""
    use_kernels(monkeypatch, collect)
    collector = ChangeCollector(device_type="cpu")
    tensors = tensors_of(1, dtype=torch.bfloat16)
    with (
        WeightPublisher(trainer.settings, MODEL, collector=collector) as publisher,
        receiving(trainer.settings) as receiver,
    ):
        collected = []
        for version in range(3):
            collected.append(
                (publisher.snapshot(tensors.items()), {name: each.clone() for name, each in tensors.items()})
            )
            assert bool(collected[-1][0].changes) == (version > 0 and collect is not failing_collect)
            tensors["embed"][::7] *= 1.01
        for version, (snapshot, expected) in enumerate(collected):
            manifest = publisher.publish_snapshot(snapshot, version).result()
            assert manifest.base_version == (version - 1 if version else None)
            assert snapshot.changes == {}
            assert_equal(staged(receiver), expected)
    assert collector.stopped == (collect is not fake_collect)


def test_chunks_without_manifest_are_ignored_and_a_new_receiver_takes_the_newest(trainer: Trainer) -> None:
    trainer.write(trainer.publish(1), trainer.publish(2))
    trainer.publish(3)
    with receiving(trainer.settings) as receiver:
        version = staged(receiver)
        assert version.version == 2
        assert_equal(version, tensors_of(2))
        trainer.write(trainer.publish(4))
        assert staged(receiver).version == 4


def test_new_receiver_finds_its_model_far_behind_other_models(trainer: Trainer) -> None:
    mine = trainer.publish(1)
    trainer.write(mine)
    others = [msgspec.structs.replace(mine, model_id="other", version=version) for version in range(100)]
    trainer.write(*others)
    assert newest_manifest(trainer.settings, make_trust(trainer.settings, MODEL, WeightsConfig())) == mine
    with receiving(trainer.settings) as receiver:
        assert staged(receiver).version == 1


def test_duplicate_manifest_is_staged_once(trainer: Trainer) -> None:
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
        ({"payload": "flipped"}, Refusal.WRONG_DIGEST),
        ({"payload": "cut"}, Refusal.WRONG_CHUNK),
        ({"version": 7}, Refusal.WRONG_CHUNK),
        ({"tensor": "scale"}, Refusal.WRONG_CHUNK),
    ],
)
def test_altered_chunk_rejects_the_version(trainer: Trainer, change: dict[str, object], refusal: Refusal) -> None:
    with receiving(trainer.settings) as receiver:
        trainer.write(trainer.publish(1))
        assert staged(receiver).version == 1
        honest = trainer.publish(2)
        norm = slice_of(honest, "norm")
        size = honest.slices[norm].chunks[0].bytes
        if "payload" in change:
            change = {"payload": bytes(size - (change["payload"] == "cut"))}
        trainer.write(replace_chunk(trainer, honest, norm, **change))
        assert receiver.refused(refusal, WAIT_SECONDS) == 1
        assert receiver.staged() is None
        trainer.write(honest, trainer.publish(3))
        version = staged(receiver)
        assert_equal(version if version.version == 3 else staged(receiver), tensors_of(3))


def test_tensors_of_another_version_are_refused_by_the_version_digest(trainer: Trainer) -> None:
    first, second = trainer.publish(1), trainer.publish(2)
    mixed = msgspec.structs.replace(first, digest=second.digest)
    with receiving(trainer.settings) as receiver:
        trainer.write(mixed)
        assert receiver.refused(Refusal.WRONG_DIGEST, WAIT_SECONDS) == 1


@pytest.mark.parametrize("where", ["beyond_the_end", "no_such_partition"])
def test_nonexistent_offset_is_a_missing_chunk(trainer: Trainer, where: str) -> None:
    manifest = trainer.publish(1)
    change = {"offset": 10**6} if where == "beyond_the_end" else {"partition": 99}
    with receiving(trainer.settings) as receiver:
        trainer.write(with_ref(manifest, 0, **change))
        assert receiver.refused(Refusal.MISSING_CHUNK, WAIT_SECONDS) == 1


def test_chunks_deleted_by_retention_reject_the_version(trainer: Trainer) -> None:
    old = trainer.publish(1)
    cut = TopicPartition(
        trainer.settings.topic(CHUNKS),
        0,
        max(chunk.offset for piece in old.slices for chunk in piece.chunks if chunk.partition == 0) + 1,
    )
    admin = connect(trainer.settings)
    for deleted in admin.delete_records([cut]).values():
        deleted.result()
    with receiving(trainer.settings) as receiver:
        trainer.write(old)
        assert receiver.refused(Refusal.MISSING_CHUNK, WAIT_SECONDS) == 1
        trainer.write(Trainer(trainer.settings).publish(3))
        assert staged(receiver).version == 3


def test_undecodable_chunk_is_a_missing_chunk(trainer: Trainer) -> None:
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
    with receiving(trainer.settings) as receiver:
        trainer.write(with_ref(manifest, 0, partition=0, offset=places[0]))
        assert receiver.refused(Refusal.MISSING_CHUNK, WAIT_SECONDS) == 1


def test_unknown_tensor_rejects_the_version(trainer: Trainer) -> None:
    with receiving(trainer.settings) as receiver:
        trainer.write(trainer.publish(1, tensors={**tensors_of(1), "extra": torch.zeros(3)}))
        assert receiver.refused(Refusal.UNKNOWN_TENSOR, WAIT_SECONDS) == 1
        trainer.write(Trainer(trainer.settings).publish(2, tensors={**tensors_of(2), "norm": torch.zeros(65)}))
        assert receiver.refused(Refusal.BAD_SHAPE, WAIT_SECONDS) == 1


def test_manifest_of_an_aborted_transaction_is_ignored(trainer: Trainer) -> None:
    manifest = trainer.publish(1)
    writer = Writer(trainer.settings, "test", transactional_id="test")
    writer.begin()
    sign_manifest(manifest, None).write(writer)
    writer.flush()
    writer.abort()
    with receiving(trainer.settings) as receiver:
        trainer.write(Trainer(trainer.settings).publish(0))
        assert staged(receiver).version == 0


def test_late_and_continuous_receivers_have_the_same_weights(trainer: Trainer) -> None:
    """The bfloat16 weights change in small steps, so versions are deltas with a small part of the bytes of an
    anchor."""
    tensors = tensors_of(1, dtype=torch.bfloat16)
    master = {name: tensor.float() for name, tensor in tensors.items()}
    anchor = trainer.publish(0, tensors=tensors)
    trainer.write(anchor)
    with receiving(trainer.settings) as follower:
        assert staged(follower).version == 0
        for version in range(1, 4):
            master = {name: tensor * (1 + 1e-4 * version) for name, tensor in master.items()}
            tensors = {name: tensor.bfloat16() for name, tensor in master.items()}
            delta = trainer.publish(version, tensors=tensors)
            assert delta.base_version == version - 1
            assert delta.payload_bytes < anchor.payload_bytes / 8
            trainer.write(delta)
            with receiving(trainer.settings) as receiver:
                assert_equal(staged(receiver), tensors)
        followed = staged(follower)
        while followed.version < 3:
            followed = staged(follower)
        assert_equal(followed, tensors)


def test_unusable_version_is_repaired_by_the_next_anchor(trainer: Trainer) -> None:
    trainer.write(trainer.publish(0))
    with receiving(trainer.settings) as receiver:
        assert staged(receiver).version == 0
        trainer.publish(1)  # its manifest is lost
        trainer.write(trainer.publish(2))
        assert receiver.refused(Refusal.WRONG_BASE, WAIT_SECONDS) == 1
        assert receiver.staged() is None
        trainer.write(Trainer(trainer.settings).publish(3))
        assert_equal(staged(receiver), tensors_of(3))


def test_manifest_of_an_older_version_changes_nothing(trainer: Trainer) -> None:
    first, second = trainer.publish(0), trainer.publish(1)
    trainer.write(first, second)
    with receiving(trainer.settings) as receiver:
        version = staged(receiver)
        while version.version < 1:
            version = staged(receiver)
        trainer.write(first, second)
        trainer.write(trainer.publish(2))
        assert_equal(staged(receiver), tensors_of(2))


def test_with_a_trusted_key_only_its_owner_is_accepted(trainer: Trainer) -> None:
    mine, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    with receiving(trainer.settings, mine) as receiver:
        honest = trainer.publish(1)
        trainer.write(honest)
        assert receiver.refused(Refusal.UNSIGNED, WAIT_SECONDS) == 1
        assert receiver.refused_newest is not None
        assert (receiver.refused_newest[0], "signed by nobody" in receiver.refused_newest[1]) == (-1, True)
        trainer.write(honest, key=other)
        assert receiver.refused(Refusal.FORGED, WAIT_SECONDS) == 1
        trainer.write(honest, key=mine)
        assert_equal(staged(receiver), tensors_of(1))
        assert receiver.refused_newest is None


def test_slices_in_an_index_are_received(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions are a signed anchor and a delta, for an existing receiver and a new one."""
    monkeypatch.setattr(manifests, "INLINE_BYTES", 0)
    key = Ed25519PrivateKey.generate()
    with (
        receiving(trainer.settings, key) as receiver,
        WeightPublisher(trainer.settings, MODEL, key=key) as publisher,
    ):
        for version in range(2):
            publisher.publish(tensors_of(version).items(), version)
            assert_equal(staged(receiver), tensors_of(version))
    newest = newest_manifest(trainer.settings, make_trust(trainer.settings, MODEL, WeightsConfig()))
    assert newest is not None
    assert newest.index
    assert not newest.slices
    with receiving(trainer.settings, key) as late_receiver:
        assert_equal(staged(late_receiver), tensors_of(1))


def test_sharded_receiver_fetches_slices_that_overlap_its_shard(trainer: Trainer) -> None:
    """The shard has the upper rows of the embedding and no other tensor."""
    tensors = {**tensors_of(1), "embed": torch.randn(8600, 700, generator=torch.Generator().manual_seed(1))}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    manifest = trainer.publish(1, tensors=tensors)
    with (
        receiving(trainer.settings, shapes=shapes, shard={"embed": Box(0, 1000, 0, 700)}) as shard,
        receiving(trainer.settings, shapes=shapes) as whole,
    ):
        trainer.write(manifest)
        version = staged(shard)
        assert version.tensors.keys() == {"embed"}
        assert torch.equal(version.tensors["embed"][:1000], tensors["embed"][:1000])
        assert version.bytes < staged(whole).bytes * 0.6, "of what came over the link, not of what was asked for"


def test_unneeded_chunks_are_deleted(trainer: Trainer) -> None:
    """Chunks are deleted two anchors later, and not before."""
    settings = replace(trainer.settings, retention=Retention(weights=0.0))
    for version in range(3):
        with WeightPublisher(settings, MODEL, anchor_every=0) as publisher:
            publisher.publish(tensors_of(version).items())
    reader = Reader(trainer.settings, "test", group="test")
    try:
        kept = {partition: reader.watermarks((CHUNKS, partition)) for partition in range(2)}
    finally:
        reader.close()
    assert all(0 < low < high for low, high in kept.values())
    with receiving(trainer.settings) as receiver:
        assert_equal(staged(receiver), tensors_of(2))


def test_non_finite_version_is_refused_before_publication(trainer: Trainer) -> None:
    with WeightPublisher(trainer.settings, MODEL) as publisher:
        publisher.publish(tensors_of(0).items()).result()
        before = len(list(read_whole_topics(trainer.settings, [CHUNKS, MANIFESTS])))
        spoiled = tensors_of(1)
        spoiled["embed"][999, 699] = float("inf")
        with pytest.raises(UsageError, match="embed holds a value that is not finite"):
            publisher.publish(spoiled.items())
    assert len(list(read_whole_topics(trainer.settings, [CHUNKS, MANIFESTS]))) == before


def test_non_finite_version_of_any_publisher_is_not_accepted(trainer: Trainer) -> None:
    snapshot = trainer._publisher.snapshot(tensors_of(1).items())
    snapshot.words["norm"][3] = 0xFFC00000  # as a trainer of another
    for name, box in snapshot.digests:  # kind would publish without checks
        snapshot.digests[name, box] = digest_of(snapshot.within(name, box).data)
    with receiving(trainer.settings) as receiver:
        trainer.write(trainer._publisher.put(snapshot, 1, step=1, published_at=0.0))
        assert receiver.refused(Refusal.NOT_FINITE, WAIT_SECONDS) == 1
        assert receiver.refused_newest == (1, "version 1: norm holds a value that is not finite")
        assert receiver.staged() is None
        sound = Trainer(trainer.settings)
        sound.write(sound.publish(2))
        assert_equal(staged(receiver), tensors_of(2))
