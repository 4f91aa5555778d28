"""Trust in versions on a real broker: forged versions, foreign runs, broken chains and rollbacks."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import fsspec
import msgspec
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fsspec.implementations.local import LocalFileSystem

from rose.schemas.weights import FirstChunk, WeightManifest
from rose.topics.admin import create_topics
from rose.topics.catalog import CHUNKS, Partitions, Retention
from rose.topics.reader import Reader
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.weights import receive, retention
from rose.workers.weights.checks import Refusal
from rose.workers.weights.chunk_stores import AnchorStore
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.layout import whole_digest
from rose.workers.weights.manifests import VersionTaken, read_manifests, sign_manifest
from rose.workers.weights.publish import WeightPublisher
from rose.workers.weights.receive import StagedVersion, WeightReceiver
from rose.workers.weights.trust import make_trust
from tests.integration.test_weights import MODEL, WAIT_SECONDS, assert_equal, receiving, slice_of, staged, tensors_of
from tests.support.brokers import AnyBroker, kafka_first
from tests.support.weights_fixtures import newest_manifest

pytestmark = pytest.mark.slow

KEY = Ed25519PrivateKey.generate()


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=2))
    return settings


def publish(publisher: WeightPublisher, version: int, *, seed: int | None = None) -> WeightManifest:
    return publisher.publish(tensors_of(version if seed is None else seed).items(), version).result()


def write(settings: BusSettings, *manifests: WeightManifest, key: Ed25519PrivateKey | None = None) -> None:
    writer = Writer(settings, "test")
    for manifest in manifests:
        sign_manifest(manifest, key).write(writer)
    writer.flush()


def staged_at(receiver: WeightReceiver, version: int) -> StagedVersion:
    """Return the staged version, after the versions before it."""
    found = staged(receiver)
    while found.version < version:
        found = staged(receiver)
    assert found.version == version
    return found


def wait_until_refused(receiver: WeightReceiver, version: int) -> None:
    """Wait until the receiver has refused this version, or the version that it builds on."""
    with receiver._changed:
        met = receiver._changed.wait_for(lambda: (receiver._refused_newest or (-1, ""))[0] == version, WAIT_SECONDS)
    assert met, f"version {version} was neither taken nor refused"


def begins(settings: BusSettings) -> Iterator[int]:
    """Return the first remaining chunk offset of each partition."""
    reader = Reader(settings, "test", group="test")
    try:
        yield from (reader.watermarks((CHUNKS, partition))[0] for partition in range(2))
    finally:
        reader.close()


def test_forged_manifest_of_any_number_blocks_no_honest_version(settings: BusSettings) -> None:
    """The forged manifest does not change the trainer's version numbers either."""
    with receiving(settings, KEY) as receiver, WeightPublisher(settings, MODEL, key=KEY, anchor_every=0) as publisher:
        first = publish(publisher, 0)
        assert_equal(staged(receiver), tensors_of(0))
        write(settings, msgspec.structs.replace(first, version=2**50))
        for version in range(1, 5):
            publish(publisher, version)
        assert_equal(staged_at(receiver, 4), tensors_of(4))
        assert receiver.refusals[Refusal.UNSIGNED] == 1
    with receiving(settings, KEY) as late_receiver:
        assert_equal(staged(late_receiver), tensors_of(4))
    assert WeightPublisher(settings, MODEL, key=KEY).next_version == 5


def test_forged_anchors_delete_no_honest_chunk(settings: BusSettings) -> None:
    settings = replace(settings, retention=Retention(weights=0.0))
    with WeightPublisher(settings, MODEL, key=KEY) as publisher:
        first = publish(publisher, 0)
        late = tuple(FirstChunk(partition=partition, offset=10**6) for partition in range(2))
        forged_manifests = [msgspec.structs.replace(first, version=2**50 + n, first=late) for n in range(2)]
        write(settings, *forged_manifests)
    with WeightPublisher(settings, MODEL, key=KEY) as publisher:
        publish(publisher, 1)
    assert list(begins(settings)) == [0, 0]
    with receiving(settings, KEY) as receiver:
        assert_equal(staged(receiver), tensors_of(1))


def test_chunks_before_their_manifest_survive_deletion_by_another_run(settings: BusSettings) -> None:
    with (
        WeightPublisher(settings, MODEL, run="slow") as slow,
        WeightPublisher(settings, MODEL, run="quick", anchor_every=0) as quick,
    ):
        put = slow.put(slow.snapshot(tensors_of(7).items()), 7, step=7, published_at=0.0)
        for version in range(3):
            publish(quick, version)
        quick.close()  # and with it its deletions
        slow.commit(put)
    with receiving(settings, run="slow") as receiver:
        assert_equal(staged(receiver), tensors_of(7))


def test_broken_version_of_any_number_falls_back_to_the_next_best(settings: BusSettings) -> None:
    """The manifest is signed by the trainer and complete, and its chunks are missing."""
    with receiving(settings, KEY) as receiver, WeightPublisher(settings, MODEL, key=KEY) as publisher:
        honest = publish(publisher, 0)
        gone = tuple(
            msgspec.structs.replace(
                piece, chunks=tuple(msgspec.structs.replace(ref, offset=ref.offset + 10**6) for ref in piece.chunks)
            )
            for piece in honest.slices
        )
        write(settings, msgspec.structs.replace(honest, version=2**50, slices=gone), key=KEY)
        assert receiver.refused(Refusal.MISSING_CHUNK, WAIT_SECONDS) == 1
        assert_equal(staged(receiver), tensors_of(0))
        wait_until_refused(receiver, 2**50)
    with WeightPublisher(settings, MODEL, key=KEY) as publisher, receiving(settings, KEY) as late_receiver:
        assert_equal(staged(late_receiver), tensors_of(0))
        publish(publisher, publisher.next_version, seed=1)
        assert_equal(staged(late_receiver), tensors_of(1))


@kafka_first
def test_receivers_follow_a_rolled_back_trainer_and_not_its_predecessor(settings: BusSettings) -> None:
    with receiving(settings, KEY) as receiver:
        before = WeightPublisher(settings, MODEL, key=KEY)
        for version in range(3):
            publish(before, version)
        assert_equal(staged_at(receiver, 2), tensors_of(2))
        with WeightPublisher(settings, MODEL, key=KEY) as after:
            assert after.newest is not None
            assert (after.newest.order, after.next_version) == ((0, 2), 3)
            with pytest.raises(VersionTaken, match="version 1 cannot be published"):
                publish(after, 1)
            version = after.begin_epoch()
            back = after.publish(tensors_of(0).items(), version, step=0).result()
            assert (back.order, back.base_version, back.step) == ((1, 3), None, 0)
            assert_equal(staged(receiver), tensors_of(0))
            publish(before, 9)  # it does not know yet that it was replaced
            publish(after, 10)
            assert_equal(staged(receiver), tensors_of(10))
        before.close()
    with receiving(settings, KEY) as late_receiver:
        assert_equal(staged(late_receiver), tensors_of(10))


@kafka_first
def test_version_republished_at_a_start_causes_no_swap(settings: BusSettings) -> None:
    with receiving(settings) as receiver:
        with WeightPublisher(settings, MODEL) as publisher:
            for version in range(3):
                publish(publisher, version)
            assert staged_at(receiver, 2).manifest.base_version == 1
        with WeightPublisher(settings, MODEL) as publisher:
            assert publish(publisher, 2).base_version is None
            with receiving(settings) as late_receiver:
                assert staged(late_receiver).manifest.base_version is None
            assert publish(publisher, 3).base_version == 2
            assert_equal(staged(receiver), tensors_of(3))
            assert sum(receiver.refusals.values()) == 0
            with pytest.raises(VersionTaken):
                publish(publisher, 3, seed=4)


def test_old_anchor_is_followed_by_another(settings: BusSettings) -> None:
    with WeightPublisher(settings, MODEL, anchor_max_age_seconds=0.0) as publisher:
        assert [publish(publisher, version).base_version for version in range(3)] == [None] * 3


@pytest.mark.parametrize("how", ["another namespace", "another run"])
def test_versions_of_another_run_are_refused_despite_the_same_key(settings: BusSettings, how: str) -> None:
    """The manifest of the other run is copied byte for byte, and its chunks exist."""
    with receiving(settings, KEY) as receiver:
        other_publisher = WeightPublisher(settings, MODEL, key=KEY, run="other")
        manifest = publish(other_publisher, 7)
        if how == "another namespace":
            write(settings, msgspec.structs.replace(manifest, run="other.:run"), key=KEY)
        assert receiver.refused(Refusal.STRANGER, WAIT_SECONDS) >= 1
        assert receiver.staged() is None
        assert receiver.refused_newest is not None
        assert (receiver.refused_newest[0], "set run.name" in receiver.refused_newest[1]) == (-1, True)
        with WeightPublisher(settings, MODEL, key=KEY) as publisher:
            assert publisher.newest is None
            assert publisher.next_version == 8, "nobody takes one run's number for another's"
            publish(publisher, 8)
        assert_equal(staged(receiver), tensors_of(8))
        other_publisher.close()


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["its chunks are gone", "it builds on other bytes"])
def test_broken_chain_costs_one_anchor_in_total(settings: BusSettings, harm: str) -> None:
    """The versions change in small steps, so that a delta is a small part of an anchor."""
    generator = torch.Generator().manual_seed(5)
    master = tensors_of(0)

    def step(publisher: WeightPublisher, version: int) -> WeightManifest:
        for tensor in master.values():
            tensor *= 1 + 3e-4 * torch.rand(tensor.shape, generator=generator)
        snapshot = publisher.snapshot((name, tensor.bfloat16()) for name, tensor in master.items())
        return publisher.put(snapshot, version, step=version, published_at=0.0)

    publisher = WeightPublisher(settings, MODEL)
    anchor = step(publisher, 0)
    write(settings, anchor)
    with receiving(settings) as receiver:
        assert staged(receiver).version == 0
        broken = step(publisher, 1)
        number = slice_of(broken, "embed")
        piece = broken.slices[number]
        if harm == "its chunks are gone":
            piece = msgspec.structs.replace(piece, chunks=(msgspec.structs.replace(piece.chunks[0], offset=10**6),))
            reason, most = Refusal.MISSING_CHUNK, 0
        else:
            piece = msgspec.structs.replace(piece, base_digest=b"other" + bytes(11))
            reason, most = Refusal.WRONG_BASE, anchor.payload_bytes
        before = receiver.fetched_bytes
        slices = (*broken.slices[:number], piece, *broken.slices[number + 1 :])
        with_harm = msgspec.structs.replace(broken, slices=slices)
        write(settings, msgspec.structs.replace(with_harm, digest=whole_digest(with_harm)))
        assert receiver.refused(reason, WAIT_SECONDS) == 1
        deltas = [step(publisher, version) for version in range(2, 8)]
        for delta in deltas:
            write(settings, delta)
            wait_until_refused(receiver, delta.version)
        last = WeightPublisher(settings, MODEL)
        write(settings, step(last, 8))
        assert staged(receiver).version == 8
        fetched = receiver.fetched_bytes - before
        allowed = most + anchor.payload_bytes + sum(delta.payload_bytes for delta in deltas) + anchor.payload_bytes // 2
        assert fetched <= allowed, "an anchor was fetched again for the same break"


def test_two_runs_in_one_store_do_not_interfere(settings: BusSettings, tmp_path: Path) -> None:
    """This also holds for two runs of one name on different brokers."""
    other = BusSettings(settings.bootstrap, f"{settings.namespace}other.", settings.properties, settings.embedded)
    create_topics(other, Partitions(home=1, slots=1, samples=1, chunks=2))
    store = AnchorStore(str(tmp_path))
    with (
        WeightPublisher(settings, MODEL, anchor_every=0, store=store) as busy,
        WeightPublisher(other, MODEL, anchor_every=0, store=store) as quiet,
    ):
        only = publish(quiet, 0)
        for version in range(5):
            publish(busy, version)
    assert only.files[0] in {file.name for file in tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) == 3
    with receiving(other, store=store) as receiver:
        assert_equal(staged(receiver), tensors_of(0))


class NoDeleting(LocalFileSystem):  # type: ignore[misc]
    """A bucket that may be written and not cleaned. Its driver raises no OSError."""

    protocol = "nodeleting"

    def rm_file(self, path: str) -> NoReturn:
        raise RuntimeError(f"AccessDenied: {path}")


def test_failed_store_cleanup_ends_no_trainer(settings: BusSettings, tmp_path: Path) -> None:
    fsspec.register_implementation("nodeleting", NoDeleting, clobber=True)
    with WeightPublisher(settings, MODEL, anchor_every=0, store=AnchorStore(f"nodeleting://{tmp_path}")) as publisher:
        for version in range(4):
            publish(publisher, version)
    assert len(list(tmp_path.iterdir())) == 4
    trust = make_trust(settings, MODEL, WeightsConfig())
    newest = newest_manifest(settings, trust)
    assert newest is not None
    assert newest.version == 3
    named = {file for manifest in map(trust.verified, read_manifests(settings)) if manifest for file in manifest.files}
    assert named == {file.name for file in tmp_path.iterdir()}, "what still lies there is still named"


def test_failed_chunk_deletion_ends_no_trainer(settings: BusSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = BusSettings(settings.bootstrap, "nowhere.", settings.properties, settings.embedded)
    release = retention.delete_before  # type: ignore[attr-defined]
    monkeypatch.setattr(retention, "delete_before", lambda _, *needed, **options: release(nowhere, *needed, **options))
    with WeightPublisher(settings, MODEL, anchor_every=0) as publisher:
        for version in range(3):
            publish(publisher, version)
    with receiving(settings) as receiver:
        assert_equal(staged(receiver), tensors_of(2))


@kafka_first
def test_version_with_any_exception_falls_back_to_the_next_best(
    settings: BusSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = receive.check_manifest  # type: ignore[attr-defined]

    def raises(manifest: WeightManifest, *arguments: object, **options: object) -> None:
        if manifest.version == 3:
            raise MemoryError("of all versions this one")
        check(manifest, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(receive, "check_manifest", raises)
    with receiving(settings) as receiver, WeightPublisher(settings, MODEL) as publisher:
        for version in range(4):
            publish(publisher, version)
        assert receiver.refused(Refusal.UNREADABLE, WAIT_SECONDS) == 1
        assert_equal(staged_at(receiver, 2), tensors_of(2))
        wait_until_refused(receiver, 3)


def test_version_unfit_for_the_engine_is_refused_unfetched_with_the_reason(settings: BusSettings) -> None:
    with receiving(settings, engine_dtype="bfloat16") as receiver:
        with WeightPublisher(settings, MODEL) as publisher:
            publish(publisher, 0)
        assert receiver.refused(Refusal.WRONG_DTYPE, WAIT_SECONDS) == 1
        assert receiver.refused_newest is not None
        assert "embed is float32, which an engine in bfloat16 cannot hold" in receiver.refused_newest[1]
        assert receiver.fetched_bytes == 0
        with WeightPublisher(settings, MODEL, dtype=torch.bfloat16) as publisher:
            publish(publisher, 1)
        assert staged(receiver).version == 1
        receiver.refuse(1, "the engine could not")
        assert receiver.refused_newest == (1, "the engine could not")
