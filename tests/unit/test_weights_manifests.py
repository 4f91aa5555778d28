"""Chains of versions: a path leads from an anchor, or from what one has, to a version without a gap."""

import secrets

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.record import Record
from schemas.weights import WeightChunk, WeightManifest
from topics.catalog import MANIFESTS
from topics.records import Envelope
from workers.weights.manifests import Lineage, PlacedManifest, manifest_key


def manifest(version: int, base_version: int | None = None, model_id: str = "m") -> WeightManifest:
    return WeightManifest(
        model_id=model_id,
        version=version,
        base_version=base_version,
        step=version,
        tensors=(),
        slices=(),
        digest=bytes(16),
        published_at=0.0,
    )


def envelope(record: Record | None, offset: int) -> Envelope:
    return Envelope(record, MANIFESTS, 0, offset, "key", 0.0)


def lineage_of(*links: tuple[int, int | None]) -> Lineage:
    """Of (version, base version), at offsets 0, 1, ..."""
    lineage = Lineage("m")
    lineage.learn(envelope(manifest(*link), offset) for offset, link in enumerate(links))
    return lineage


def versions(path: list[PlacedManifest] | None) -> list[int] | None:
    return None if path is None else [placed.manifest.version for placed in path]


CHAIN = ((1, None), (2, 1), (3, 2), (5, None), (6, 5), (8, 6))


@pytest.mark.parametrize(
    ("version", "since", "path"),
    [
        (3, None, [1, 2, 3]),
        (1, None, [1]),
        (8, None, [5, 6, 8]),
        (3, 1, [2, 3]),
        (3, 2, [3]),
        (3, 3, []),
        (8, 5, [6, 8]),
        (8, 3, None),  # an anchor lies between
        (8, 7, None),
        (2, 3, None),
        (5, 1, None),
        (4, None, None),
        (4, 3, None),
        (9, None, None),
    ],
)
def test_a_path_goes_from_an_anchor_or_from_what_one_has(
    version: int, since: int | None, path: list[int] | None
) -> None:
    lineage = lineage_of(*CHAIN)
    assert versions(lineage.path(version, since=since)) == path
    assert versions(lineage_of(*CHAIN[::-1]).path(version, since=since)) == path


def test_without_a_link_there_is_no_path_except_from_beyond_it() -> None:
    lineage = lineage_of((1, None), (3, 2), (4, 3))
    assert lineage.path(4) is None
    assert lineage.path(4, since=1) is None
    assert versions(lineage.path(4, since=2)) == [3, 4]


@pytest.mark.parametrize("links", [((1, 1),), ((1, 2), (2, 1)), ((1, 3), (2, 1), (3, 2)), ((1, None), (2, 3), (3, 2))])
def test_versions_that_build_on_each_other_in_a_circle_have_no_path(links: tuple[tuple[int, int | None], ...]) -> None:
    lineage = lineage_of(*links)
    assert lineage.path(max(version for version, _ in links)) is None
    assert lineage.path(max(version for version, _ in links), since=7) is None


@given(
    st.dictionaries(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 9))), st.one_of(st.none(), st.integers(0, 9))
)
def test_every_path_is_a_chain_of_rising_versions(links: dict[int, int | None], since: int | None) -> None:
    lineage = lineage_of(*links.items())
    for version in links:
        path = lineage.path(version, since=since)
        if path is None:
            continue
        bases = [placed.manifest.base_version for placed in path]
        steps = versions(path)
        assert steps == sorted(set(steps or []))
        assert bases == [since, *(steps or [])][: len(bases)]
        assert (not path and version == since) or (steps or [])[-1] == version


def test_the_newest_is_of_the_highest_version_and_of_two_the_later() -> None:
    assert Lineage("m").newest is None
    lineage = lineage_of((3, None), (1, None), (2, 1))
    assert lineage.newest == PlacedManifest(manifest(3), 0)
    lineage.learn([envelope(manifest(3, 2), 7)])
    assert lineage.newest == PlacedManifest(manifest(3, 2), 7)
    lineage.learn([envelope(manifest(3), 5), envelope(manifest(3), 7)])
    assert lineage.newest == PlacedManifest(manifest(3, 2), 7)
    assert versions(lineage.path(3)) == [1, 2, 3]


def test_in_whatever_order_they_are_read_the_same_is_known() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    read = [envelope(manifest(int(random.integers(6)), None if n % 3 else 0), n) for n in range(40)]
    one, other = Lineage("m"), Lineage("m")
    one.learn(read)
    for place in random.permutation(len(read)):
        other.learn([read[place]])
    assert one == other


def test_other_models_tombstones_and_other_records_are_not_learnt() -> None:
    lineage = Lineage("m")
    chunk = WeightChunk(model_id="m", version=9, tensor="a", part=0, payload=b"")
    lineage.learn([envelope(manifest(9, model_id="other"), 0), envelope(None, 1), envelope(chunk, 2)])
    assert lineage.newest is None


def test_what_no_later_path_can_need_is_forgotten() -> None:
    lineage = lineage_of(*CHAIN)
    lineage.forget_before(6)
    assert sorted(lineage.versions) == [5, 6, 8]
    assert versions(lineage.path(8)) == [5, 6, 8]
    lineage.forget_before(8)
    assert sorted(lineage.versions) == [5, 6, 8]


@pytest.mark.parametrize("version", [4, 7, 9])
def test_without_a_path_nothing_is_forgotten(version: int) -> None:
    lineage = lineage_of(*CHAIN, (9, 7))
    lineage.forget_before(version)
    assert len(lineage.versions) == len(CHAIN) + 1


def test_the_key_of_a_manifest_names_model_and_version() -> None:
    assert manifest_key(msgspec.structs.replace(manifest(7), model_id="a.b")) == "a.b/7"
