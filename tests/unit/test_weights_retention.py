"""What may be deleted: nothing that a version from the last anchor but one on can need."""

import pytest

from schemas.weights import WeightManifest
from workers.weights.config import WeightsConfig
from workers.weights.retention import live
from workers.weights.shelves import lowest_offsets

DIGEST = bytes(16)


def manifest(version: int, base: int | None, *places: tuple[int, int]) -> WeightManifest:
    return WeightManifest(
        model_id="m",
        version=version,
        base_version=base,
        step=version,
        tensors=(),
        slices=(),
        digest=DIGEST,
        first=places,
        published_at=0.0,
    )


def versions(manifests: list[WeightManifest]) -> list[int]:
    return [each.version for each in manifests]


def test_all_of_a_models_first_two_anchors_is_needed() -> None:
    found = [manifest(0, None, (0, 0)), manifest(1, 0, (0, 1)), manifest(2, None, (0, 2))]
    assert versions(live(found)) == [0, 1, 2]


def test_what_lies_before_the_last_anchor_but_one_is_not() -> None:
    found = [manifest(version, None if version % 3 == 0 else version - 1, (0, version)) for version in range(11)]
    assert versions(live(found)) == [6, 7, 8, 9, 10]


def test_without_an_anchor_nothing_is_given_up() -> None:
    assert versions(live([manifest(4, 3, (0, 1)), manifest(5, 4, (0, 2))])) == [4, 5]


def test_the_first_needed_offset_is_that_of_the_oldest_chunk_of_each_partition() -> None:
    found = [manifest(3, None, (0, 30), (1, 12)), manifest(4, 3, (1, 11), (2, 5)), manifest(5, 4)]
    assert lowest_offsets(place for each in found for place in each.first) == {0: 30, 1: 11, 2: 5}


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [("dtype", "int8", "dtype"), ("anchor_every", -1, "anchor_every"), ("column_parts", 0, "column_parts")],
)
def test_settings_out_of_their_range_are_one_sentence(field: str, value: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence} must be"):
        WeightsConfig(**{field: value})  # type: ignore[arg-type]
