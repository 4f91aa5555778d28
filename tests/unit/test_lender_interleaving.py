"""Interleaved guest steps beside a serving engine with unexpected behaviour: serving continues, and its loop does not
spin."""

import logging
import math
import queue
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.v1.core.block_pool import BlockPool

from rose.workers.executor import metrics
from rose.workers.executor.ipc.messages import NextWork, WorkKind
from rose.workers.lender.admission import Admission, AdmissionDecision, HoldReason, Promise, ServingState
from rose.workers.lender.config import LendConfig
from rose.workers.lender.status_page import StatusPage
from rose.workers.lender.vllm.interleaving import StepInterleaver
from rose.workers.lender.vllm.kv_sharing import ServingMemory


@pytest.fixture(autouse=True)
def exported_metrics() -> Iterator[None]:
    """Remove exported metrics after each test."""
    with metrics.exported():
        yield


def serving() -> Any:
    """A scripted engine core that steps."""
    pool = BlockPool(8, enable_caching=True, hash_block_size=1)
    scheduler = SimpleNamespace(
        max_num_scheduled_tokens=64,
        max_num_active_reqs=4,
        running=[],
        waiting=[],
        kv_holding_waiting=[],
        num_spec_tokens=0,
        _spec_decode_step_blocks=0,
        requests={},
        kv_cache_manager=SimpleNamespace(
            block_pool=pool,
            record_prefix_cache_stats=None,
            watermark_blocks=0,
            coordinator=SimpleNamespace(group_block_sizes=(1,)),
        ),
        kv_cache_config=SimpleNamespace(
            num_blocks=8, kv_cache_tensors=[SimpleNamespace(size=64)], kv_cache_layout=None
        ),
    )
    scheduler.schedule = lambda: None
    scheduler.get_request_counts = lambda: (len(scheduler.running), len(scheduler.waiting))
    scheduler.has_requests = lambda: not scheduler.paused and bool(scheduler.running or scheduler.waiting)
    scheduler.paused = False
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
    core = SimpleNamespace(scheduler=scheduler, vllm_config=config, model_executor=None, input_queue=queue.Queue())
    core.batch_queue = None
    core.is_running, core.has_work = lambda: True, scheduler.has_requests

    def take_input() -> None:
        while not core.input_queue.empty():
            scheduler.running.append(core.input_queue.get_nowait())

    core._process_input_queue = take_input
    return core


class BusyGuest:
    """A guest that always has work."""

    busy, next_work = True, NextWork(WorkKind.STEP, 0.01)

    def __init__(self) -> None:
        self.pieces = self.held = 0
        self.dropped: list[Exception] = []

    def make_room(self) -> None: ...

    def tick(self, *, seconds: float, tokens: int) -> None:
        self.pieces += 1

    def tick_idle(self, *, blocked: bool) -> None:
        self.held += blocked

    def drop(self, error: Exception) -> None:
        self.dropped.append(error)


class LayeredGuest(BusyGuest):
    """A guest step with layers, between which it yields. It catches every exception."""

    has_room = True
    stands_for = 10**6
    """Number of checks after which the end of the step is awaited."""

    def __init__(self, between_layers: Callable[[], None], during_layer: Callable[[int], None]) -> None:
        super().__init__()
        self.between_layers, self.during_layer = between_layers, during_layer
        self.is_aside = False
        self.stood = 0
        """Number of checks whether the step may stay paused."""
        self.failed: Exception | None = None

    def make_room_mid_step(self) -> bool:
        return self.has_room

    def tick_mid_step(self, *, blocked: bool) -> bool:
        self.stood += 1
        self.held += blocked
        return self.stood < self.stands_for

    @contextmanager
    def as_host(self) -> Iterator[None]:
        self.is_aside = True
        yield
        self.is_aside = False

    def tick(self, *, seconds: float, tokens: int) -> None:
        super().tick(seconds=seconds, tokens=tokens)
        try:
            for layer in range(4):
                self.during_layer(layer)
                self.between_layers()
        except Exception as error:  # noqa: BLE001
            self.failed = error


@pytest.fixture
def core() -> Any:
    return serving()


@pytest.fixture
def turns(core: Any) -> StepInterleaver:
    feeder: Any = SimpleNamespace(connection=None, closed=[])
    turns = StepInterleaver(
        core, LendConfig(model_folder="", socket=""), feeder, StatusPage(None), logging.getLogger("turns")
    )
    turns._guest = BusyGuest()  # type: ignore[assignment]
    return turns


def test_loop_of_a_paused_server_sleeps_despite_guest_work(core: Any, turns: StepInterleaver) -> None:
    guest: Any = turns._guest
    core.scheduler.waiting.append(
        SimpleNamespace(request_id="a", arrival_time=0.0, num_tokens=4, num_computed_tokens=0)
    )
    turns.step(lambda: True)
    assert turns.guest_ready and guest.held == 1, "the next step of serving may end what holds it"
    core.scheduler.paused = True
    turns.step(lambda: False)
    assert not turns.guest_ready and guest.held == 2
    core.scheduler.waiting.clear()
    turns.step(lambda: False)
    assert turns.guest_ready and guest.pieces == 1


def test_guest_waits_for_running_requests_and_batches_of_async_scheduling(core: Any) -> None:
    core.batch_queue = deque(maxlen=2)
    feeder: Any = SimpleNamespace(connection=None, closed=[])
    config, log = LendConfig(model_folder="", socket=""), logging.getLogger("turns")
    interleaver = StepInterleaver(core, config, feeder, StatusPage(None), log)
    guest: Any = BusyGuest()
    interleaver._guest = guest
    core.has_work = lambda: bool(core.scheduler.running or core.batch_queue)
    core.scheduler.running.append(request("a"))
    interleaver.step(lambda: True)
    assert (guest.pieces, guest.held) == (0, 1) and interleaver.guest_ready
    core.scheduler.running.clear()
    core.batch_queue.append("the batch that was started before the last token of the request was known")
    interleaver.step(lambda: True)
    assert (guest.pieces, guest.held) == (0, 2) and interleaver.guest_ready
    stats = interleaver._serving_stats()
    assert stats.held_back == {"occupancy": 2}
    assert stats.prefill_headroom is stats.decode_headroom is None
    core.batch_queue.clear()
    interleaver.step(lambda: True)
    assert guest.pieces == 1


def test_unexpected_serving_state_ends_lending_and_not_serving(core: Any, turns: StepInterleaver) -> None:
    guest: Any = turns._guest
    new = SimpleNamespace(prompt_len=None, num_computed_tokens=0)
    strange = SimpleNamespace(total_num_scheduled_tokens=4, scheduled_new_reqs=[new], num_scheduled_tokens={"a": 4})
    turns._view._scheduled = strange
    assert turns.step(lambda: True)
    assert [type(error) for error in guest.dropped] == [TypeError] and not turns.guest_ready
    assert turns.step(lambda: True) and not turns.step(lambda: False)
    assert (guest.pieces, guest.held, len(guest.dropped)) == (0, 0, 1)


def test_error_of_a_serving_step_is_raised_to_serving(turns: StepInterleaver) -> None:
    def fails() -> bool:
        raise RuntimeError("its own")

    with pytest.raises(RuntimeError, match="its own"):
        turns.step(fails)
    assert turns.guest_ready


def test_prediction_error_is_logged_and_exported(turns: StepInterleaver) -> None:
    learned = turns._admission
    for number in range(40):
        learned.guest.observe(1 + number % 8, 0.001)
        learned.on_serving_step(prompt_tokens=0, decoding=1 + number % 4, held=1, seconds=0.002)
        learned.on_serving_step(prompt_tokens=1 + number % 60, decoding=0, held=1, seconds=0.003)
    metrics.show_serving(turns._serving_stats())
    for step, cost in (
        ("guest", learned.guest),
        ("prefill", learned.serving.prefill),
        ("decode", learned.serving.decode),
    ):
        exported = REGISTRY.get_sample_value("rose_lender_prediction_error_ratio", {"step": step})
        assert exported == cost.error and 0.0 < cost.error < 1.0


def test_broken_promise_is_reported_until_read_and_idle_reports_hide_no_long_piece(
    core: Any, turns: StepInterleaver
) -> None:
    guest: Any = turns._guest
    pieces = "rose_lender_guest_piece_seconds_count"
    core.scheduler.waiting.append(
        SimpleNamespace(request_id="late", arrival_time=0.0, num_tokens=4, num_computed_tokens=0)
    )
    turns.step(lambda: True)
    metrics.show_serving(turns._serving_stats())
    before = REGISTRY.get_sample_value(pieces) or 0
    headroom = REGISTRY.get_sample_value("rose_lender_headroom_seconds", {"kind": "prefill"})
    assert headroom is not None and headroom < 0
    guest.busy = False
    turns.step(lambda: True)
    metrics.show_serving(turns._serving_stats())
    headroom = REGISTRY.get_sample_value("rose_lender_headroom_seconds", {"kind": "prefill"})
    assert headroom is not None and math.isnan(headroom)
    assert REGISTRY.get_sample_value(pieces) == before
    core.scheduler.waiting.clear()
    guest.busy = True
    turns.step(lambda: True)
    metrics.show_serving(turns._serving_stats())
    assert REGISTRY.get_sample_value(pieces) == before + 1


def request(name: str) -> Any:
    sizes = {"num_tokens": 4, "num_computed_tokens": 0, "num_output_placeholders": 0}
    return SimpleNamespace(request_id=name, arrival_time=0.0, **sizes)


def layered(
    turns: StepInterleaver,
    core: Any,
    done: list[str],
    *,
    comes: dict[int, str],
    steps: int = 2,
    has_room: bool = True,
    stands_for: int = 10**6,
) -> LayeredGuest:
    """Return a guest beside a core that serves each request, which arrives before these layers, in this many steps."""

    def during_layer(layer: int) -> None:
        done.append(f"layer {layer}")
        if layer in comes:
            core.input_queue.put(request(comes[layer]))

    def serve() -> bool:
        if not core.scheduler.running:
            return False
        guest: Any = turns._guest
        assert guest.is_aside, "the process is the host's"
        done.append(core.scheduler.running[0].request_id)
        if done.count(core.scheduler.running[0].request_id) == steps:
            core.scheduler.running.clear()
        return True

    guest = LayeredGuest(turns._yield_to_serving, during_layer)
    guest.has_room, guest.stands_for = has_room, stands_for
    turns._guest = guest  # type: ignore[assignment]
    turns.step(serve)
    return guest


def test_request_that_arrives_between_two_layers_is_served_before_the_next_layer(
    core: Any, turns: StepInterleaver
) -> None:
    done: list[str] = []
    guest = layered(turns, core, done, comes={1: "a", 2: "b"})
    assert done == ["layer 0", "layer 1", "a", "a", "layer 2", "b", "b", "layer 3"]
    assert guest.failed is None and not guest.is_aside and guest.pieces == 1


def test_step_without_reclaimable_memory_runs_to_its_end(core: Any, turns: StepInterleaver) -> None:
    done: list[str] = []
    layered(turns, core, done, comes={1: "a"}, has_room=False)
    assert done == ["layer 0", "layer 1", "layer 2", "layer 3"] and core.scheduler.running, "its room is made first"


def test_step_is_paused_while_serving_is_busy(
    core: Any, turns: StepInterleaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guest computes nothing during serving's work of any length, and reports the reason of the wait."""
    now = iter(range(0, 10**6, 100))
    monkeypatch.setattr("rose.workers.lender.vllm.interleaving.time.monotonic", lambda: float(next(now)))
    done: list[str] = []
    guest = layered(turns, core, done, comes={1: "a"}, steps=50)
    assert done == ["layer 0", "layer 1", *["a"] * 50, "layer 2", "layer 3"]
    assert guest.stood == 50 and guest.held == sum(turns._serving_stats().held_back.values()) == 49


def test_awaited_step_runs_to_its_end(core: Any, turns: StepInterleaver) -> None:
    """The rest of the step is one piece for the waiting request."""
    done: list[str] = []
    guest = layered(turns, core, done, comes={0: "a", 1: "b", 2: "c"}, steps=3, stands_for=5)
    assert done == ["layer 0", *["a"] * 3, "layer 1", *["b"] * 2, "layer 2", "layer 3"]
    assert guest.stood == 5 and core.scheduler.running


def test_paused_server_does_not_keep_a_step_paused(core: Any, turns: StepInterleaver) -> None:
    done: list[str] = []
    core.has_work = lambda: False
    layered(turns, core, done, comes={1: "a"}, steps=9)
    assert done == ["layer 0", "layer 1", "a", "layer 2", "layer 3"]


def test_serving_error_within_a_guest_step_is_raised_to_serving(core: Any, turns: StepInterleaver) -> None:
    def fails() -> bool:
        if core.scheduler.running:
            raise RuntimeError("its own")
        return False

    guest = LayeredGuest(
        turns._yield_to_serving, lambda layer: core.input_queue.put(request("a")) if layer == 1 else None
    )
    turns._guest = guest  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="its own"):
        turns.step(fails)
    assert guest.failed is None and not guest.dropped


def test_tokens_of_batches_in_flight_have_room_in_the_next_step(core: Any) -> None:
    """A step of one decoding request starts while its last token is not known."""
    decoding = request("a")
    decoding.num_computed_tokens, decoding.num_output_placeholders = 4, 1
    core.scheduler.running.append(decoding)
    assert ServingMemory(core).wanted_blocks == 1


def test_every_waiting_request_has_room_in_the_next_step_if_a_seat_is_free(core: Any) -> None:
    """vLLM skips a request that cannot start, and admits the next."""
    scheduler, memory = core.scheduler, ServingMemory(core)
    scheduler.max_num_active_reqs = 1
    scheduler.waiting.append(request("its adapter is not loaded"))
    assert memory.wanted_blocks == 4 < memory.pool.blocks
    scheduler.waiting.extend(request(f"can start {number}") for number in range(100))
    assert memory.wanted_blocks == memory.pool.blocks, "no more than a step can get"


def test_queue_takes_no_block_from_the_guest_while_all_seats_are_taken(core: Any) -> None:
    """A cut would abort the guest's turns for requests that the step does not look at."""
    decoding = request("decoding")
    decoding.num_computed_tokens = 3
    core.scheduler.max_num_active_reqs = 1
    core.scheduler.running.append(decoding)
    core.scheduler.waiting.extend(request(f"queued {number}") for number in range(100))
    assert ServingMemory(core).wanted_blocks == 1


def test_unexpected_serving_state_within_a_step_ends_only_lending(core: Any, turns: StepInterleaver) -> None:
    done: list[str] = []
    core.scheduler.get_request_counts = lambda: (0, 0)
    guest = LayeredGuest(
        turns._yield_to_serving, lambda layer: core.input_queue.put(object()) if layer == 1 else done.append("layer")
    )
    turns._guest = guest  # type: ignore[assignment]
    assert not turns.step(lambda: False)
    assert (
        done == ["layer"] * 3 and [type(error) for error in guest.dropped] == [AttributeError] and not turns.guest_ready
    )


def test_serving_error_keeps_its_cause(core: Any, turns: StepInterleaver) -> None:
    def fails() -> bool:
        if core.scheduler.running:
            raise RuntimeError("its own") from OSError("why")
        return False

    guest = LayeredGuest(
        turns._yield_to_serving, lambda layer: core.input_queue.put(request("a")) if layer == 1 else None
    )
    turns._guest = guest  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="its own") as raised:
        turns.step(fails)
    assert isinstance(raised.value.__cause__, OSError)


@pytest.mark.parametrize(("slack", "goes_on"), [(60.0, True), (1e-9, False)])
def test_paused_step_continues_beside_a_request_only_within_the_slack(
    core: Any, turns: StepInterleaver, slack: float, goes_on: bool
) -> None:
    """The step is not split further, and is charged for the requests that serving holds by then."""
    reported: list[int] = []
    turns._admission.on_guest_run = lambda *, held, seconds: reported.append(held)  # type: ignore[method-assign]
    admit = turns._admission.admit

    def admits(serving: ServingState, next_work: NextWork, *, now: float) -> AdmissionDecision:
        answer = admit(serving, next_work, now=now)
        if not serving.held:
            return answer
        assert next_work.kind is WorkKind.ATOMIC
        return AdmissionDecision(slack, 1, None if next_work.seconds <= slack else HoldReason.DECODE, None, None)

    turns._admission.admit = admits  # type: ignore[method-assign]
    done: list[str] = []
    layered(turns, core, done, comes={1: "a"}, steps=3)
    assert done[2:] == (["a", "layer 2", "layer 3"] if goes_on else ["a", "a", "a", "layer 2", "layer 3"])
    assert reported == ([0, 1] if goes_on else [0, 0])


def test_step_planned_in_idle_time_continues_piecewise_beside_serving(
    core: Any, turns: StepInterleaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a guest beside a never idle server would stay paused forever without a reason."""
    now = 100.0
    monkeypatch.setattr(
        "rose.workers.lender.vllm.interleaving.time", SimpleNamespace(monotonic=lambda: now, thread_time=int)
    )
    promise = Promise(dial=0.5, ttft_seconds=0.5, tpot_seconds=0.05, yield_seconds=0.02)
    learned = turns._admission = Admission(promise, serving_step_tokens=64)
    for number in range(400):
        learned.guest.observe(1 + number % 30, 0.004 + 0.0001 * (1 + number % 30))
        learned.on_serving_step(prompt_tokens=0, decoding=1 + number % 2, held=1, seconds=0.032)
    last: list[float] = []
    turns._view.state = lambda: ServingState(last_tokens=last)  # type: ignore[method-assign]
    turns._view.on_step = lambda began, ended: None  # type: ignore[method-assign]

    def serve() -> bool:
        nonlocal now
        if not core.scheduler.running:
            return False
        now += 0.032
        last[:] = [now]
        learned.on_serving_step(prompt_tokens=0, decoding=1, held=1, seconds=0.032)
        return True

    def during_layer(layer: int) -> None:
        nonlocal now
        now += 0.001
        if layer == 1:
            core.input_queue.put(request("never ends"))

    guest = LayeredGuest(turns._yield_to_serving, during_layer)
    guest.next_work, guest.stands_for = NextWork(WorkKind.STEP, 0.02), 200
    turns._guest = guest  # type: ignore[assignment]
    turns.step(serve)
    assert guest.stood < 5 and guest.held < guest.stood


def test_serving_time_within_a_step_is_not_charged_to_the_guest(core: Any, turns: StepInterleaver) -> None:
    reported: list[float] = []
    turns._admission.on_guest_run = lambda *, held, seconds: reported.append(seconds)  # type: ignore[method-assign]
    now = iter(range(10**6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rose.workers.lender.vllm.interleaving.time.monotonic", lambda: float(next(now)))
        layered(turns, core, [], comes={1: "a"}, steps=50)
        between = float(next(now))
    assert between > 100 and sum(reported) < 20 and turns._longest < 5


def test_wait_for_a_layer_in_the_queue_of_a_gpu_is_charged_to_the_guest(
    core: Any, turns: StepInterleaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread goes to serving when the guest's kernels have ended, and the request waits for that too."""
    charged: list[float] = []
    turns._admission.on_guest_run = lambda *, held, seconds: charged.append(seconds)  # type: ignore[method-assign]
    now = 0.0
    monkeypatch.setattr("rose.workers.lender.vllm.interleaving.time.monotonic", lambda: now)

    class QueuedGuest(LayeredGuest):
        @contextmanager
        def as_host(self) -> Iterator[None]:
            nonlocal now
            now += 7.0
            with super().as_host():
                yield

    def during_layer(layer: int) -> None:
        if layer == 1:
            core.input_queue.put(request("a"))

    turns._guest = QueuedGuest(turns._yield_to_serving, during_layer)  # type: ignore[assignment]
    turns.step(lambda: bool(core.scheduler.running) and not core.scheduler.running.clear())
    assert sum(charged) == turns._longest == 7.0
