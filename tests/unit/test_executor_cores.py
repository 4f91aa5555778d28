"""The executor's pure cores: acceptance of turns, and the estimated cost of a step."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.schemas.arrays import pack_tokens
from rose.schemas.heartbeats import MAX_HELD_TURNS, ExecutorState, SlackHeartbeat, WorkerClass
from rose.schemas.prompts import Sampling
from rose.schemas.turns import PlacementCost, Refusal, TurnDispatch, TurnKey, TurnRequest, context_fields, held_hash
from rose.schemas.wire import decode, encode
from rose.workers.executor.inbox import Inbox, InboxAction, kv_tokens_needed, packed_hashes
from rose.workers.executor.ipc.messages import EngineStatus, LendingStats
from rose.workers.executor.records import ExecutorIncarnation, HeartbeatWriter
from rose.workers.executor.step_cost import ComputeShare, StepCost


def dispatch(
    name: str = "g:0", *, attempt: int = 0, incarnation: int = 7, claim: int = 0, context_tokens: int = 10
) -> TurnDispatch:
    request = TurnRequest(
        trajectory_id=name,
        group_id="g",
        home=0,
        environment="calculator",
        turn=0,
        **context_fields(pack_tokens([1] * context_tokens)),
        sampling=Sampling(max_tokens=5),
        requested_at=0.0,
        patience_seconds=60.0,
    )
    cost = PlacementCost(wait_seconds=0, prefill_seconds=0, decode_seconds=0)
    return TurnDispatch(
        request_wire=msgspec.Raw(encode(request)),
        home=0,
        offset=0,
        attempt=attempt,
        worker="executor-0",
        slot=0,
        incarnation=incarnation,
        claim=claim,
        dispatched_at=0.0,
        cost=cost,
    )


def inbox(*, max_turns: int = 4, token_budget: int = 1000) -> Inbox:
    return Inbox("executor-0", 7, max_turns=max_turns, token_budget=token_budget)


def test_turn_for_an_earlier_incarnation_is_dropped() -> None:
    answer = inbox().on_dispatch(dispatch(incarnation=6), 0, offset=10)
    assert (answer.action, answer.reason) == (InboxAction.DROP, "incarnation")


def test_turn_is_accepted_once_and_its_next_attempt_is_another_turn() -> None:
    box = inbox()
    assert box.on_dispatch(dispatch(), 0, offset=10).action is InboxAction.ACCEPT
    assert box.on_dispatch(dispatch(), 0, offset=10).action is InboxAction.DROP
    assert box.on_dispatch(dispatch(attempt=1), 0, offset=10).action is InboxAction.ACCEPT


def test_withdrawn_turn_is_stopped_if_it_is_held_and_otherwise_dropped() -> None:
    box = inbox()
    stop = msgspec.structs.replace(dispatch(), withdrawn=True)
    assert box.on_dispatch(stop, 0, offset=10).reason == "withdrawn"
    box.on_dispatch(dispatch(), 0, offset=11)
    assert box.on_dispatch(stop, 0, offset=12).action is InboxAction.STOP
    assert len(box) == 1, "the turn is held until it is answered"
    box.release(stop.key)
    assert box.on_dispatch(stop, 0, offset=13).action is InboxAction.DROP


def test_nothing_runs_before_a_version_is_proven() -> None:
    answer = inbox().on_dispatch(dispatch(), -1, offset=10)
    assert (answer.action, answer.refusal) == (InboxAction.REFUSE, Refusal.VERSION)


def test_turn_without_room_is_refused_with_that_reason() -> None:
    assert inbox(max_turns=0).on_dispatch(dispatch(), 0, offset=10).refusal is Refusal.ROOM
    assert inbox(token_budget=14).on_dispatch(dispatch(), 0, offset=10).refusal is Refusal.ROOM


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_dispatch_of_a_replaced_router_is_dropped(events: list[tuple[bool, int]]) -> None:
    box, newest = inbox(max_turns=100), 0
    for number, (tombstone, claim) in enumerate(events):
        if tombstone:
            box.on_claim(claim)
        else:
            answer = box.on_dispatch(dispatch(f"g:{number}", claim=claim), 0, offset=10)
            assert (answer.action is InboxAction.ACCEPT) == (claim >= newest)
        newest = max(newest, claim)


def test_impossible_fencing_token_does_not_block_later_routers() -> None:
    box = inbox()
    box.on_dispatch(dispatch("g:1", incarnation=6, claim=2**53), 0, offset=20)
    assert box.on_dispatch(dispatch("g:2", claim=12), 0, offset=21).reason == "claim"
    box.on_claim(22)  # by the router, which sees that no executor holds its dispatch
    assert box.on_dispatch(dispatch("g:2", attempt=1, claim=22), 0, offset=23).action is InboxAction.ACCEPT


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(1, 60), st.booleans()), max_size=80))
def test_held_turns_stay_within_the_offer_are_listed_and_return_once(
    history: list[tuple[int, int, int, bool]],
) -> None:
    box = inbox(max_turns=3, token_budget=100)
    held: dict[TurnKey, TurnDispatch] = {}
    for name, attempt, context_tokens, release in history:
        offered = dispatch(f"g:{name}", attempt=attempt, context_tokens=context_tokens)
        if release and held:
            key = next(iter(held))
            assert box.release(key) is held.pop(key)
        elif box.on_dispatch(offered, 0, offset=10).action is InboxAction.ACCEPT:
            assert offered.key not in held
            held[offered.key] = offered
        assert len(box) == len(held) <= 3
        assert box.tokens == sum(map(kv_tokens_needed, held.values())) <= 100
        assert packed_hashes(box.listed_hashes) == b"".join(held_hash(key).to_bytes(8, "little") for key in held)
    for key in list(held):
        box.release(key)
        with pytest.raises(KeyError):
            box.release(key)
    assert (len(box), box.tokens, box.listed_hashes) == (0, 0, [])


def test_answered_turn_takes_no_room_and_is_listed_until_its_result_is_stored() -> None:
    box, first, second = inbox(max_turns=1), dispatch(), dispatch(attempt=1)
    box.on_dispatch(first, 0, offset=10)
    box.on_answer_sent(box.release(first.key).key)
    assert (len(box), box.tokens, box.listed_turns, box.listed_hashes) == (0, 0, 1, [held_hash(first.key)])
    assert box.on_dispatch(first, 0, offset=11).reason == "duplicate"
    assert box.on_dispatch(second, 0, offset=12).action is InboxAction.ACCEPT
    assert (len(box), box.listed_hashes) == (1, [held_hash(second.key), held_hash(first.key)])
    for _ in range(2):
        box.on_answer_stored(first.key)
        assert (box.listed_turns, box.listed_hashes) == (1, [held_hash(second.key)])


def test_heartbeat_is_writable_and_lists_held_turns_with_any_unstored_results() -> None:
    box = inbox()
    for number in range(MAX_HELD_TURNS):
        box.on_answer_sent(TurnKey("g:1", 0, number))
    box.on_dispatch(dispatch(), 0, offset=10)
    assert len(box.listed_hashes) == MAX_HELD_TURNS and box.listed_hashes[0] == held_hash(dispatch().key)


@given(
    base=st.floats(1e-4, 1e-1),
    per_token=st.floats(1e-6, 1e-3),
    sizes=st.lists(st.integers(1, 500), min_size=30, max_size=60).filter(lambda sizes: max(sizes) > 4 * min(sizes)),
)
def test_cost_fit_finds_a_linear_cost(base: float, per_token: float, sizes: list[int]) -> None:
    cost = StepCost(base_seconds=1.0, token_seconds=1.0)
    for tokens in sizes:
        cost.observe(tokens, base + per_token * tokens)
    for tokens in (1, 100, 500):
        assert cost.seconds(tokens) == pytest.approx(base + per_token * tokens, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 100)), max_size=50))
def test_every_rate_stays_finite_and_positive(steps: list[tuple[int, float]]) -> None:
    cost = StepCost(base_seconds=0.001, token_seconds=0.0001)
    for tokens, seconds in steps:
        cost.observe(tokens, seconds)
        assert 0 < cost.prefill_tokens_per_second < 1e9
        assert 0 < cost.decode_tokens_per_second(0) < 1e9


@pytest.mark.parametrize("sizes", [(15, 16), (1, 2), (16,) * 19 + (15,)])
@pytest.mark.parametrize("seed", range(4))
def test_prefill_token_cost_is_remembered_during_pure_decoding(sizes: tuple[int, ...], seed: int) -> None:
    """Only noise distinguishes steps of equal size; without memory the next prompt would fill one step."""
    draw, cost, bound = random.Random(seed), StepCost(base_seconds=0.01, token_seconds=0.0001), 0.02

    def taken(tokens: int) -> float:
        return (0.008 + 0.0003 * tokens) * (1.0 + draw.expovariate(20))

    for tokens in [1, 4, 16, 64] * 2:
        cost.observe(tokens, taken(tokens))
    for _ in range(2000):
        tokens = draw.choice(sizes)
        cost.observe(tokens, taken(tokens))
        assert 0.008 + 0.0003 * cost.tokens_within(bound) < bound


def test_step_size_grows_gradually_beyond_observed_sizes() -> None:
    cost = StepCost(base_seconds=0.01, token_seconds=0.0001)
    for taken in (0.00301, 0.003, 0.00299):
        cost.observe(10, taken)
    assert cost.tokens_within(10.0) == 40


@pytest.mark.parametrize("seed", range(4))
def test_step_size_stays_worth_the_fixed_cost_under_cpu_preemption(
    seed: int,
) -> None:
    """One step in fifty is delayed. With one token per step, as many were delayed and almost no step was made."""
    draw, cost, bound = random.Random(seed), StepCost(base_seconds=0.01, token_seconds=0.0001), 0.02
    made, now = 0, 0.0
    for _ in range(5000):
        tokens = max(1, min(16, cost.tokens_within(bound)))
        away = draw.uniform(0.003, 0.012) if draw.random() < 0.02 else 0.0
        taken = (0.008 + 0.0003 * tokens) * (1.0 + draw.expovariate(20)) + away
        cost.observe(tokens, taken)
        made, now = made + tokens, now + taken
    assert made / now > 0.4 * 16 / (0.008 + 0.0003 * 16)


def test_heartbeats_are_numbered_list_held_turns_and_count_each_cut_once() -> None:
    box, writer = inbox(), HeartbeatWriter(ExecutorIncarnation("e", WorkerClass.SERVING, 7), slot=3)
    box.on_dispatch(dispatch(), 0, offset=10)
    tick = EngineStatus(
        0,
        "cpu",
        0,
        0,
        1000,
        1000,
        10,
        1.0,
        1.0,
        0,
        0.0,
        lending=LendingStats(cuts=2, frozen=True),
        seeded=False,
        devices=4,
    )
    writer.on_status(tick)
    heartbeats = [
        writer.next_heartbeat(
            tick,
            box,
            state=ExecutorState.READY,
            version=0,
            pause_reason="",
            now=1.0,
            refused=(4, "off by 2"),
            swap_seconds=0.5,
        ),
        writer.next_heartbeat(
            tick, box, state=ExecutorState.STOPPING, version=0, pause_reason="it stops", now=2.0, turns=[]
        ),
    ]
    assert [(beat.sequence, beat.cuts, beat.frozen, beat.seeded, beat.devices) for beat in heartbeats] == [
        (0, 2, True, False, 4),
        (1, 2, True, False, 4),
    ]
    assert [beat.holds for beat in heartbeats] == [packed_hashes(box.listed_hashes), b""]
    assert (
        heartbeats[0].incarnation,
        heartbeats[0].slot,
        heartbeats[0].swap_seconds,
        heartbeats[0].refused_version,
    ) == (7, 3, 0.5, 4)
    assert heartbeats[1].paused_reason == "it stops" and decode(SlackHeartbeat, encode(heartbeats[1])) == heartbeats[1]


def test_compute_share_is_the_mean_share_of_long_and_short_steps() -> None:
    share = ComputeShare()
    for _ in range(200):  # a step of 0.3 s ends in every third interval of 0.2 s: half of the time is computed
        for computed in (0.0, 0.0, 0.3):
            share.observe(computed, 0.2, has_turns=True)
    assert share.value == pytest.approx(0.5, rel=0.05)


def test_compute_share_returns_to_one_without_turns_and_stays_positive() -> None:
    share = ComputeShare()
    share.observe(0.0, 1000.0, has_turns=True)
    assert 0.0 < share.value < 0.05
    share.observe(0.0, 1000.0, has_turns=False)
    assert share.value == pytest.approx(1.0)
