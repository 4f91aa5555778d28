"""Turns beside a serving engine that does what was not foreseen: it goes on, and its loop does not spin."""

import logging
import math
import queue
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.v1.core.block_pool import BlockPool

from workers.executor import metrics
from workers.executor.want import Want, Work
from workers.lender.config import LendConfig
from workers.lender.pulse import Pulse
from workers.lender.vllm.turns import Turns


def serving() -> Any:
    """A core that steps, played."""
    pool = BlockPool(8, enable_caching=True, hash_block_size=1)
    scheduler = SimpleNamespace(
        max_num_scheduled_tokens=64,
        max_num_running_reqs=4,
        block_size=1,
        running=[],
        waiting=[],
        requests={},
        kv_cache_manager=SimpleNamespace(block_pool=pool, record_prefix_cache_stats=None, watermark_blocks=0),
        kv_cache_config=SimpleNamespace(num_blocks=8, kv_cache_tensors=[SimpleNamespace(size=64)]),
    )
    scheduler.schedule = lambda: None
    scheduler.get_request_counts = lambda: (len(scheduler.running), len(scheduler.waiting))
    scheduler.has_requests = lambda: not scheduler.paused and bool(scheduler.running or scheduler.waiting)
    scheduler.paused = False
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
    core = SimpleNamespace(scheduler=scheduler, vllm_config=config, model_executor=None, input_queue=queue.Queue())
    core.is_running, core.has_work = lambda: True, scheduler.has_requests
    return core


class BusyGuest:
    """Wants to compute, always."""

    busy, want = True, Want(Work.STEP, 0.01)

    def __init__(self) -> None:
        self.pieces = self.held = 0
        self.dropped: list[Exception] = []

    def make_room(self) -> None: ...

    def tick(self, *, seconds: float, tokens: int) -> None:
        self.pieces += 1

    def beat(self, *, held: bool) -> None:
        self.held += held

    def drop(self, error: Exception) -> None:
        self.dropped.append(error)


@pytest.fixture
def core() -> Any:
    return serving()


@pytest.fixture
def turns(core: Any) -> Turns:
    feeder: Any = SimpleNamespace(link=None, ended=[])
    turns = Turns(core, LendConfig(model_folder="", socket=""), feeder, Pulse(None), logging.getLogger("turns"))
    turns._guest = BusyGuest()  # type: ignore[assignment]
    return turns


def test_the_loop_of_a_server_that_is_paused_sleeps_whatever_the_guest_wants(core: Any, turns: Turns) -> None:
    guest: Any = turns._guest
    core.scheduler.waiting.append(
        SimpleNamespace(request_id="a", arrival_time=0.0, num_tokens=4, num_computed_tokens=0)
    )
    turns.step(lambda: True)
    assert turns.wanted and guest.held == 1, "the next step of serving may end what holds it"
    core.scheduler.paused = True
    turns.step(lambda: False)
    assert not turns.wanted and guest.held == 2
    core.scheduler.waiting.clear()
    turns.step(lambda: False)
    assert turns.wanted and guest.pieces == 1


def test_what_was_not_foreseen_of_serving_ends_lending_and_not_serving(core: Any, turns: Turns) -> None:
    guest: Any = turns._guest
    new = SimpleNamespace(prompt_token_ids=None, num_computed_tokens=0)
    strange = SimpleNamespace(total_num_scheduled_tokens=4, scheduled_new_reqs=[new], num_scheduled_tokens={"a": 4})
    turns._view._scheduled = strange
    assert turns.step(lambda: True)
    assert [type(error) for error in guest.dropped] == [TypeError] and not turns.wanted
    assert turns.step(lambda: True) and not turns.step(lambda: False)
    assert (guest.pieces, guest.held, len(guest.dropped)) == (0, 0, 1)


def test_an_error_of_serving_s_own_step_is_serving_s(turns: Turns) -> None:
    def fails() -> bool:
        raise RuntimeError("its own")

    with pytest.raises(RuntimeError, match="its own"):
        turns.step(fails)
    assert turns.wanted


def test_how_wrong_predictions_are_is_told_and_exported(turns: Turns) -> None:
    learned = turns._admission
    for number in range(40):
        learned.guest.observe(1 + number % 8, 0.001)
        learned.served(prompt_tokens=0, decoding=1 + number % 4, held=1, seconds=0.002)
        learned.served(prompt_tokens=1 + number % 60, decoding=0, held=1, seconds=0.003)
    metrics.show(turns._slack())
    for step, cost in (
        ("guest", learned.guest),
        ("prefill", learned.serving.prefill),
        ("decode", learned.serving.decode),
    ):
        exported = REGISTRY.get_sample_value("rose_lender_prediction_error_ratio", {"step": step})
        assert exported == cost.error and 0.0 < cost.error < 1.0


def test_a_broken_promise_is_told_as_long_as_somebody_looks_and_no_report_without_work_hides_a_long_piece(
    core: Any, turns: Turns
) -> None:
    guest: Any = turns._guest
    pieces = "rose_lender_guest_piece_seconds_count"
    core.scheduler.waiting.append(
        SimpleNamespace(request_id="late", arrival_time=0.0, num_tokens=4, num_computed_tokens=0)
    )
    turns.step(lambda: True)
    metrics.show(turns._slack())
    before = REGISTRY.get_sample_value(pieces) or 0
    headroom = REGISTRY.get_sample_value("rose_lender_headroom_seconds", {"kind": "prefill"})
    assert headroom is not None and headroom < 0
    guest.busy = False
    turns.step(lambda: True)
    metrics.show(turns._slack())
    headroom = REGISTRY.get_sample_value("rose_lender_headroom_seconds", {"kind": "prefill"})
    assert headroom is not None and math.isnan(headroom)
    assert REGISTRY.get_sample_value(pieces) == before
    core.scheduler.waiting.clear()
    guest.busy = True
    turns.step(lambda: True)
    metrics.show(turns._slack())
    assert REGISTRY.get_sample_value(pieces) == before + 1
