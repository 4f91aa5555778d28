"""The choice of the next version: for any log the best provable version, and a broken version costs one anchor."""

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rose.schemas.weights import Order, WeightManifest
from rose.workers.weights.checks import BASE_REFUSALS, Refusal, VersionRefused
from rose.workers.weights.lineage import Lineage, Path, Placed
from tests.support.weights_fixtures import bare

ANCHOR_BYTES, DELTA_BYTES = 1000, 1


def manifest(version: int, base: int | None = None, *, epoch: int = 0) -> WeightManifest:
    return bare(version, base, epoch=epoch, payload_bytes=ANCHOR_BYTES if base is None else DELTA_BYTES)


def lineage_of(*links: tuple[int, int | None], held: int | None = None) -> Lineage:
    """Return a lineage of (version, base version), at offsets 0, 1, ..."""
    lineage = Lineage(held=None if held is None else (0, held))
    for offset, link in enumerate(links):
        lineage.on_manifest(manifest(*link), offset)
    return lineage


def versions(path: Path | None) -> list[int] | None:
    return None if path is None else [placed.manifest.version for placed in path]


def follow(lineage: Lineage, broken: dict[int, Refusal], *, upon_held_only: bool = False) -> list[list[int]]:
    """Follow the lineage to its end; return the versions of each tried path.

    `broken` maps refused versions to their refusals; with `upon_held_only` they are refused only without an anchor.
    """
    tried = []
    while (path := lineage.next_path()) is not None:
        tried.append([placed.manifest.version for placed in path])
        assert len(tried) < 100, "it never comes to an end"
        whole = path[0].manifest.base_version is None
        taken: Placed | None = None
        for placed in path:
            refusal = broken.get(placed.manifest.version)
            if refusal is not None and not (whole and upon_held_only):
                break
            taken = placed
        if taken is not None and (lineage.held is None or taken.order > lineage.held):
            lineage.on_taken(taken)
        if taken is not path[-1]:
            failed = path[0 if taken is None else list(path).index(taken) + 1]
            lineage.on_refused(path, failed, VersionRefused(broken[failed.manifest.version], "broken"))
    return tried


CHAIN = ((1, None), (2, 1), (3, 2), (5, None), (6, 5), (8, 6))


@pytest.mark.parametrize(
    ("held", "path"),
    [(None, [5, 6, 8]), (3, [5, 6, 8]), (5, [6, 8]), (6, [8]), (8, None), (9, None), (7, [5, 6, 8])],
)
def test_newest_version_is_reached_from_the_held_version_or_an_anchor(held: int | None, path: list[int] | None) -> None:
    assert versions(lineage_of(*CHAIN, held=held).next_path()) == path
    assert versions(lineage_of(*CHAIN[::-1], held=held).next_path()) == path


def test_cheaper_of_two_paths_is_tried_first() -> None:
    lineage = lineage_of((1, None), (2, 1), (3, 2), held=1)
    assert versions(lineage.next_path()) == [2, 3]
    lineage.on_manifest(manifest(3), 9)
    assert versions(lineage.next_path()) == [2, 3]
    dear = lineage_of((1, None), (4, None), held=1)
    assert versions(dear.next_path()) == [4]


def test_next_best_version_is_taken_if_a_delta_is_missing() -> None:
    lineage = lineage_of((1, None), (2, 1), (4, 3), (5, 4))
    assert versions(lineage.next_path()) == [1, 2]
    assert follow(lineage, {}) == [[1, 2]]
    blocked = lineage.blocked()
    assert blocked is not None
    assert (blocked[0].manifest.version, blocked[1].refusal) == (4, Refusal.WRONG_BASE)


@pytest.mark.parametrize("links", [((1, 1),), ((1, 2), (2, 1)), ((1, 3), (2, 1), (3, 2))])
def test_cyclic_versions_give_no_path(links: tuple[tuple[int, int | None], ...]) -> None:
    assert lineage_of(*links).next_path() is None


def test_later_epoch_is_newer_at_any_number_and_has_its_own_chain() -> None:
    lineage = lineage_of((9, None), (10, 9), held=10)
    lineage.on_manifest(manifest(12, 10, epoch=1), 5)
    assert lineage.next_path() is None, "what it builds on is of another epoch"
    lineage.on_manifest(manifest(11, epoch=1), 6)
    assert versions(lineage.next_path()) == [11]
    lineage.on_taken(Placed(manifest(11, epoch=1), 6))
    lineage.on_manifest(manifest(13), 7)
    assert lineage.next_path() is None, "of an older epoch, so older"


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (Refusal.MISSING_CHUNK, [[3]]),
        (Refusal.WRONG_BASE, [[3], [0, 1, 2, 3]]),
        (Refusal.WRONG_RESULT, [[3], [0, 1, 2, 3]]),
    ],
)
def test_broken_delta_costs_at_most_one_anchor_until_the_next(refusal: Refusal, expected: list[list[int]]) -> None:
    """The cost is zero if no other path can be better, and one if the held version may be corrupt, and not one per
    version."""
    lineage = lineage_of((0, None), (1, 0), (2, 1), held=2)
    tried = []
    for offset, version in enumerate(range(3, 9), start=10):
        lineage.on_manifest(manifest(version, version - 1), offset)
        tried += follow(lineage, {3: refusal})
    assert tried == expected
    lineage.on_manifest(manifest(9), 20)
    lineage.on_manifest(manifest(10, 9), 21)
    assert follow(lineage, {}) == [[9, 10]]


def test_anchor_repairs_a_corrupt_held_version() -> None:
    lineage = lineage_of((0, None), (1, 0), (2, 1), (3, 2), held=2)
    tried = follow(lineage, {3: Refusal.WRONG_RESULT}, upon_held_only=True)
    assert tried == [[3], [0, 1, 2, 3]]
    assert lineage.held == (0, 3)
    lineage.on_manifest(manifest(4, 3), 9)
    assert follow(lineage, {}) == [[4]]


def test_last_reached_version_of_an_interrupted_path_is_held() -> None:
    lineage = lineage_of((0, None), (1, 0), (2, 1), (3, 2))
    assert follow(lineage, {2: Refusal.WRONG_CHUNK}) == [[0, 1, 2, 3]]
    assert lineage.held == (0, 1)


def test_broken_anchor_falls_back_to_the_previous_anchor() -> None:
    lineage = lineage_of((0, None), (1, 0), (2, None), (3, 2))
    assert follow(lineage, {2: Refusal.MISSING_CHUNK}) == [[2, 3], [0, 1]]
    assert lineage.held == (0, 1)


def test_republished_anchor_is_not_applied_twice_and_starts_new_paths() -> None:
    lineage = lineage_of((0, None), (1, 0), (1, None), held=1)
    assert lineage.next_path() is None
    lineage.on_manifest(manifest(2, 1), 9)
    assert versions(lineage.next_path()) == [2]
    receiver = lineage_of((1, 0), (1, None), (2, 1))
    assert versions(receiver.next_path()) == [1, 2]


def test_versions_needed_by_no_later_path_are_forgotten() -> None:
    lineage = lineage_of(*CHAIN)
    lineage.on_taken(Placed(manifest(6, 5), 4))
    assert sorted(lineage.versions) == [(0, 5), (0, 6), (0, 8)]
    lineage.on_taken(Placed(manifest(8, 6), 5))
    assert sorted(lineage.versions) == [(0, 5), (0, 6), (0, 8)]


@pytest.mark.slow
@given(st.integers(1, 30), st.one_of(st.none(), st.integers(0, 50)))
def test_receiver_without_usable_versions_remembers_a_bounded_chain(anchor_every: int, first_bad: int | None) -> None:
    lineage = Lineage()
    for version in range(120):
        lineage.on_manifest(manifest(version, None if version % anchor_every == 0 else version - 1), version)
        bad = first_bad is not None and version >= first_bad
        follow(lineage, {version: Refusal.WRONG_DTYPE} if bad else {})
        lineage.forget_useless()
        assert lineage.blocked() is None or bad or first_bad is not None
        assert len(lineage.versions) <= 2 * anchor_every


def test_failed_version_is_not_retried_when_announced_again() -> None:
    lineage = lineage_of((0, None), (1, None))
    assert follow(lineage, dict.fromkeys((0, 1), Refusal.WRONG_DTYPE)) == [[1], [0]]
    lineage.forget_useless()
    lineage.versions.clear()
    lineage.on_manifest(manifest(0), 0)
    lineage.on_manifest(manifest(1), 1)
    assert lineage.next_path() is None


def test_remembered_failure_holds_no_memory_of_the_attempt() -> None:
    lineage = lineage_of((0, None))
    path = lineage.next_path()
    assert path is not None
    try:
        raise VersionRefused(Refusal.WRONG_CHUNK, "broken") from ValueError("bytes")
    except VersionRefused as why:
        lineage.on_refused(path, path[0], why)
    blocked = lineage.blocked()
    assert blocked is not None
    assert (str(blocked[1]), blocked[1].__traceback__, blocked[1].__cause__) == ("broken", None, None)


@dataclass
class LineageSimulation:
    """A log of trusted manifests, each valid or broken in some way, and a receiver that follows it."""

    lineage: Lineage = field(default_factory=Lineage)
    faults: dict[int, Refusal] = field(default_factory=dict)
    """Refusals by offset."""
    all: list[Placed] = field(default_factory=list)
    anchors_in_vain: int = 0
    tried: set[tuple[int, ...]] = field(default_factory=set)
    forgotten: set[int] = field(default_factory=set)
    """Offsets that the receiver had forgotten before a newer manifest was written."""

    def write(self, manifest: WeightManifest, fault: Refusal | None) -> None:
        offset = len(self.all)
        self.all.append(Placed(manifest, offset))
        if fault is not None:
            self.faults[offset] = fault
        self.lineage.on_manifest(manifest, offset)

    def catch_up(self) -> None:
        while (path := self.lineage.next_path()) is not None:
            assert self.lineage.held is None or path[-1].order > self.lineage.held
            tried = tuple(placed.offset for placed in path)
            assert tried not in self.tried, "a path is tried twice"
            self.tried.add(tried)
            self._try(path)
        self.lineage.forget_useless()
        assert self.lineage.held == self.best(), "something was forgotten that could have been taken"
        known = {placed.offset for found in self.lineage.versions.values() for placed in found}
        newest_anchor = max((each.order for each in self.all if each.manifest.base_version is None), default=None)
        for placed in self.all:
            if placed.offset not in known:
                assert newest_anchor is not None and placed.order < newest_anchor
                self.forgotten.add(placed.offset)

    def _try(self, path: Path) -> None:
        taken: Placed | None = None
        for placed in path:
            if placed.offset in self.faults:
                self.anchors_in_vain += path[0].manifest.base_version is None
                break
            taken = placed
        if taken is not None and (self.lineage.held is None or taken.order > self.lineage.held):
            self.lineage.on_taken(taken)
        if taken is not path[-1]:
            failed = path[0 if taken is None else list(path).index(taken) + 1]
            self.lineage.on_refused(path, failed, VersionRefused(self.faults[failed.offset], "broken"))

    def best(self) -> Order | None:
        """Return the newest version with a valid path from an anchor."""
        whole: set[Order] = set()
        for placed in sorted(self.all, key=lambda placed: placed.order):
            base = placed.manifest.base_version
            if placed.offset in self.forgotten and placed.order != self.lineage.held:
                continue
            proven = placed.order == self.lineage.held  # its base may have been forgotten since
            if placed.offset not in self.faults and (proven or base is None or (placed.manifest.epoch, base) in whole):
                whole.add(placed.order)
        return max(whole, default=None)


LINKS = st.tuples(
    st.integers(0, 12),
    st.one_of(st.none(), st.none(), st.integers(1, 3)),
    st.integers(0, 1),
    st.one_of(st.none(), st.none(), st.sampled_from([Refusal.MISSING_CHUNK, Refusal.WRONG_BASE])),
)
"""A version, the distance to its base, its epoch, and its fault, if any."""


@given(st.lists(LINKS, max_size=25), st.lists(st.booleans(), max_size=25))
@example([(9, None, 0, None), (10, None, 0, Refusal.MISSING_CHUNK), (10, 1, 0, None)], [True])
@example([(6, None, 0, None), (7, None, 0, None), (8, 2, 0, None), (9, 2, 0, Refusal.MISSING_CHUNK)], [])
def test_best_provable_version_is_held_for_any_log(
    links: list[tuple[int, int | None, int, Refusal | None]], looks: list[bool]
) -> None:
    simulation = LineageSimulation()
    for number, (version, below, epoch, fault) in enumerate(links):
        base = None if below is None else max(0, version - below)
        simulation.write(manifest(version, base, epoch=epoch), fault)
        if number < len(looks) and looks[number]:
            simulation.catch_up()
    simulation.catch_up()
    assert simulation.lineage.held == simulation.best()
    assert simulation.anchors_in_vain <= len(simulation.faults), "an anchor was fetched twice for one break"


@given(st.integers(1, 30), st.integers(1, 6), st.sampled_from(sorted(BASE_REFUSALS | {Refusal.MISSING_CHUNK}, key=str)))
def test_one_broken_version_costs_at_most_one_anchor(at: int, anchor_every: int, fault: Refusal) -> None:
    """The receiver follows version by version: besides the due anchors, it fetches at most one more."""
    simulation = LineageSimulation()
    for version in range(40):
        base = None if version % anchor_every == 0 else version - 1
        simulation.write(manifest(version, base), fault if version == at else None)
        simulation.catch_up()
    assert simulation.anchors_in_vain <= 1
    assert simulation.lineage.held == simulation.best()


def test_newest_version_is_reported_with_the_reason_of_its_refusal() -> None:
    lineage = lineage_of((0, None), (1, 0), (2, 1))
    assert lineage.newest is not None
    assert lineage.newest.manifest.version == 2
    assert lineage.blocked() is None
    follow(lineage, {1: Refusal.MISSING_CHUNK})
    blocked = lineage.blocked()
    assert blocked is not None
    assert (blocked[0].manifest.version, blocked[1].refusal) == (1, Refusal.MISSING_CHUNK)
    lineage.on_manifest(manifest(3), 9)
    assert lineage.blocked() is None
    assert Lineage().newest is None
    assert Lineage().blocked() is None
