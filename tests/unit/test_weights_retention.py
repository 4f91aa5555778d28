"""Deletion: no version from a run's second last anchor on loses a chunk, under any forgery."""

from itertools import count

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.schemas.weights import FirstChunk, WeightManifest
from rose.topics.catalog import MANIFESTS
from rose.topics.records import Envelope, RawMessage
from rose.workers.weights.chunk_stores import lowest_offsets
from rose.workers.weights.config import WeightsConfig
from rose.workers.weights.lineage import Placed
from rose.workers.weights.manifests import manifest_key, sign_manifest
from rose.workers.weights.retention import QUIET_SECONDS, live_manifests, what_is_released
from tests.support.weights_fixtures import bare
from tests.unit.test_weights_trust import KEY, OTHER_KEY, TRUST, as_read

OTHER = "other.:run"


def manifest(version: int, base: int | None, *places: tuple[int, int], **fields: object) -> WeightManifest:
    first = tuple(FirstChunk(partition=partition, offset=offset) for partition, offset in places)
    return bare(version, base, first=first, **fields)


def versions(manifests: list[WeightManifest]) -> list[int]:
    placed = [Placed(each, offset) for offset, each in enumerate(manifests)]
    return [each.manifest.version for each in live_manifests(placed)]


def honest(offset: int, each: WeightManifest, *, at: float = 0.0) -> Envelope:
    return msgspec.structs.replace(as_read(sign_manifest(each, KEY), offset=offset), timestamp_seconds=at)


def forged(offset: int, each: WeightManifest) -> Envelope:
    return as_read(sign_manifest(each, OTHER_KEY), offset=offset)


def tombstone(offset: int, each: WeightManifest) -> Envelope:
    return end(offset, manifest_key(each))


def end(offset: int, key: str) -> Envelope:
    return Envelope(None, MANIFESTS, 0, offset, key, 0.0, RawMessage(None, None))


def compacted(log: list[Envelope]) -> list[Envelope]:
    """Return the newest record of each key, without tombstones."""
    newest = {each.key: each for each in log}
    return [each for each in log if newest[each.key] is each and each.record is not None]


def test_all_versions_of_the_first_two_anchors_are_needed() -> None:
    assert versions([manifest(0, None), manifest(1, 0), manifest(2, None)]) == [0, 1, 2]


def test_versions_before_the_second_last_anchor_are_not_needed() -> None:
    found = [manifest(version, None if version % 3 == 0 else version - 1) for version in range(11)]
    assert versions(found) == [6, 7, 8, 9, 10]


def test_republished_anchor_counts_as_an_anchor() -> None:
    found = [manifest(0, None), manifest(1, 0), manifest(1, None), manifest(2, 1), manifest(2, None)]
    assert versions(found) == [1, 2, 2]


def test_older_epoch_is_older_at_any_version_number() -> None:
    found = [manifest(8, None), manifest(9, 8), manifest(10, None, epoch=1), manifest(11, None, epoch=2)]
    assert versions(found) == [10, 11]


def test_all_versions_are_needed_without_an_anchor() -> None:
    assert versions([manifest(4, 3), manifest(5, 4)]) == [4, 5]


def test_first_needed_offset_is_the_oldest_needed_chunk_per_partition() -> None:
    found = [manifest(3, None, (0, 30), (1, 12)), manifest(4, 3, (1, 11), (2, 5)), manifest(5, 4)]
    assert lowest_offsets(chunk for each in found for chunk in each.first) == {0: 30, 1: 11, 2: 5}


CHAIN = [
    manifest(0, None, (0, 0), files=("anchor-a",)),
    manifest(1, 0, (0, 10)),
    manifest(2, None, (0, 20), files=("anchor-b",)),
    manifest(3, 2, (0, 30)),
    manifest(4, None, (0, 40), files=("anchor-c",)),
]


def test_unneeded_files_are_deleted_once() -> None:
    found = [honest(offset, each) for offset, each in enumerate(CHAIN)]
    gone = what_is_released(TRUST, found)
    assert (gone.before, gone.files, gone.keys) == ({0: 20}, ["anchor-a"], ["m/:run/0/anchor-a", "m/:run/1"])
    ended = [tombstone(5 + number, each) for number, each in enumerate(CHAIN[:2])]
    assert what_is_released(TRUST, [*found, *ended]).keys == []


def test_manifest_is_deleted_after_its_files() -> None:
    """Files cannot be deleted without the store, and only the manifest knows them."""
    found = [honest(offset, each) for offset, each in enumerate(CHAIN)]
    gone = what_is_released(TRUST, found, stored=False)
    assert (gone.before, gone.files, gone.keys) == ({0: 20}, [], ["m/:run/1"])
    whole_again = [manifest(0, None, files=("anchor-a",)), manifest(0, None), *CHAIN[2:]]
    again = [honest(offset, each) for offset, each in enumerate(whole_again)]
    assert what_is_released(TRUST, again, stored=False).keys == ["m/:run/0"], "that of the one without files"
    assert what_is_released(TRUST, again).files == ["anchor-a"]


@given(st.lists(st.sampled_from(["starts", "steps", "deletes", "compacts"]), max_size=40))
def test_every_stored_file_is_named_by_a_manifest_until_deleted(history: list[str]) -> None:
    """A trainer may start often at one version, be killed before its deletions, and the log may be compacted."""
    log: list[Envelope] = []
    anchors: list[str] = []
    store: set[str] = set()
    offsets, version = count(), 0

    def delete() -> None:
        gone = what_is_released(TRUST, log)
        store.difference_update(gone.files)
        log.extend(end(next(offsets), key) for key in gone.keys)

    for happened in history:
        offset = next(offsets)
        if happened == "starts":
            anchors.append(f"anchor-{offset}")
            store.add(anchors[-1])
            log.append(honest(offset, manifest(version, None, files=(anchors[-1],))))
        elif happened == "steps":
            version += 1
            log.append(honest(offset, manifest(version, version - 1)))
        elif happened == "deletes":
            delete()
        else:
            log = compacted(log)
        named = {file for each in log if isinstance(each.record, WeightManifest) for file in each.record.files}
        assert set(anchors[-2:]) <= store <= named
    delete()
    assert store == set(anchors[-2:])


@pytest.mark.parametrize(("key", "ended"), [("m/:run/0", ["m/:run/0", "m/:run/1"]), (f"m/{OTHER}/0", ["m/:run/1"])])
def test_manifest_is_tombstoned_under_its_own_key_only(key: str, ended: list[str]) -> None:
    """Earlier keys had no file, and any writer can put a signed manifest under any key."""
    first, *rest = (honest(offset, each) for offset, each in enumerate(CHAIN))
    gone = what_is_released(TRUST, [msgspec.structs.replace(first, key=key), *rest])
    assert (gone.files, gone.keys) == (["anchor-a"], ended)


def test_key_of_a_needed_manifest_is_never_tombstoned() -> None:
    found = [manifest(3, None), manifest(4, 3), manifest(4, None), manifest(5, None)]
    assert what_is_released(TRUST, [honest(offset, each) for offset, each in enumerate(found)]).keys == ["m/:run/3"]


@pytest.mark.parametrize("version", [5, 2**50])
def test_forged_anchors_delete_no_honest_version(version: int) -> None:
    """Two forged anchors claim that only later chunks are needed."""
    found = [honest(offset, each) for offset, each in enumerate(CHAIN[:2])]
    forged_manifests = [forged(5 + n, manifest(version + n, None, (0, 10**6), (1, 10**6))) for n in range(2)]
    gone = what_is_released(TRUST, [*found, *forged_manifests])
    assert (gone.before, gone.files, gone.keys) == ({0: 0}, [], [])


def test_partition_without_chunks_of_the_run_loses_no_chunk() -> None:
    """The chunks may be of a version in publication: chunks precede their manifest."""
    foreign_manifest = honest(9, manifest(0, None, (1, 50), run=OTHER))
    assert what_is_released(TRUST, [*(honest(n, each) for n, each in enumerate(CHAIN)), foreign_manifest]).before == {
        0: 20
    }


def test_chunks_of_other_runs_are_retained_until_their_manifests_are_tombstoned() -> None:
    """The runs have the same key or another, this model or another, and any length of silence."""
    theirs = manifest(0, None, (0, 3), run=OTHER, files=("anchor-d",))
    unknown = msgspec.structs.replace(manifest(0, None, (0, 2)), model_id="n")
    other_key = manifest(1, None, (0, 1), run=OTHER)
    late = [honest(offset, each, at=QUIET_SECONDS + 1) for offset, each in enumerate(CHAIN)]
    found = [*late, honest(7, theirs), as_read(sign_manifest(unknown, None), offset=8), forged(9, other_key)]
    assert what_is_released(TRUST, found).before == {0: 1}
    assert what_is_released(TRUST, found).files == ["anchor-a"]
    assert what_is_released(TRUST, found).kept_for == [f"m/{OTHER}", "n/:run"]
    found.append(tombstone(10, other_key))
    assert what_is_released(TRUST, found).before == {0: 2}
    found.append(tombstone(11, unknown))
    assert what_is_released(TRUST, found).before == {0: 3}
    found.append(tombstone(12, theirs))
    assert (what_is_released(TRUST, found).before, what_is_released(TRUST, found).kept_for) == ({0: 20}, [])
    assert what_is_released(TRUST, [*found, honest(13, theirs)]).before == {0: 3}


def test_forged_anchors_of_another_run_delete_none_of_its_versions() -> None:
    mine = [honest(offset, each) for offset, each in enumerate(CHAIN)]
    forged_manifests = [forged(8 + n, manifest(8 + n, None, (0, 10**6), run=OTHER)) for n in range(2)]
    assert what_is_released(
        TRUST, [*mine, honest(7, manifest(7, None, (0, 3), run=OTHER)), *forged_manifests]
    ).before == {0: 3}


def test_active_run_or_run_without_retained_chunks_is_not_named() -> None:
    late = [honest(offset, each, at=QUIET_SECONDS + 1) for offset, each in enumerate(CHAIN)]
    active = [honest(7, manifest(0, None, (0, 3), run=OTHER)), honest(8, manifest(1, 0, (0, 33), run=OTHER), at=2.0)]
    assert what_is_released(TRUST, [*late, *active]).kept_for == []
    assert what_is_released(TRUST, [*late, honest(7, manifest(0, None, (0, 33), run=OTHER))]).kept_for == []


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [("dtype", "int8", "dtype"), ("anchor_every", -1, "anchor_every"), ("column_parts", 0, "column_parts")],
)
def test_settings_out_of_range_are_refused_in_one_sentence(field: str, value: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence} must be"):
        WeightsConfig(**{field: value})  # type: ignore[arg-type]
