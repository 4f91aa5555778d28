"""Process globals during and after a guest step."""

import os
import random
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group, kv_transfer_state
from vllm.engine import arg_utils
from vllm.forward_context import is_forward_context_available, override_forward_context
from vllm.ir import op as ir_op
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.offloader import base as offloader
from vllm.triton_utils import dispatcher
from vllm.utils import jit_monitor, system_utils
from vllm.v1.worker import gpu_worker, workspace

from rose.workers.lender.vllm import host_process
from rose.workers.lender.vllm.host_process import GlobalsSwap, globals_for_build, release_frames

pytestmark = pytest.mark.slow

HOST, GUEST = 3, 7
"""Seeds."""


@pytest.fixture
def globals_swap() -> GlobalsSwap:
    return globals_for_build()


def test_guest_has_a_tensor_parallel_group_separate_from_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "_TP", "serving's")
    globals_swap = globals_for_build()
    with globals_swap.as_guest_build():
        assert parallel_state._TP == "serving's"
        parallel_state._TP = "the guest's"
    assert parallel_state._TP == "serving's"
    with globals_swap.as_guest():
        assert parallel_state._TP == "the guest's"


@pytest.mark.parametrize("phase", ["as_guest_build", "as_guest"])
def test_guest_has_no_kv_connector_and_serving_keeps_its_own(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """A runner with a connector registers its cache there, and reports its steps to it."""
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", "serving's")
    globals_swap = globals_for_build()
    with getattr(globals_swap, phase)():
        assert not has_kv_transfer_group()
        if phase == "as_guest":
            with globals_swap.as_host():
                assert get_kv_transfer_group() == "serving's"
    assert get_kv_transfer_group() == "serving's"


def test_later_guest_reuses_the_group_of_the_first_without_a_local_serving_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM creates all of its groups or none: a second guest that found only some could not be built."""
    monkeypatch.setattr(parallel_state, "_TP", None)
    with globals_for_build().as_guest_build():
        parallel_state._TP = "of guests"
    assert parallel_state._TP == "of guests"
    with globals_for_build().as_guest_build():
        assert parallel_state._TP == "of guests"


def test_paused_guest_build_does_not_hold_back_host_output(globals_swap: GlobalsSwap) -> None:
    """vLLM redirects the standard output of the process while it creates a group."""
    with globals_swap.as_guest_build():
        quiet = parallel_state.suppress_stdout()
        with quiet:
            assert Path("/proc/self/fd/1").readlink() != Path(os.devnull)
    assert parallel_state.suppress_stdout is system_utils.suppress_stdout


@pytest.mark.parametrize("phase", ["as_guest_build", "as_guest"])
def test_guest_is_not_compiled_and_host_compilation_is_unchanged(globals_swap: GlobalsSwap, phase: str) -> None:
    """Serving would stand still for the duration of the compilation."""
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        compiled.append(graph)
        return graph.forward

    @torch.compile(backend=backend)
    def twice(numbers: torch.Tensor) -> torch.Tensor:
        return numbers * 2

    with getattr(globals_swap, phase)():
        assert twice(torch.ones(3)).tolist() == [2.0, 2.0, 2.0] and not compiled
    assert twice(torch.ones(3)).tolist() == [2.0, 2.0, 2.0] and len(compiled) == 1
    with getattr(globals_swap, phase)():
        assert twice(torch.ones(4)).tolist() == [2.0, 2.0, 2.0, 2.0] and len(compiled) == 1


def test_tensors_made_by_the_host_during_a_paused_step_have_host_defaults(globals_swap: GlobalsSwap) -> None:
    """A tensor made in inference mode could not be written in a serving step outside of inference mode."""
    outside = torch.get_rng_state()
    with globals_swap.as_guest(), torch.inference_mode(), override_forward_context(SimpleNamespace()):
        torch.manual_seed(7)
        with globals_swap.as_host():
            made = torch.zeros(3)
            assert torch.equal(torch.get_rng_state(), outside) and not is_forward_context_available()
            torch.rand(1)
            outside = torch.get_rng_state()
        assert torch.is_inference_mode_enabled() and is_forward_context_available()
        assert torch.initial_seed() == 7
    made.fill_(1.0)
    assert torch.equal(torch.get_rng_state(), outside)


@pytest.mark.parametrize("phase", ["as_guest_build", "as_guest"])
@pytest.mark.parametrize("gpu", [False, True])
def test_guest_takes_no_number_of_the_generators_of_its_host(
    monkeypatch: pytest.MonkeyPatch, phase: str, *, gpu: bool
) -> None:
    """On a CPU steps draw from torch alone."""
    monkeypatch.setattr(host_process, "STEPS_DRAW_SEEDS", gpu)
    globals_swap, shared = globals_for_build(), phase == "as_guest" and not gpu

    def draw(*, guest: bool = False) -> tuple[float, ...]:
        numbers = () if shared and guest else (random.random(), float(np.random.randn()))
        return *numbers, float(torch.rand(()))

    def seed(number: int) -> None:
        if number == HOST or not shared:
            random.seed(number), np.random.seed(number)
        torch.manual_seed(number)

    seed(HOST)
    expected = [draw() for _ in range(3)]
    seed(HOST)
    found = [draw()]
    with getattr(globals_swap, phase)():
        seed(GUEST)
        drawn = [draw(guest=True)]
        if phase == "as_guest":
            with globals_swap.as_host():
                found.append(draw())
        drawn.append(draw(guest=True))
    found += [draw() for _ in range(3 - len(found))]
    assert found == expected
    seed(GUEST)
    assert drawn == [draw(guest=True), draw(guest=True)]


@pytest.mark.parametrize("gpu", [False, True])
def test_steps_of_a_guest_draw_from_the_generators_that_its_build_seeded(
    monkeypatch: pytest.MonkeyPatch, *, gpu: bool
) -> None:
    monkeypatch.setattr(host_process, "STEPS_DRAW_SEEDS", gpu)
    globals_swap = globals_for_build()
    with globals_swap.as_guest_build():
        np.random.seed(GUEST), torch.manual_seed(GUEST)
        state = np.random.get_state()[1].tolist()  # type: ignore[index]
    np.random.seed(HOST)
    with globals_swap.as_guest():
        assert torch.initial_seed() == GUEST
        assert (np.random.get_state()[1].tolist() == state) is gpu  # type: ignore[index]


def test_guest_does_not_rebind_the_memory_of_its_host_process(
    globals_swap: GlobalsSwap, capfd: pytest.CaptureFixture[str]
) -> None:
    with globals_swap.as_guest_build():
        torch.ops._C.init_cpu_memory_env([0])
    assert "NUMA" not in capfd.readouterr().err
    assert isinstance(torch.ops._C.init_cpu_memory_env, torch._ops.OpOverloadPacket)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (torch.cuda, "empty_cache"),
        (torch.accelerator, "empty_cache"),
        (torch._C, "_accelerator_setAllocatorSettings"),
        (arg_utils, "configure_logging_if_needed"),
        (gpu_worker, "report_usage_stats"),
        (jit_monitor, "_handle_jit_event"),
        (dispatcher, "register_kernels"),
    ],
)
def test_guest_does_not_act_on_the_whole_process(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    calls: list[object] = []
    monkeypatch.setattr(module, name, lambda *arguments, **_: calls.append(arguments))
    monkeypatch.setattr(dispatcher, "_registry", {"a kernel": "of serving"})
    globals_swap = globals_for_build()
    with globals_swap.as_guest_build():
        getattr(module, name)("guest")
    with globals_swap.as_guest():
        getattr(module, name)("guest")
        with globals_swap.as_host():
            getattr(module, name)("serving")
    assert calls == [("serving",)]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (offloader, "_instance"),
        (ir_op, "_ENABLE_TORCH_WRAP"),
        (ir_op.IrOp.registry["rms_norm"], "_priority_impls"),
        (workspace, "_manager"),
    ],
)
def test_guest_has_own_values_that_vllm_sets_for_the_process(module: Any, name: str) -> None:
    serving, globals_swap = getattr(module, name), globals_for_build()
    guest: Any = object()
    with globals_swap.as_guest_build():
        setattr(module, name, guest)
    assert getattr(module, name) is serving
    with globals_swap.as_guest():
        assert getattr(module, name) is guest
        with globals_swap.as_host():
            assert getattr(module, name) is serving
    assert getattr(module, name) is serving


def test_rotary_embeddings_of_a_guest_end_with_it_and_those_of_serving_are_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {"serving": 1})
    globals_swap = globals_for_build()
    with globals_swap.as_guest_build():
        assert rotary_embedding._ROPE_DICT == {"serving": 1}
        rotary_embedding._ROPE_DICT["guest"] = 2
    assert rotary_embedding._ROPE_DICT == {"serving": 1}


def test_guest_makes_its_own_buffers_of_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a guest is built, its kernels may run beside those of serving, in the same buffer otherwise."""
    name, buffer = host_process.WORKSPACES[0]
    module: Any = SimpleNamespace(**{buffer: "serving's"})
    monkeypatch.setitem(sys.modules, name, module)
    globals_swap = globals_for_build()
    with globals_swap.as_guest_build():
        assert getattr(module, buffer) is None
        setattr(module, buffer, "the guest's")
    assert getattr(module, buffer) == "serving's"
    with globals_swap.as_guest():
        assert getattr(module, buffer) == "the guest's"


def test_closed_exchange_holds_no_value_of_its_guest() -> None:
    """vLLM's workspace manager holds the worker, and the worker the model."""

    class Worker:
        def pool(self) -> Any:
            return nullcontext()

    worker, globals_swap = Worker(), globals_for_build()
    with globals_swap.as_guest_build():
        workspace._manager = workspace.WorkspaceManager(torch.device("cpu"), 1, 1, alloc_context=worker.pool)
    held = weakref.ref(worker)
    del worker
    assert held() is not None
    globals_swap.close()
    assert held() is None


def test_frames_of_errors_that_name_each_other_are_released_once() -> None:
    first, second = RuntimeError("first"), RuntimeError("second")
    first.__cause__, second.__context__ = second, first
    release_frames(first)
    assert first.__traceback__ is second.__traceback__ is None
