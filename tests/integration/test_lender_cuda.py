"""A guest with the code for a CUDA GPU, beside serving in one process: nothing of serving changes, and nothing is left.

The engines are real and compute on the CPU. Streams, events and pools are fakes (`tests.support.fake_cuda`).
"""

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import vllm.config.vllm as vllm_config
from safetensors.torch import load_file
from vllm.v1.worker import workspace
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.block_table import BlockTables

from rose.schemas.prompts import Sampling
from rose.workers.executor.step_cost import INITIAL_COST, StepCost
from rose.workers.executor.vllm.engine import Engine
from rose.workers.executor.vllm.engine_core import in_process_worker
from rose.workers.executor.vllm.types import EngineBroken, EngineConfig, EngineStartError
from rose.workers.lender.config import LendConfig
from rose.workers.lender.vllm import guest_build
from rose.workers.lender.vllm.guest_build import BuiltGuest, GuestBuild
from rose.workers.lender.vllm.guest_device import CudaDevice
from rose.workers.lender.vllm.host_process import release_frames
from rose.workers.lender.vllm.kv_sharing import ServingMemory
from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.lender_server_fixtures import MODEL
from tests.support.process_names import changed_names, changed_states, library_names, process_states
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MIB = 1 << 20
CONFIG = LendConfig(model_folder=str(MODEL), socket="", max_model_len=128, kv_cache_bytes=4 * MIB)
GREEDY = Sampling(max_tokens=8, temperature=0.0)


@dataclass
class Host:
    """A serving engine, and the CUDA device that it shares with guests."""

    engine: Engine
    memory: ServingMemory
    cuda: FakeCuda
    device: CudaDevice

    def serve(self) -> bytes:
        """Run a request to its end; return the sampled tokens."""
        self.engine.add("request", [3, 4, 5, 6], GREEDY, policy_version=-1)
        self.cuda.launch("serving")
        while len(self.engine):
            finished = self.engine.step().finished
        return finished[0].sampled.tokens

    def start_build(self, layer_hook: Callable[[], None] = lambda: None) -> GuestBuild:
        cost = StepCost(**INITIAL_COST)
        return GuestBuild(CONFIG, self.memory, cost, layer_hook, None, self.device, logging.getLogger())

    def build(self, layer_hook: Callable[[], None] = lambda: None) -> BuiltGuest:
        """Build a guest, with a piece of serving after each piece of the build, and lend it memory."""
        build, built = self.start_build(layer_hook), None
        while built is None:
            built = build.resume(0.05)
        built.sharing.rebalance(built.profile.abort_turn, grow=True)
        return built


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    config = EngineConfig(model_folder=MODEL, max_model_len=128, kv_cache_bytes=8 * MIB)
    with fake_cuda() as cuda, closing(Engine(config)) as engine:
        made = Host(engine, ServingMemory(engine._core), cuda, CudaDevice())
        made.serve()
        yield made


@pytest.fixture(autouse=True)
def redirected(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Make vLLM's workspace manager, which only its worker for GPUs makes: the manager holds the worker.

    Return, for each worker that is made, whether the second model runner writes to block 0 only then.
    """
    init_device, noted = CPUWorker.init_device, []

    def init(worker: Any) -> None:
        init_device(worker)
        noted.append(BlockTables.redirect_writes_to_null_block)
        context = lambda: worker._maybe_get_memory_pool_context("workspace")  # noqa: E731  as in vLLM
        workspace.init_workspace_manager(worker.device, 1, 1, alloc_context=context)

    monkeypatch.setattr(CPUWorker, "init_device", init)
    return noted


@contextmanager
def unchanged() -> Iterator[None]:
    names, states = library_names(), process_states()
    yield
    assert changed_names(names) == changed_states(states) == []


def parts_of(engine: Engine) -> dict[str, "weakref.ref[Any]"]:
    """Return weak references to what holds memory of a guest."""
    worker = in_process_worker(engine._core)
    runner = worker.model_runner
    parts = {"worker": worker, "runner": runner, "model": runner.get_model(), "core": engine._core, "engine": engine}
    parts |= {name: value for name, value in vars(runner).items() if name in ("model_state", "sampler", "block_tables")}
    parts |= {f"weight {number}": tensor for number, tensor in enumerate(parts["model"].parameters())}
    return {name: weakref.ref(part) for name, part in parts.items()}


def left(parts: dict[str, "weakref.ref[Any]"]) -> list[str]:
    return [name for name, part in parts.items() if part() is not None]


def test_guest_changes_nothing_of_its_host_and_leaves_nothing(host: Host) -> None:
    alone = host.serve()
    with unchanged():
        layer_hooks: list[Callable[[], None]] = []
        build = host.start_build(lambda: layer_hooks[0]())
        states, built, pieces = process_states(), None, 0
        while built is None:
            built = build.resume(0.02)
            until(lambda: not host.cuda.open)
            assert changed_states(states) == []
            pieces += 1
        assert pieces > 3
        del build
        paused: list[bytes] = []
        exchange = built.globals

        def on_layer() -> None:
            host.cuda.launch("guest")
            if len(paused) < 3:
                with exchange.as_host(), unchanged():
                    assert not host.cuda.queued and not host.cuda.open
                    assert host.cuda.current_stream() is host.cuda.streams[0]
                    paused.append(host.serve())

        layer_hooks.append(on_layer)
        built.sharing.rebalance(built.profile.abort_turn, grow=True)
        guest, parts = built.engine, parts_of(built.engine)
        while not built.profile.done:
            with built.globals.as_guest():
                built.profile.step(64, built.sharing.room_tokens)
        guest.add("turn", [3, 4, 5], GREEDY, policy_version=-1)
        while len(guest):
            with built.globals.as_guest():
                guest.step()
        assert paused == [alone] * 3
        with built.globals.as_guest():
            guest.swap(1, load_file(MODEL / "model.safetensors").items())
        del guest
        built.close()
        del built
    assert left(parts) == []
    assert host.cuda.given_back == [True] * len(host.cuda.given_back) and not host.memory.pool.withheld
    assert host.serve() == alone


def test_guest_of_the_second_model_runner_leaves_nothing(
    host: Host, redirected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Triton the runner can be made, and its first step fails.

    The runner's warm-up on a GPU takes blocks from 1 on, which serving uses: it writes to block 0 instead.
    """
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(vllm_config, "HAS_TRITON", True)
    built = host.build()
    guest, parts = built.engine, parts_of(built.engine)
    assert {"model_state", "block_tables"} <= parts.keys()
    assert redirected == [True] and not BlockTables.redirect_writes_to_null_block
    guest.add("turn", [3, 4, 5], GREEDY, policy_version=-1)
    try:
        with built.globals.as_guest():
            assert not BlockTables.redirect_writes_to_null_block
            guest.step()
    except EngineBroken as error:
        del guest
        release_frames(error)
        built.close()  # as the lender does, while the error is there
        del built
        assert left(parts) == [] and host.cuda.given_back[-1]
    else:
        pytest.fail("the step needs Triton")


def test_failed_build_leaves_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: dict[str, weakref.ref[Any]] = {}

    def allocate(engine: Engine) -> None:
        raise MemoryError

    def fail(engine: Engine, *_: object) -> None:
        parts.update(parts_of(engine))
        try:
            allocate(engine)
        except MemoryError as full:
            raise EngineStartError("no room") from full

    monkeypatch.setattr(guest_build, "_check_longest_turn", fail)
    with unchanged():
        build = host.start_build()
        with pytest.raises(EngineStartError, match="no room") as raised:
            while build.resume(0.05) is None:
                pass
        assert left(parts) == [], "while the error is there"
    assert host.cuda.given_back[-1] and raised.value is not None
