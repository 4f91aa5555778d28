"""The conservation law: the ledger's counts for any history, in any order of topics."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.audit import Audit, Ledger
from rose.schemas.progress import Group, GroupState
from rose.schemas.prompts import trajectory_id
from rose.schemas.samples import Outcome, SampleOutcome

Event = Callable[[Ledger], None]


def progress(name: str) -> Event:
    return lambda ledger: ledger.on_progress(name, live=True)


def tombstone(name: str) -> Event:
    return lambda ledger: ledger.on_progress(name, live=False)


def finished(name: str) -> Event:
    return lambda ledger: ledger.on_sample(name)


def settled(name: str, outcome: Outcome = Outcome.TRAINED, *, at: float = 0.0) -> Event:
    record = SampleOutcome(trajectory_id=name, group_id="g", outcome=outcome, step=1, policy_version=0, recorded_at=at)
    return lambda ledger: ledger.on_outcome(record)


def group(
    state: GroupState = GroupState.OPEN, *, name: str = "g", size: int = 4, offset: int = 3, outcomes_from: int = 0
) -> Event:
    record = Group(
        group_id=name, group_size=size, state=state, offset=offset, outcomes_from=outcomes_from, changed_at=0.0
    )
    return lambda ledger: ledger.on_group(name, record)


def forgotten(ledger: Ledger) -> None:
    ledger.on_group("g", None)


def prompt(place: tuple[int, int] = (0, 3), size: int = 4, *, at_home: bool = True) -> Event:
    return lambda ledger: ledger.on_prompt("g", size, place=place, at_home=at_home)


def dead(place: tuple[int, int] = (0, 3)) -> Event:
    return lambda ledger: ledger.on_dead_prompt(place)


def audit_of(*events: Event, **since: float) -> Audit:
    ledger = Ledger()
    for event in events:
        event(ledger)
    return ledger.audit(**since)  # type: ignore[arg-type]


@dataclass(frozen=True)
class TrajectoryCase:
    """The progress of a trajectory, and its expected state in the audit."""

    events: tuple[tuple[str, Callable[[str], Event]], ...]
    expected_state: str


TOPICS = ["groups", "progress", "samples", "outcomes", "prompts"]

COURSES = (
    TrajectoryCase((("progress", progress),), "in_a_turn"),
    TrajectoryCase((("samples", finished),), "waiting"),
    TrajectoryCase((("progress", progress), ("progress", tombstone), ("samples", finished)), "waiting"),
    TrajectoryCase((("samples", finished), ("outcomes", settled)), "trained"),
    TrajectoryCase((("outcomes", lambda name: settled(name, Outcome.STALE)),), "stale"),
    TrajectoryCase((("progress", progress), ("progress", tombstone)), "lost"),
    TrajectoryCase((("progress", tombstone),), "lost"),
    TrajectoryCase((), "lost"),
    TrajectoryCase((("samples", finished), ("outcomes", settled), ("outcomes", settled)), "doubled"),
    TrajectoryCase((("samples", finished), ("samples", finished), ("outcomes", settled)), "doubled"),
)


@given(st.lists(st.sampled_from(COURSES), min_size=1, max_size=12), st.permutations(TOPICS), st.booleans())
def test_every_trajectory_of_an_open_group_is_counted_in_one_state(
    courses: list[TrajectoryCase], order: list[str], deleted: bool
) -> None:
    topics: dict[str, list[Event]] = {name: [] for name in order}
    topics["groups"].append(group(size=len(courses)))
    if not deleted:  # after some days only the group knows the requested trajectories
        topics["prompts"].append(prompt(size=len(courses)))
    for index, course in enumerate(courses):
        for topic, event in course.events:
            topics[topic].append(event(trajectory_id("g", index)))
    audit = audit_of(*(fold for name in order for fold in topics[name]))
    expected_state = [course.expected_state for course in courses]
    assert audit.requested == len(courses)
    assert audit.in_flight.not_opened == 0
    assert audit.in_flight.in_a_turn == expected_state.count("in_a_turn")
    assert audit.in_flight.waiting_for_trainer == expected_state.count("waiting")
    assert audit.stale == expected_state.count("stale")
    assert audit.trained == expected_state.count("trained") + expected_state.count("doubled")
    assert audit.lost == tuple(trajectory_id("g", i) for i, what in enumerate(expected_state) if what == "lost")
    assert audit.doubled == tuple(trajectory_id("g", i) for i, what in enumerate(expected_state) if what == "doubled")
    assert audit.clean == (not {"lost", "doubled"} & set(expected_state))


@given(
    copies=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6),
    known=st.sampled_from([None, *GroupState]),
    order=st.randoms(use_true_random=False),
)
def test_duplicate_prompts_request_their_group_once(
    copies: list[tuple[int, bool]], known: GroupState | None, order: object
) -> None:
    """Partition 0 is the home; `known` None means that the home has decided nothing yet."""
    events = []
    for offset, (partition, is_dead) in enumerate(copies):
        events.append(prompt((partition, offset), at_home=partition == 0))
        if is_dead:
            events.append(dead((partition, offset)))
    if known is not None:
        events.append(group(known, offset=99))
    order.shuffle(events)  # type: ignore[attr-defined]
    audit = audit_of(*events)
    assert audit.requested in (0, 4)
    waits_at_home = any(partition == 0 and not is_dead for partition, is_dead in copies)
    on_its_way = any(partition and not is_dead for partition, is_dead in copies)
    nothing_at_home = all(partition for partition, _ in copies)
    if known in (GroupState.OPEN, GroupState.SETTLED):
        assert audit.requested == 4
    elif known is GroupState.REFUSED:
        assert audit.requested == 4 * waits_at_home
    else:
        assert audit.requested == 4 * (waits_at_home or (on_its_way and nothing_at_home))


def test_second_prompt_of_a_known_group_requests_nothing() -> None:
    assert audit_of(prompt((0, 7), size=2), prompt((0, 3), size=4)).requested == 4


def test_dead_lettered_prompt_requests_nothing_and_frees_its_group_id() -> None:
    assert audit_of(dead(), prompt()).requested == 0
    assert audit_of(prompt(), dead(), prompt((0, 7), size=2)).requested == 2
    refused = group(GroupState.REFUSED, offset=3)
    assert audit_of(prompt(), refused).requested == 0
    assert audit_of(prompt(), refused, prompt((0, 7), size=2)).in_flight.not_opened == 2


def test_forwarded_prompt_with_a_refused_copy_requests_nothing() -> None:
    assert audit_of(prompt((1, 5), at_home=False)).requested == 4
    assert audit_of(prompt((1, 5), at_home=False), prompt((0, 3)), dead((0, 3))).requested == 0
    assert audit_of(prompt((1, 5), at_home=False), group(GroupState.REFUSED)).requested == 0


@pytest.mark.parametrize("what", [finished, settled])
def test_unrequested_trajectory_is_named(what: Callable[[str], Event]) -> None:
    audit = audit_of(prompt((0, 0)), what("other:0"))
    assert audit.unasked == ("other:0",)
    assert not audit.clean


def test_records_beyond_the_retention_are_not_violations() -> None:
    assert audit_of(settled("old:0", at=1.0), forgotten_before=2.0).clean
    assert audit_of(group(), forgotten, settled("g:0", at=1.0), forgotten_before=2.0).clean
    assert not audit_of(settled("new:0", at=3.0), forgotten_before=2.0).clean
    half_deleted = audit_of(group(GroupState.SETTLED, outcomes_from=5), settled("g:1"), outcomes_from=6)
    assert (half_deleted.requested, half_deleted.clean) == (1, True)
    assert audit_of(group(GroupState.SETTLED, outcomes_from=5), outcomes_from=5).lost


def test_audit_terms_have_the_names_of_the_summary() -> None:
    terms = audit_of(prompt((0, 0)), settled("g:0", Outcome.INFRA_FAILED)).trajectories()
    assert terms == {
        "requested": 4,
        "trained": 0,
        "stale": 0,
        "filtered": 0,
        "infra_failed": 1,
        "surplus": 0,
        "superseded": 0,
        "evaluated": 0,
        "in_flight": 3,
    }
