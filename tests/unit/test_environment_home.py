"""The inputs of a home: each prompt is decided once and in order, and no offset is committed before its
consequences."""

import time
from unittest.mock import create_autospec

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.schemas.progress import GroupState, SettleRequest
from rose.schemas.prompts import Prompt, trajectory_id
from rose.topics.catalog import COMPLETED, EVALUATIONS, MAX_MESSAGE_BYTES, PROMPTS, home_partition
from rose.topics.reader import Reader
from rose.topics.records import Envelope, InvalidMessage, RawMessage
from rose.topics.writer import Writer
from rose.workers.environments.home import OLD_BATCH, Home, OffsetTracker
from rose.workers.environments.outbox import AGAIN_SECONDS, Outbox, group_record
from rose.workers.environments.prompt_decisions import DecisionKind, PromptDecision
from rose.workers.environments.recovery import Recovery
from rose.workers.environments.trajectory import begin
from tests.support.trajectory_fixtures import RULES

HOMES = 4
HERE = [f"g{number}" for number in range(40) if home_partition(f"g{number}", HOMES) == 1]
ELSEWHERE = next(f"g{number}" for number in range(40) if home_partition(f"g{number}", HOMES) == 3)


def prompt_of(group_id: str, size: int = 2) -> Prompt:
    return Prompt(group_id=group_id, group_size=size, environment="calculator", seed=0)


def found(offset: int, group_id: str, *, value: bytes = b"") -> Envelope:
    raw = RawMessage(group_id.encode(), value)
    return Envelope(prompt_of(group_id), PROMPTS, 1, offset, group_id, 0.0, raw)


def home(prompts_from: int = 10) -> Home:
    made = Home(1, homes=HOMES)
    made.begin(prompts_from=prompts_from, results_from=20)
    return made


def decide(of: Home, *, room: bool = True) -> PromptDecision:
    decision = of.decide(has_room=room, outcomes_from=0)
    assert decision is not None
    return decision


def put_on_the_log(of: Home, decision: PromptDecision) -> None:
    """Write the records of a decision, as the outbox does."""
    if decision.kind is DecisionKind.OPEN or (
        decision.kind is DecisionKind.REFUSE and decision.prompt and not decision.repeated
    ):
        state = GroupState.OPEN if decision.kind is DecisionKind.OPEN else GroupState.REFUSED
        offset, decided_to = decision.message.offset, of.prompts_low_water
        of.on_group(group_record(decision.opens, state, offset=offset, decided_to=decided_to, outcomes_from=0, now=0.0))


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from(["on_read", "on_skipped", "on_done"]), st.integers(0, 99)),
        max_size=40,
    )
)
def test_low_water_is_the_oldest_unfinished_offset(events: list[tuple[int, str, int]]) -> None:
    inputs, offset = OffsetTracker(5), 5
    undone: set[int] = set()
    for gap, what, pick in events:
        if what == "on_done":
            if undone:
                chosen = sorted(undone)[pick % len(undone)]
                undone.discard(chosen)
                inputs.on_done(chosen)
        else:
            offset += gap - 1  # transaction markers leave gaps in the offsets
            getattr(inputs, what)(offset)
            if what == "on_read":
                undone.add(offset)
            offset += 1
        assert inputs.low_water == min(undone, default=offset)


def test_groups_open_past_a_resetting_group_and_other_work_waits() -> None:
    here = home()
    here.on_prompt(found(10, HERE[0]))
    here.on_prompt(InvalidMessage(PROMPTS, 1, 11, RawMessage(None, b"?"), "no prompt"))
    for offset, group_id in ((12, HERE[1]), (13, HERE[2])):
        here.on_prompt(found(offset, group_id))
    slow, spoiled, quick, refused = (decide(here) for _ in range(4))
    assert here.take_complete() == []
    quick.awaited = refused.awaited = 0
    here.refuse(refused, "bad arguments")
    assert here.take_complete() == [quick] and here.prompts_low_water == 10
    slow.awaited = 0
    assert here.take_complete() == [slow, spoiled, refused] and here.prompts_low_water == 14


@pytest.mark.parametrize("first", [0, 10], ids=["the first of its home", "a later one"])
def test_overtaken_prompt_is_decided_after_a_restart_even_without_offsets(first: int) -> None:
    here = home(first)
    for offset, group_id in ((first, HERE[0]), (first + 1, HERE[1])):
        here.on_prompt(found(offset, group_id))
    _slow, quick = decide(here), decide(here)
    quick.awaited = 0
    (opened,) = here.take_complete()
    put_on_the_log(here, opened)
    again = Home(1, homes=HOMES)
    record = group_record(opened.opens, GroupState.OPEN, offset=first + 1, decided_to=first, outcomes_from=0, now=0.0)
    assert here.groups[record.group_id].decided_to == record.decided_to
    again.on_group(record)
    assert Recovery(again).prompts_from(0) == first
    again.begin(prompts_from=first, results_from=20)
    for offset, group_id in ((first, HERE[0]), (first + 1, HERE[1])):
        again.on_prompt(found(offset, group_id))
    assert [decide(again).kind for _ in range(2)] == [DecisionKind.OPEN, DecisionKind.PASS]


def test_group_id_opens_once_unless_its_prompt_was_refused() -> None:
    here = home()
    for offset, group_id in ((10, HERE[0]), (11, HERE[1]), (12, HERE[0]), (13, HERE[0])):
        here.on_prompt(found(offset, group_id))
    first, other = decide(here), decide(here)
    assert here.decide(has_room=True, outcomes_from=0) is None, "the first prompt of this id may still be refused"
    here.refuse(first, "bad arguments")
    first.awaited = other.awaited = 0
    for decision in here.take_complete():
        put_on_the_log(here, decision)
    second = decide(here)
    assert second.kind is DecisionKind.OPEN, "nothing was opened under this id"
    second.awaited = 0
    for decision in here.take_complete():
        put_on_the_log(here, decision)
    third = decide(here)
    assert third.kind is DecisionKind.REFUSE and third.repeated and "submitted before" in third.refusal


def test_prompt_of_another_home_is_forwarded_at_any_window() -> None:
    here = home()
    here.on_prompt(found(10, ELSEWHERE))
    decision = decide(here, room=False)
    assert (decision.kind, decision.home, decision.awaited) == (DecisionKind.FORWARD, 3, 0)
    here.on_prompt(found(11, ELSEWHERE, value=bytes(MAX_MESSAGE_BYTES)))
    too_large = decide(here)
    assert too_large.kind is DecisionKind.REFUSE and "partition 3" in too_large.refusal


def test_group_needs_window_room_and_an_invalid_prompt_needs_none() -> None:
    here = home()
    here.on_prompt(InvalidMessage(PROMPTS, 1, 10, RawMessage(None, b"?"), "no prompt"))
    here.on_prompt(Envelope(None, PROMPTS, 1, 11, "", 0.0, RawMessage(None, None)))
    here.on_prompt(found(12, HERE[0]))
    assert [decide(here, room=False).kind for _ in range(2)] == [DecisionKind.REFUSE] * 2
    assert here.decide(has_room=False, outcomes_from=0) is None
    assert len(list(here.take_complete())) == 2 and here.prompts_low_water == 12


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from([*HERE[:3], ELSEWHERE, "?"])),
        st.tuples(st.just("decide"), st.booleans()),
        st.tuples(st.just("reset"), st.booleans()),
        st.tuples(st.just("commit"), st.just(True)),
        st.tuples(st.just("outcome"), st.sampled_from([trajectory_id(name, at) for name in HERE[:3] for at in (0, 1)])),
        st.tuples(st.just("crash"), st.booleans()),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(EVENTS)
def test_every_prompt_is_decided_once_over_any_crash_and_loss_of_offsets(
    events: list[tuple[str, object]],
) -> None:
    """`crash, True` also removes the committed offsets of the group."""
    log: list[Envelope | InvalidMessage] = []
    decided: dict[int, DecisionKind] = {}
    opened: list[str] = []
    groups: list[tuple[str, GroupState, int, int]] = []
    outcomes: list[str] = []
    here, committed = home(), 10

    def submit(name: str) -> None:
        offset = 10 + len(log)
        spoiled = InvalidMessage(PROMPTS, 1, offset, RawMessage(None, b"?"), "no prompt")
        log.append(spoiled if name == "?" else found(offset, name))
        here.on_prompt(log[-1])

    def commit() -> None:
        nonlocal committed
        for decision in here.take_complete():
            put_on_the_log(here, decision)
            offset = decision.message.offset
            if decision.kind is DecisionKind.PASS:
                continue
            # without offsets a forwarded prompt is forwarded again: its home recognizes it by its group
            assert offset not in decided or decision.kind is DecisionKind.FORWARD
            decided[offset] = decision.kind
            if decision.kind is DecisionKind.OPEN:
                opened.append(decision.opens.group_id)
        for record in here.take_settled(1.0):
            assert {trajectory_id(record.group_id, at) for at in (0, 1)} <= set(outcomes)
        groups[:] = [(name, known.state, known.offset, known.decided_to) for name, known in here.groups.items()]
        committed = here.prompts_low_water

    def crash(*, forgotten: bool) -> None:
        nonlocal here
        buried = [at for at, fate in decided.items() if fate is DecisionKind.REFUSE] if forgotten else []
        here = Home(1, homes=HOMES, dead_lettered=frozenset((PROMPTS.name, offset) for offset in buried))
        for name, state, offset, decided_to in groups:
            prompt = prompt_of(name)
            here.on_group(group_record(prompt, state, offset=offset, decided_to=decided_to, outcomes_from=0, now=0.0))
        begin = Recovery(here).prompts_from(10) if forgotten else committed
        here.begin(prompts_from=begin, results_from=0)
        for message in log[begin - 10 :]:
            here.on_prompt(message)
        for at, trajectory in enumerate(outcomes):
            here.on_outcome(trajectory.partition(":")[0], trajectory, at)

    for what, detail in events:
        if what == "submit":
            submit(str(detail))
        elif what == "decide":
            here.decide(has_room=bool(detail), outcomes_from=0)
        elif what == "reset":
            for decision in reversed(here.decisions) if len(log) % 2 else here.decisions:
                if decision.awaited:
                    decision.awaited = 0
                    if not detail:
                        here.refuse(decision, "bad arguments")
                    break
        elif what == "commit":
            commit()
        elif what == "outcome" and str(detail).partition(":")[0] in opened:
            outcomes.append(str(detail))
            here.on_outcome(str(detail).partition(":")[0], str(detail), len(outcomes))
        elif what == "crash":
            crash(forgotten=bool(detail))
    crash(forgotten=False)
    while here.decide(has_room=True, outcomes_from=0) is not None or here.decisions:
        for decision in here.decisions:
            decision.awaited = 0
        commit()
    assert sorted(decided) == [message.offset for message in log]
    assert len(opened) == len(set(opened)), "no group was opened twice"
    for offset, fate in decided.items():
        message = log[offset - 10]
        name = message.record.group_id if isinstance(message, Envelope) and isinstance(message.record, Prompt) else "?"
        assert (fate is DecisionKind.FORWARD) == (name == ELSEWHERE)
        assert name != "?" or fate is DecisionKind.REFUSE
    unsettled = {name for name in opened if not {trajectory_id(name, at) for at in (0, 1)} <= set(outcomes)}
    assert set(here.open_groups) == unsettled, "no window slot leaks"


def test_group_is_open_until_every_trajectory_has_an_outcome() -> None:
    here = home()
    here.on_group(group_record(prompt_of("a", size=3), GroupState.OPEN, offset=10, outcomes_from=5, now=0.0))
    here.on_outcome("a", "a:1", 4)
    for trajectory in ("a:0", "a:2", "a:2", "a:x", "a:999999999", "b:1"):
        here.on_outcome(trajectory.partition(":")[0], trajectory, 6)
        assert "a" in here.open_groups, "the outcome at 4 is of an earlier group of this id"
    here.on_outcome("a", "a:1", 7)
    assert not here.open_groups
    assert [(group.group_id, group.state) for group in here.take_settled(2.0)] == [("a", GroupState.SETTLED)]
    assert here.take_settled(3.0) == [] and here.groups["a"].state is GroupState.SETTLED


def test_group_with_deleted_outcomes_leaks_no_window_slot() -> None:
    here = home()
    for offset, name in enumerate(("old", "lives", "young")):
        record = group_record(
            prompt_of(name), GroupState.OPEN, offset=offset, outcomes_from=9 * (name == "young"), now=0.0
        )
        here.on_group(record)
    here.trajectories["lives:1"] = begin(prompt_of("lives"), 1, home=1, observation=b"", state=b"")
    assert here.settle_expired(5) == ["old"] and set(here.open_groups) == {"lives", "young"}
    assert [group.group_id for group in here.take_settled(1.0)] == ["old"]


@pytest.mark.parametrize("state", [GroupState.SETTLED, GroupState.REFUSED])
def test_old_groups_are_forgotten_except_the_last(state: GroupState) -> None:
    here = home()
    for offset, name in enumerate(HERE[:3]):
        here.on_group(group_record(prompt_of(name), state, offset=offset, outcomes_from=0, now=float(offset)))
    here.on_group(group_record(prompt_of(HERE[3]), GroupState.OPEN, offset=3, outcomes_from=0, now=0.0))
    here.on_log_time(1000.0)
    assert here.take_expired(101.5, 100.0) == HERE[:2]
    assert here.take_expired(1000.0, 100.0) == HERE[2:3]
    here.on_group(group_record(prompt_of(HERE[3]), state, offset=3, outcomes_from=0, now=0.0))
    assert here.take_expired(1000.0, 100.0) == [], "it says where prompts begin when offsets are gone"


def test_group_is_forgotten_only_if_log_time_agrees() -> None:
    """A worker with a clock one year ahead forgets no young group."""
    here, ahead = home(), 1e6 + 3e7
    here.on_log_time(1e6)
    for offset, name in enumerate(HERE[:2]):
        here.on_group(group_record(prompt_of(name), GroupState.SETTLED, offset=offset, outcomes_from=0, now=1e6))
    assert here.take_expired(ahead, 100.0) == []
    here.on_log_time(1e6 + 200.0)
    assert here.take_expired(ahead, 100.0) == HERE[:1]


def test_group_settled_under_a_slow_clock_has_the_age_of_the_log() -> None:
    here = home()
    here.on_log_time(1e6)
    here.on_group(group_record(prompt_of(HERE[0]), GroupState.OPEN, offset=0, outcomes_from=0, now=1e6))
    assert here.settle_expired(5) == [HERE[0]]
    assert [group.changed_at for group in here.take_settled(0.0)] == [1e6]


def test_old_groups_are_forgotten_as_fast_as_new_groups_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two checks more groups than one batch get old, and the rest does not wait for the next check."""
    here, now = home(), 1e6
    for offset in range(3 * OLD_BATCH + 2):
        here.on_group(
            group_record(prompt_of(f"g{offset}"), GroupState.SETTLED, offset=offset, outcomes_from=0, now=0.0)
        )
    here.on_log_time(1e9)
    writer = create_autospec(Writer, instance=True)
    outbox = Outbox(
        writer, create_autospec(Reader, instance=True), rules=RULES, clock=lambda: 1e9, group_retention_seconds=1e6
    )
    outbox.on_recovered({(PROMPTS, 1): 10, (COMPLETED, 1): 20}, {1: 0})
    monkeypatch.setattr(time, "monotonic", lambda: now)
    forgotten = []
    for _ in range(6):
        writer.tombstone.reset_mock()
        outbox.commit({1: here}, [])
        forgotten.append(writer.tombstone.call_count)
        now += AGAIN_SECONDS
    assert forgotten == [OLD_BATCH, OLD_BATCH, OLD_BATCH, 1, 0, 0]


def request(group_id: str, index: int, offset: int) -> SettleRequest:
    name = trajectory_id(group_id, index)
    return SettleRequest(trajectory_id=name, group_id=group_id, offset=offset, reason="why", asked_at=0.0)


def with_group(offset: int, group_id: str) -> Home:
    """Return a home with an open group of two running trajectories."""
    of = home()
    of.on_prompt(found(offset, group_id))
    decision = decide(of)
    put_on_the_log(of, decision)
    for index in range(2):
        life = begin(decision.opens, index, home=1, observation=bytes(4), state=b"")
        of.trajectories[life.trajectory_id] = life
    return of


def test_manual_settlement_is_applied_once_and_between_steps() -> None:
    of, name = with_group(10, HERE[0]), trajectory_id(HERE[0], 1)
    of.trajectories[name].applying = True
    of.on_settle_request(request(HERE[0], 1, 10))
    assert list(of.take_settle_requests()) == []
    of.trajectories[name].applying = False
    assert list(of.take_settle_requests()) == [(name, of.trajectories[name], "settled by hand: why")]
    assert of.trajectories[name].applying, "nothing more is applied to it"
    assert list(of.take_settle_requests()) == []


def test_manual_settlement_of_an_ended_trajectory_without_outcome_is_reported_once() -> None:
    of, name = with_group(10, HERE[0]), trajectory_id(HERE[0], 1)
    del of.trajectories[name]
    for index in (1, 2):
        of.on_settle_request(request(HERE[0], index, 10))
    assert list(of.take_settle_requests()) == [(name, None, "settled by hand: why")], "the group has two trajectories"
    assert list(of.take_settle_requests()) == []
    of.on_outcome(HERE[0], name, of.open_groups[HERE[0]].outcomes_from)
    of.on_settle_request(request(HERE[0], 1, 10))
    assert list(of.take_settle_requests()) == []


@pytest.mark.parametrize("offset", [9, 11], ids=["an earlier group of its id", "a later one"])
def test_manual_settlement_does_not_apply_to_another_group_of_the_same_id(offset: int) -> None:
    of = with_group(10, HERE[0])
    of.on_settle_request(request(HERE[0], 1, offset))
    assert list(of.take_settle_requests()) == []


def test_trajectory_settled_before_its_group_opens_is_not_started() -> None:
    of = home()
    for turn_request in (request(HERE[0], 0, 10), request(HERE[0], 1, 9), request(ELSEWHERE, 1, 10)):
        of.on_settle_request(turn_request)
    assert list(of.take_settle_requests()) == []
    of.on_prompt(found(10, HERE[0]))
    assert of.settle_requests_of(decide(of)) == {0: "settled by hand: why"}
    assert ELSEWHERE not in {turn_request.group_id for turn_request in of.settle_requests.values()}


EVALUATED = [
    name
    for name in (f"evaluation:held-out:0123abcd:4:{number}:0" for number in range(40))
    if home_partition(name, HOMES) == 1
]


def evaluated(group_id: str, offset: int = 3, *, withdrawn: bool = False) -> Envelope:
    prompt = Prompt(
        group_id=group_id, group_size=2, environment="calculator", seed=0, evaluation="held-out", pinned_version=4
    )
    raw = RawMessage(group_id.encode(), None if withdrawn else b"")
    return Envelope(None if withdrawn else prompt, EVALUATIONS, 0, offset, group_id, 0.0, raw)


def test_prompt_of_an_evaluation_opens_without_room_and_moves_no_offset_of_prompts() -> None:
    here = home()
    here.on_prompt(found(10, HERE[0]))
    here.on_evaluation(evaluated(EVALUATED[0]))
    assert here.decide(has_room=False, outcomes_from=0) is None
    [decision] = here.decide_evaluations(0)
    assert (decision.kind, here.prompts_low_water, here.training_groups) == (DecisionKind.OPEN, 10, 0)
    decision.awaited = 0
    assert here.take_complete() == [decision]
    put_on_the_log(here, decision)
    assert (len(here.open_groups), here.training_groups, here.groups[EVALUATED[0]].decided_to) == (1, 0, 10)
    decide(here)
    assert here.training_groups == 1


def test_prompt_of_an_evaluation_opens_once_however_often_it_is_read() -> None:
    here = home()
    for _ in range(2):
        here.on_evaluation(evaluated(EVALUATED[0]))
    [decision] = here.decide_evaluations(0)
    here.on_evaluation(evaluated(EVALUATED[0]))
    assert here.decide_evaluations(0) == []
    decision.awaited = 0
    here.take_complete()
    put_on_the_log(here, decision)
    for index in range(2):
        here.on_outcome(EVALUATED[0], trajectory_id(EVALUATED[0], index), 0)
    here.take_settled(0.0)
    here.on_evaluation(evaluated(EVALUATED[0]))
    assert here.decide_evaluations(0) == [], "it has settled"
    assert here.training_groups == len(here.open_groups) == 0


def test_withdrawn_prompt_of_an_evaluation_and_that_of_another_home_are_not_opened() -> None:
    here = home()
    here.on_evaluation(evaluated(EVALUATED[0]))
    here.on_evaluation(evaluated(EVALUATED[0], 4, withdrawn=True))
    here.on_evaluation(
        evaluated(next(f"evaluation:{n}" for n in range(9) if home_partition(f"evaluation:{n}", 4) != 1))
    )
    assert here.decide_evaluations(0) == []


def test_prompt_of_an_evaluation_that_cannot_be_opened_fails_whole_with_the_reason() -> None:
    here = home()
    here.on_evaluation(evaluated(EVALUATED[0]))
    [decision] = here.decide_evaluations(0)
    decision.awaited = 0
    here.refuse(decision, "unknown environment")
    assert (decision.kind, decision.reset_results) == (
        DecisionKind.OPEN,
        dict.fromkeys(range(2), "unknown environment"),
    )


@pytest.mark.parametrize("fields", [{"evaluation": "held-out"}, {"group_id": EVALUATED[0]}], ids=["field", "id"])
def test_submitted_prompt_that_claims_to_be_of_an_evaluation_is_refused(fields: dict[str, str]) -> None:
    here = home()
    prompt = msgspec.structs.replace(prompt_of(HERE[0]), **fields)
    here.on_prompt(msgspec.structs.replace(found(10, prompt.group_id), record=prompt))
    decision = decide(here, room=False)
    assert (decision.kind, decision.repeated) == (DecisionKind.REFUSE, True)
    assert "only `rose evaluator` evaluates" in decision.refusal
