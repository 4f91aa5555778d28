"""A policy router keeps every offer and loses no turn, whichever executors leave, are killed or fall silent."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.pipeline.routing.turn_queue import ReceivedRequest
from rose.pipeline.simulation.policies import PolicyRouter
from rose.schemas.heartbeats import ExecutorState
from rose.schemas.turns import TurnDispatch, TurnKey, TurnOutcome, TurnResult
from tests.support.routing_fixtures import TTL_SECONDS, heartbeat, request, result

POLICIES = ["round_robin", "session", "least_load"]
WORKERS, MOST_TURNS, BUDGET, NEED = 3, 3, 80, 30

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "answer", "answer", "preempt", "silence", "speak", "kill", "leave", "wait"]),
        st.integers(0, WORKERS - 1),
        st.integers(0, 9),
    ),
    max_size=60,
)


class Bus:
    """Executors by number, and what became of each turn."""

    def __init__(self, policy: str) -> None:
        self.router = PolicyRouter(policy)
        self.now = 0.0
        self.held: list[dict[TurnKey, TurnDispatch]] = [{} for _ in range(WORKERS)]
        self.incarnations = [1] * WORKERS
        self.silent: set[int] = set()
        self.turns: Counter[str] = Counter()
        """Number of the present turn of each trajectory."""
        self.open: set[str] = set()
        self.tokens: Counter[str] = Counter()
        """Most tokens that an attempt of the present turn handed back."""
        for worker in range(WORKERS):
            self.beat(worker)

    def send(self, decisions: list[TurnDispatch | TurnResult]) -> None:
        for each in decisions:
            assert isinstance(each, TurnDispatch)
            worker = int(each.worker[1:])
            if each.incarnation == self.incarnations[worker]:
                held = self.held[worker]
                held[each.key] = each
                assert len(held) <= MOST_TURNS and NEED * len(held) <= BUDGET, f"{each.worker} is overfilled"

    def beat(self, worker: int, state: ExecutorState = ExecutorState.READY) -> None:
        if worker not in self.silent:
            beat = heartbeat(
                worker,
                state=state,
                incarnation=self.incarnations[worker],
                max_turns=MOST_TURNS,
                token_budget=BUDGET,
            )
            self.send(self.router.on_event(beat, self.now))

    def answer(self, worker: int, number: int, outcome: TurnOutcome) -> None:
        held = self.held[worker]
        if not held:
            return
        dispatch = held.pop(list(held)[number % len(held)])
        name = dispatch.request.trajectory_id
        answer = result(dispatch, outcome, tokens=1)
        if outcome is TurnOutcome.COMPLETED and dispatch.request.turn == self.turns[name]:
            self.open.discard(name)
        self.send(self.router.on_event(answer, self.now))

    def act(self, what: str, worker: int, number: int) -> None:
        if what == "ask":
            name = f"g{number}:0"
            if name not in self.open:
                self.turns[name] += 1
                self.open.add(name)
                asked = request(name, self.turns[name], context=20, max_tokens=10)
                self.send(self.router.on_event(ReceivedRequest.from_record(asked), self.now))
        elif what == "answer":
            self.answer(worker, number, TurnOutcome.COMPLETED)
        elif what == "preempt":
            self.answer(worker, number, TurnOutcome.PREEMPTED)
        elif what == "silence":
            self.silent.add(worker)
        elif what == "speak":
            self.silent.discard(worker)
            self.beat(worker)
        elif what in ("kill", "leave"):
            if what == "leave":
                for _ in range(len(self.held[worker])):
                    self.answer(worker, 0, TurnOutcome.PREEMPTED)
                self.beat(worker, ExecutorState.STOPPING)
            self.held[worker].clear()
            self.incarnations[worker] += 1
            self.beat(worker)
        else:
            self.now += TTL_SECONDS
            for each in range(WORKERS):
                self.beat(each)
            self.send(self.router.tick(self.now))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(POLICIES), ACTIONS)
def test_policy_keeps_every_offer_and_answers_every_turn(policy: str, actions: list[tuple[str, int, int]]) -> None:
    bus = Bus(policy)
    for action in actions:
        bus.act(*action)
    bus.silent.clear()
    for _ in range(len(actions) + 2):
        bus.act("wait", 0, 0)
        for worker in range(WORKERS):
            while bus.held[worker]:
                bus.answer(worker, 0, TurnOutcome.COMPLETED)
    assert not bus.open and not bus.router.turns and not bus.router.waiting


def test_preempted_turn_goes_on_with_its_tokens() -> None:
    bus = Bus("round_robin")
    bus.act("ask", 0, 0)
    worker = next(number for number, held in enumerate(bus.held) if held)
    bus.answer(worker, 0, TurnOutcome.PREEMPTED)
    (dispatch,) = [each for held in bus.held for each in held.values()]
    assert dispatch.attempt == 1 and dispatch.partial is not None and len(dispatch.partial.tokens) == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_turns_that_come_together_are_spread_over_all_executors(policy: str) -> None:
    bus = Bus(policy)
    for number in range(WORKERS):
        bus.act("ask", 0, number)
    assert [len(held) for held in bus.held] == [1] * WORKERS


def test_session_returns_to_its_executor_and_least_load_to_the_idlest() -> None:
    for policy, expected in (("session", 2), ("least_load", 0)):
        bus = Bus(policy)
        for number in range(WORKERS):
            bus.act("ask", 0, number)
        for worker in (0, 2):
            bus.answer(worker, 0, TurnOutcome.COMPLETED)
        bus.act("ask", 0, 2)
        assert [name.request.trajectory_id for name in bus.held[expected].values()] == ["g2:0"]
