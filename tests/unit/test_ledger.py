"""The conservation law: what the ledger says of any history, in any order of topics."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.accounting.ledger import Audit, Ledger
from schemas.environments import EnvSnapshot, LogPosition
from schemas.prompts import Prompt, Sampling, trajectory_id
from schemas.samples import Outcome, Sample, SampleOutcome
from schemas.turns import TurnRequest

PROMPT = Prompt(group_id="g", group_size=4, environment="calculator", seed=1)
Event = Callable[[Ledger], None]


def request(name: str) -> Event:
    record = TurnRequest(
        trajectory_id=name,
        group_id="g",
        home=0,
        turn=0,
        context=b"",
        sampling=Sampling(),
        requested_at=0.0,
        deadline=1.0,
    )
    return lambda ledger: ledger.turn(record)


def snapshot(name: str) -> Event:
    record = EnvSnapshot(
        trajectory_id=name,
        index=0,
        prompt=PROMPT,
        home=0,
        turn=0,
        digest=bytes(16),
        state=b"",
        opened=LogPosition(requested=0, completed=0),
    )
    return lambda ledger: ledger.snapshot(name, record)


def tombstone(name: str) -> Event:
    return lambda ledger: ledger.snapshot(name, None)


def finished(name: str) -> Event:
    record = Sample(
        trajectory_id=name,
        group_id="g",
        group_size=4,
        environment="calculator",
        seed=1,
        tokens=b"",
        loss_mask=b"",
        logprobs=b"",
        spans=(),
        turns=(),
        reward=1.0,
        success=True,
        completed_at=0.0,
    )
    return lambda ledger: ledger.sample(record)


def settled(name: str, outcome: Outcome = Outcome.TRAINED) -> Event:
    record = SampleOutcome(trajectory_id=name, group_id="g", outcome=outcome, step=1, policy_version=0, recorded_at=0.0)
    return lambda ledger: ledger.outcome(record)


@dataclass(frozen=True)
class Life:
    """How far a trajectory came, and what the audit must say of it."""

    events: tuple[tuple[str, Callable[[str], Event]], ...]
    said: str


TOPICS = ["requests", "snapshots", "samples", "outcomes", "prompts"]

LIVES = (
    Life((), "not_opened"),
    Life((("requests", request), ("snapshots", snapshot)), "in_a_turn"),
    Life((("samples", finished),), "waiting"),
    Life((("requests", request), ("snapshots", snapshot), ("snapshots", tombstone), ("samples", finished)), "waiting"),
    Life((("samples", finished), ("outcomes", settled)), "trained"),
    Life((("outcomes", lambda name: settled(name, Outcome.STALE)),), "stale"),
    Life((("snapshots", snapshot), ("snapshots", tombstone)), "lost"),
    Life((("requests", request),), "lost"),
    Life((("samples", finished), ("outcomes", settled), ("outcomes", settled)), "doubled"),
    Life((("samples", finished), ("samples", finished), ("outcomes", settled)), "doubled"),
)


@given(st.lists(st.sampled_from(LIVES), min_size=1, max_size=12), st.permutations(TOPICS))
def test_every_trajectory_is_counted_where_it_is(lives: list[Life], order: list[str]) -> None:
    topics: dict[str, list[Event]] = {name: [] for name in order}
    topics["prompts"].append(
        lambda ledger: ledger.prompt(Prompt(group_id="g", group_size=len(lives), environment="e", seed=0), place=(0, 0))
    )
    for index, life in enumerate(lives):
        for topic, event in life.events:
            topics[topic].append(event(trajectory_id("g", index)))
    ledger = Ledger()
    for name in order:
        for fold in topics[name]:
            fold(ledger)
    audit = ledger.audit()
    said = [life.said for life in lives]
    assert audit.requested == len(lives)
    assert audit.in_flight.not_opened == said.count("not_opened")
    assert audit.in_flight.in_a_turn == said.count("in_a_turn")
    assert audit.in_flight.waiting_for_trainer == said.count("waiting")
    assert audit.stale == said.count("stale")
    assert audit.trained == said.count("trained") + said.count("doubled")
    assert audit.lost == tuple(trajectory_id("g", i) for i, what in enumerate(said) if what == "lost")
    assert audit.doubled == tuple(trajectory_id("g", i) for i, what in enumerate(said) if what == "doubled")
    assert audit.clean == (not {"lost", "doubled"} & set(said))


def audit_of(*events: Event) -> Audit:
    ledger = Ledger()
    for event in events:
        event(ledger)
    return ledger.audit()


def prompt(place: tuple[int, int], size: int = 4) -> Event:
    record = Prompt(group_id="g", group_size=size, environment="calculator", seed=1)
    return lambda ledger: ledger.prompt(record, place=place)


def test_a_second_prompt_of_a_known_group_asks_for_nothing() -> None:
    assert audit_of(prompt((0, 7), size=2), prompt((0, 3), size=4)).requested == 4


def test_a_dead_lettered_prompt_asks_for_nothing_and_its_group_may_be_asked_for_again() -> None:
    dead: Event = lambda ledger: ledger.dead_prompt((0, 3))  # noqa: E731
    assert audit_of(dead, prompt((0, 3))).requested == 0
    assert audit_of(prompt((0, 3)), dead, prompt((0, 7), size=2)).requested == 2


@pytest.mark.parametrize("what", [finished, settled])
def test_what_nobody_asked_for_is_named(what: Callable[[str], Event]) -> None:
    audit = audit_of(prompt((0, 0)), what("other:0"))
    assert audit.unasked == ("other:0",)
    assert not audit.clean


def test_expired_prompts_accuse_nobody() -> None:
    ledger = Ledger()
    settled("old:0")(ledger)
    assert ledger.audit(prompts_expired=True).clean


def test_the_terms_have_the_names_of_the_summary() -> None:
    terms = audit_of(prompt((0, 0)), settled("g:0", Outcome.INFRA_FAILED)).trajectories()
    assert terms == {
        "requested": 4,
        "trained": 0,
        "stale": 0,
        "filtered": 0,
        "infra_failed": 1,
        "superseded": 0,
        "in_flight": 3,
    }
