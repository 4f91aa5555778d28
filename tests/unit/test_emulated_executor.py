"""Emulated executors keep the executor's contract in any history, and their compute time follows the rates."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench.fleet.engine import Engine, Lengths, Rates, sampled_of
from bench.fleet.executor import (
    BEAT_SECONDS,
    USERS,
    ContextRequest,
    ExecutorSpec,
    FleetExecutor,
    Note,
    NoteKind,
    Output,
    ReturnedTurns,
)
from bench.fleet.fleet import Serving, memory_of
from bench.fleet.users import ServingRates, Step
from rose.schemas.arrays import count
from rose.schemas.grants import CapacityGrant, GrantSource
from rose.schemas.heartbeats import ExecutorState, SlackHeartbeat
from rose.schemas.prompts import Sampling
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.turns import Part, Refusal, TurnDispatch, TurnKey, TurnOutcome, TurnResult, held_hash
from rose.workers.executor.grants import MAX_BLOCKED_SECONDS, Lease
from tests.support.routing_fixtures import dispatched, request

RATES = Rates(prefill_tokens_per_second=500.0, decode_tokens_per_second=10.0, max_turns=2, kv_tokens=1024)
LENGTHS = Lengths(median_tokens=14.0, trajectory_sigma=0.35, turn_sigma=0.5, token=21)
SERVING = Serving(
    trace="",
    rates=ServingRates(prefill_tokens_per_second=8000.0, tpot_seconds=0.03),
    speed=1.0,
    kv_bytes=40_000,
    headroom=0.2,
    quiet_seconds=1.0,
)
JOB = "ns:demo"
INCARNATION = 7
SAMPLING = Sampling(max_tokens=64, stop_token_ids=(2,))
LEASE_SECONDS = 6.0


def lender(wake_seconds: float = 0.5) -> FleetExecutor:
    spec = ExecutorSpec(name="w0", slot=0, rates=RATES, lends=True, kv_bytes_per_token=16, wake_seconds=wake_seconds)
    memory = memory_of(spec, SERVING)
    return FleetExecutor(spec, LENGTHS, INCARNATION, 0.0, lease=Lease(JOB, grant_required=True), memory=memory)


def dedicated() -> FleetExecutor:
    return FleetExecutor(ExecutorSpec(name="w0", slot=0, rates=RATES), LENGTHS, INCARNATION, 0.0)


def turn(name: str = "g:0", *, attempt: int = 0, partial: Part | None = None) -> TurnDispatch:
    turn_request = request(name, sampling=SAMPLING)
    return dispatched(turn_request, incarnation=INCARNATION, attempt=attempt, partial=partial)


class ExecutorWithBooks:
    """An executor and its books, derived only from its output."""

    def __init__(self, executor: FleetExecutor) -> None:
        self.executor = executor
        self.now = 0.0
        self.users = Step(0.0, 0, 0)
        self.answers: list[TurnResult] = []
        self.notes: list[Note] = []
        self.beat: SlackHeartbeat | None = None
        self.answered_at_beat: frozenset[TurnKey] = frozenset()
        """Turns answered by the last heartbeat: a turn may end right after a heartbeat that lists it."""

    def on_output(self, outputs: list[Output]) -> None:
        for each in outputs:
            match each:
                case ContextRequest(dispatch):
                    self.on_output(
                        self.executor.on_context(dispatch, bytes(4 * dispatch.request.context_tokens), self.now)
                    )
                case ReturnedTurns(results, note):
                    self.answers += results
                    self.notes.append(note)
                case TurnResult():
                    self.answers.append(each)
                case SlackHeartbeat():
                    self.beat = each
                    self.answered_at_beat = frozenset(answer.key for answer in self.answers)
                case Note():
                    self.notes.append(each)

    def dispatch(self, dispatch: TurnDispatch) -> None:
        self.on_output(self.executor.on_dispatch(dispatch, 10, self.now))

    def grant(self, *, lend: bool = True) -> None:
        sent_grant = CapacityGrant(
            worker="w0",
            lend=lend,
            kv_bytes=0,
            token_budget=0,
            granted_at=self.now,
            lease_seconds=LEASE_SECONDS,
            job=JOB,
        )
        self.on_output(self.executor.on_grant(sent_grant, self.now, source=GrantSource.LEASED, live=True))

    def serve(self, running: int, tokens: int) -> None:
        self.users = Step(self.now, running, tokens)

    def go_on(self, seconds: float, step: float = 0.05) -> None:
        for _ in range(round(seconds / step)):
            self.now += step
            self.on_output(self.executor.step(self.users, 0.0 if self.users.running else step, self.now))

    def what(self) -> list[NoteKind]:
        return [note.what for note in self.notes]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("turn"), st.integers(0, 5)),
        st.tuples(st.just("users"), st.integers(0, 40_000)),
        st.tuples(st.just("grant"), st.booleans()),
        st.tuples(st.just("time"), st.floats(0.05, 3.0)),
    ),
    max_size=40,
)


@given(EVENTS, st.booleans())
@example([("time", 1.0), ("turn", 0), ("time", 0.6875), ("time", 0.125)], False)
def test_every_turn_is_answered_once_and_none_is_held_behind_a_closed_gate(
    events: list[tuple[str, float]], lends: bool
) -> None:
    books = ExecutorWithBooks(lender() if lends else dedicated())
    turn_request: list[TurnKey] = []
    for kind, value in events:
        if kind == "turn":
            attempt = sum(key.trajectory_id == f"g:{value}" for key in turn_request)
            dispatch = turn(f"g:{value}", attempt=attempt)
            turn_request.append(dispatch.key)
            books.dispatch(dispatch)
        elif kind == "users" and lends:
            books.serve(int(value > 0), int(value))
        elif kind == "grant" and lends:
            books.grant(lend=bool(value))
        elif kind == "time":
            books.go_on(value)
        if books.beat is not None and books.beat.state is ExecutorState.PAUSED:
            assert not books.executor.holds
        assert books.executor.holds <= RATES.max_turns
        answered = {answer.key for answer in books.answers}
        assert len(turn_request) - len(answered) == books.executor.holds
    books.go_on(BEAT_SECONDS + 0.1)
    assert books.beat is not None
    held = {held_hash(key).to_bytes(8, "little") for key in set(turn_request) - books.answered_at_beat}
    assert {books.beat.holds[at : at + 8] for at in range(0, len(books.beat.holds), 8)} == held
    books.on_output(list(books.executor.stop(books.now)))
    assert sorted(answer.key for answer in books.answers) == sorted(turn_request)
    assert books.beat.state is ExecutorState.STOPPING
    assert all(answer.part.validation_error is None for answer in books.answers if answer.tokens)


@given(st.lists(st.floats(0.05, 2.0), max_size=6))
def test_turn_in_parts_equals_an_uninterrupted_turn(times: list[float]) -> None:
    whole, _ = sampled_of("g:0", 0, SAMPLING, LENGTHS)
    partial: Part | None = None
    for attempt, seconds in enumerate([*times, 60.0]):
        books = ExecutorWithBooks(dedicated())
        books.go_on(0.05)
        books.dispatch(turn(attempt=attempt, partial=partial))
        books.go_on(seconds)
        books.on_output(list(books.executor.stop(books.now)))
        [answer] = books.answers
        if answer.outcome is TurnOutcome.COMPLETED:
            assert (answer.tokens, answer.finish_reason) == (whole, "stop")
            assert answer.spans == (VersionSpan(0, count(whole), 0),)
            return
        assert whole.startswith(answer.tokens)
        partial = answer.part if answer.tokens else None
    raise AssertionError("it never ended")


def test_turn_time_follows_the_rates_and_a_cached_prefix_shortens_the_turn() -> None:
    engine = Engine(RATES)
    turn_request = request("g:0", context=100, sampling=SAMPLING)
    engine.take("first", turn_request, 100, bytes(4 * 8), "stop")
    assert not engine.advance(0.99, 0.99)
    [done] = engine.advance(0.02, 1.01)
    assert (done.turn.cached_tokens, count(done.turn.sampled.tokens), done.device_seconds) == (
        0,
        8,
        pytest.approx(0.3 + 7 * 0.1),
    )
    engine.take("second", request("g:0", 1, context=110, sampling=SAMPLING), 110, bytes(4 * 8), "stop")
    assert not engine.advance(0.8, 2.8)
    [done] = engine.advance(0.02, 2.82)
    assert done.turn.cached_tokens == 107  # the last sampled token was never computed


def test_turns_that_decode_together_share_the_time_of_their_steps_and_wait_for_a_prefill() -> None:
    engine = Engine(RATES)
    engine.take("first", request("g:0", context=50, sampling=SAMPLING), 50, bytes(4 * 11), "stop")
    assert not engine.advance(0.25, 0.25)  # a step of 0.2 s, and half of the next one
    engine.take("second", request("h:0", context=100, sampling=SAMPLING), 100, bytes(4 * 2), "stop")
    [second] = engine.advance(0.46, 0.71)  # waits 0.05 s, then a step of 0.3 s with its prefill and one of 0.1 s
    assert second.turn.name == "second" and second.device_seconds == pytest.approx(0.3 * 100 / 101 + 0.1 / 2)
    [first] = engine.advance(0.7, 1.4)  # its eleventh token: 0.2 + 10 * 0.1, and 0.2 s of the other's prefill
    assert first.device_seconds + second.device_seconds == pytest.approx(1.4)


def test_lender_lends_from_its_grant_until_its_lease_expires() -> None:
    books = ExecutorWithBooks(lender())
    books.go_on(1.0)
    assert books.beat is not None and books.beat.state is ExecutorState.PAUSED and books.beat.by_grant
    books.grant()
    books.go_on(0.3)
    assert "being built" in books.beat.paused_reason
    books.go_on(0.4)
    assert books.beat.state is ExecutorState.READY and books.beat.token_budget == RATES.kv_tokens
    books.dispatch(turn())
    books.serve(1, 100)  # who computes nothing meanwhile
    books.go_on(4.0)
    books.serve(0, 0)
    books.go_on(0.9)
    assert not books.answers
    books.go_on(0.6)
    assert [answer.outcome for answer in books.answers] == [TurnOutcome.COMPLETED]
    assert "ran out" in books.beat.paused_reason
    assert books.what() == [NoteKind.GRANTED, NoteKind.FREE, NoteKind.FIRST, NoteKind.SHUT]


def test_user_memory_demand_preempts_turns_at_once_and_the_rest_if_it_lasts() -> None:
    books = ExecutorWithBooks(lender(wake_seconds=0.0))
    books.grant()
    books.go_on(0.2)
    for number in range(2):
        books.dispatch(turn(f"g:{number}"))
    books.go_on(0.5)
    books.serve(9, 36_000)
    books.go_on(0.05)
    assert {answer.outcome for answer in books.answers} == {TurnOutcome.PREEMPTED} and not books.executor.holds
    assert books.notes[-2].what is NoteKind.OFF and books.notes[-2].since == books.users.at

    books.serve(0, 0)
    books.go_on(3.0)
    books.dispatch(turn("g:2"))
    books.serve(1, 100)
    books.grant()
    books.go_on(MAX_BLOCKED_SECONDS - 0.2)
    assert books.executor.holds == 1
    books.go_on(0.4)
    assert books.executor.holds == 0 and books.answers[-1].reason.startswith("serving left it no moment")


def test_room_depends_on_users_and_not_on_held_turns() -> None:
    books = ExecutorWithBooks(lender(wake_seconds=0.0))
    books.grant()
    books.go_on(0.2)
    for number in range(RATES.max_turns):
        books.dispatch(turn(f"g:{number}"))
    books.go_on(4.0)
    assert not books.executor.holds
    assert books.what() == [NoteKind.GRANTED, NoteKind.FREE, NoteKind.FIRST]

    held = [turn(f"g:{number}") for number in range(8, 8 + RATES.max_turns)]
    for each in held:
        books.dispatch(each)
    books.serve(1, 22_000)
    books.go_on(0.05)
    books.grant()
    books.serve(0, 0)
    books.go_on(4.0)
    assert books.what().count(NoteKind.SHUT) == 0 and not books.executor.holds

    books.serve(9, 36_000)
    books.go_on(0.05)
    books.grant()
    books.serve(0, 0)
    books.go_on(4 * SERVING.quiet_seconds)
    books.dispatch(turn("g:7"))
    assert [(note.what, note.reason) for note in books.notes[3:] if note.what is not NoteKind.GRANTED] == [
        (NoteKind.SHUT, USERS),
        (NoteKind.FREE, USERS),
        (NoteKind.FIRST, USERS),
    ]


def test_executor_refuses_and_counts_turns_beyond_every_past_offer() -> None:
    books = ExecutorWithBooks(dedicated())
    books.go_on(0.1)
    for number in range(RATES.max_turns + 1):
        books.dispatch(turn(f"g:{number}"))
    assert [answer.refusal for answer in books.answers] == [Refusal.ROOM]
    assert books.what() == [NoteKind.OVERFILLED]


def test_turn_within_a_recent_offer_is_not_a_fault() -> None:
    books = ExecutorWithBooks(lender(wake_seconds=0.0))
    books.grant()
    books.go_on(0.2)
    books.serve(9, 36_000)
    books.go_on(0.05)
    assert books.beat is not None and books.beat.token_budget < RATES.kv_tokens
    books.dispatch(turn())
    assert [answer.refusal for answer in books.answers] == [Refusal.ROOM]
    assert NoteKind.OVERFILLED not in books.what()


def test_dispatch_is_answered_only_by_its_own_incarnation() -> None:
    books = ExecutorWithBooks(dedicated())
    books.go_on(0.1)
    books.dispatch(msgspec.structs.replace(turn(), incarnation=INCARNATION - 1))
    books.go_on(3.0)
    assert not books.answers and not books.executor.holds
