"""Version numbers: never used for two policies, and a new epoch after a rollback."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.schemas.limits import Count
from rose.schemas.weights import WeightManifest
from rose.workers.weights.manifests import MAX_VERSION, VersionNumbers, VersionTaken
from tests.support.weights_fixtures import RUN, bare

OTHER = "other.:run"
MOST = 2**53
assert str(MOST) in str(Count)


def manifest(version: int, *, epoch: int = 0, run: str = RUN, digest: int = 0) -> WeightManifest:
    return bare(version, epoch=epoch, run=run, digest=bytes([digest]) * 16)


def numbering_of(*manifests: WeightManifest) -> VersionNumbers:
    version_numbers = VersionNumbers()
    version_numbers.learn(manifests, RUN)
    return version_numbers


def test_empty_log_starts_at_version_0() -> None:
    assert (numbering_of().next_version, numbering_of().epoch, numbering_of().newest) == (0, 0, None)


def test_next_version_is_above_the_versions_of_every_run() -> None:
    version_numbers = numbering_of(manifest(3), manifest(9, run=OTHER), manifest(5))
    assert version_numbers.newest == manifest(5)
    assert version_numbers.next_version == 10


def test_newest_version_has_the_highest_epoch_and_then_the_latest_order() -> None:
    version_numbers = numbering_of(manifest(9), manifest(10, epoch=1), manifest(11), manifest(10, epoch=1, digest=1))
    assert version_numbers.newest == manifest(10, epoch=1, digest=1)
    assert (version_numbers.epoch, version_numbers.next_version) == (1, 12)


def test_rolled_back_trainer_publishes_newer_versions_than_all_before() -> None:
    version_numbers = numbering_of(manifest(10))
    with pytest.raises(VersionTaken, match="up to 10 all numbers are taken on the log"):
        version_numbers.check(6, bytes(16))
    version = version_numbers.begin_epoch()
    version_numbers.take(manifest(version, epoch=version_numbers.epoch))
    assert (version, version_numbers.epoch) == (11, 1)
    assert version_numbers.newest is not None
    assert version_numbers.newest.order > manifest(10).order


def test_trainer_resumed_on_a_lost_log_publishes_newer_versions() -> None:
    for version_numbers in (numbering_of(), numbering_of(manifest(3))):
        assert (version_numbers.begin_epoch(epoch=2, version=10), version_numbers.epoch) == (11, 3)
    version_numbers = numbering_of(manifest(20, epoch=4))
    assert (version_numbers.begin_epoch(epoch=2, version=10), version_numbers.epoch) == (21, 5)


def test_only_the_newest_version_may_be_republished_as_an_anchor() -> None:
    version_numbers = numbering_of(manifest(4), manifest(5, digest=7))
    version_numbers.check(5, bytes([7]) * 16)
    for version, digest in ((5, bytes(16)), (4, bytes(16))):
        with pytest.raises(VersionTaken):
            version_numbers.check(version, digest)
    version_numbers.begin_epoch()
    with pytest.raises(VersionTaken):
        version_numbers.check(5, bytes([7]) * 16)


@given(st.lists(st.tuples(st.integers(0, MOST), st.integers(0, MOST), st.sampled_from([RUN, OTHER])), max_size=20))
def test_no_version_number_on_the_log_exhausts_a_publisher(found: list[tuple[int, int, str]]) -> None:
    version_numbers = numbering_of(*(manifest(version, epoch=epoch, run=run) for version, epoch, run in found))
    for _ in range(3):
        version_numbers.take(manifest(version_numbers.begin_epoch(), epoch=version_numbers.epoch))
        version_numbers.take(manifest(version_numbers.next_version, epoch=version_numbers.epoch))
    assert version_numbers.highest < MAX_VERSION + 6
    assert version_numbers.epoch <= MAX_VERSION + 3
    taken = {version for version, epoch, _ in found if version < MAX_VERSION and epoch < MAX_VERSION}
    assert version_numbers.highest > max(taken, default=-1)


@given(st.lists(st.sampled_from(["next", "back", "again"]), max_size=30))
def test_version_numbers_and_orders_only_increase(actions: list[str]) -> None:
    version_numbers, seen_orders, numbers = VersionNumbers(), [(-1, -1)], set[int]()
    for action in actions:
        newest = version_numbers.newest
        if action == "again" and newest is not None:
            version_numbers.check(newest.version, newest.digest)
            continue
        version = version_numbers.begin_epoch() if action == "back" else version_numbers.next_version
        version_numbers.take(manifest(version, epoch=version_numbers.epoch))
        assert version not in numbers
        numbers.add(version)
        seen_orders.append((version_numbers.epoch, version))
    assert seen_orders == sorted(seen_orders)
