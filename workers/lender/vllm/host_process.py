"""How guest code runs in the process of its host: process-wide values are exchanged, and a build is cut in pieces.

Keeps true
- Outside `as_guest_build` and `as_guest`, and within `as_host`, all listed values are those of the host.
- torch compiles nothing for a guest: serving would pause for seconds, or wait for a lock of the compiler that a halted
  guest holds. Functions that vLLM compiles at their first call run uncompiled.
- Between two pieces a long function is halted at a call that it is about to make or has just made. The caller may
  therefore exchange the values before a piece and restore them after.
- The function continues in parallel with the caller only during a C call or an import, for which the caller waits a
  little. For Python code the caller waits longer: if it continued because its thread was late, it would see the values
  of the host.
- The function is never halted while the standard library holds a lock and calls other code (an import, a log call): the
  caller would wait for the lock forever.
- A guest that has ended is held by no value, and a build that has failed by no frame of its error.

While a guest is built, vLLM seeds the process's random generators, sets its default dtype and current configuration,
writes environment variables and swaps names in modules. A step draws from the generators and sets nothing else. The
guest has generators of its own, seeded when it is built: it draws other numbers than the guests of other servers, and
takes no number of serving.
"""

import concurrent.futures.thread
import functools
import logging
import os
import queue
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter
from types import FrameType
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
import vllm.config.vllm as vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.engine import arg_utils
from vllm.forward_context import override_forward_context
from vllm.ir import op as ir_op
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.offloader import base as offloader
from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher
from vllm.utils import jit_monitor
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import core
from vllm.v1.worker import gpu_model_runner, gpu_worker, workspace
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.gpu.block_table import BlockTables

from rose.workers.lender.vllm.guest_device import CPU, GuestDevice

MEMORY_BINDING = ((torch.ops._C, "init_cpu_memory_env"),) if hasattr(torch.ops._C, "init_cpu_memory_env") else ()
"""The operator that binds the process's memory to its NUMA node, if vLLM runs on CPUs. Serving has bound the memory.
The call waits for a kernel thread on each CPU, which can take minutes while serving's ranks spin."""

WRITES_TO_NULL_BLOCK = BlockTables, "redirect_writes_to_null_block"
"""Whether vLLM's second model runner writes to block 0 only. Its warm-up would write to blocks that serving uses."""

ALLOCATOR_SETTER = torch._C, "_accelerator_setAllocatorSettings"
"""The function that sets the allocator of the process. vLLM limits the allocator's splits while a model loads."""

SWAPPED_NAMES: tuple[tuple[object, str], ...] = (
    (vllm_config, "_current_vllm_config"),
    (vllm_config, "_current_prefix"),
    (workspace, "_manager"),
    (parallel_state, "_TP"),
    (parallel_state, "suppress_stdout"),
    (kv_transfer_state, "_KV_CONNECTOR_AGENT"),
    (torch, "Event"),
    (torch, "set_num_threads"),
    (torch.cuda, "Stream"),
    (torch.cuda, "empty_cache"),
    (torch.accelerator, "synchronize"),
    (torch.accelerator, "empty_cache"),
    (layer_utils, "dispatch_cpu_unquantized_gemm"),
    (dispatcher, "sys"),
    (dispatcher, "register_kernels"),
    (core, "freeze_gc_heap"),
    (core, "init_none_hash"),
    (gpu_model_runner, "allocate_kv_cache"),
    (attn_utils, "allocate_kv_cache"),
    (gpu_worker, "freeze_gc_heap"),
    (gpu_worker, "report_usage_stats"),
    (offloader, "_instance"),
    (rotary_embedding, "_ROPE_DICT"),
    (jit_monitor, "_handle_jit_event"),
    (arg_utils, "configure_logging_if_needed"),
    (ir_op, "_ENABLE_TORCH_WRAP"),
    *((operator, "_priority_impls") for operator in ir_op.IrOp.registry.values()),
    WRITES_TO_NULL_BLOCK,
    ALLOCATOR_SETTER,
    *MEMORY_BINDING,
)
"""Names in modules, classes and operators that vLLM, or the build of a guest, sets to another value."""

WORKSPACES = (
    ("vllm.v1.attention.backends.flashinfer", "trtllm_workspace_buffer"),
    ("vllm.v1.attention.backends.mla.flashinfer_mla", "_fi_workspace"),
    ("vllm.v1.attention.backends.mla.flashinfer_mla", "_fi_multi_ctas_kv_counter"),
    ("vllm.v1.attention.backends.mla.flashinfer_mla_sparse", "_fi_sparse_workspace"),
    ("vllm.v1.sample.ops.topk_topp_triton", "_TRITON_BUFFER_CACHE"),
    ("vllm.v1.sample.ops.topk_topp_triton", "_TRITON_SPLIT_CACHE"),
    ("vllm.v1.sample.ops.topk_topp_triton", "_TRITON_TABLE_CACHE"),
)
"""Buffers of FlashInfer's kernels and of vLLM's sampler, by module and name; FlashInfer's modules are there only if
serving uses them. The guest makes buffers of its own: while it is built, its kernels may run beside those of serving.
"""

TP_GROUP = parallel_state, "_TP"
"""The one of SWAPPED_NAMES that is exchanged only if serving's worker has joined its groups in this process. Otherwise
only guests use the group: the first guest makes it, with the related groups, for all later ones."""


STEPS_DRAW_SEEDS = not current_platform.is_cpu()
"""Whether a step may draw from numpy's generator: vLLM's runner for GPUs draws the seed of a request without a seed. An
exchange of the states takes 0.1 ms, so a CPU exchanges them for a build only."""


class GlobalsSwap:
    """The guest's set of process-wide values, which start as the host's, and its part of the device."""

    def __init__(self, device: GuestDevice) -> None:
        self.device = device
        self._exchanged = [name for name in SWAPPED_NAMES if name != TP_GROUP or parallel_state._TP is not None]
        workspaces = [(sys.modules[module], name) for module, name in WORKSPACES if module in sys.modules]
        self._exchanged += workspaces
        self._names = self._current_values()
        for module, name in workspaces:
            self.set(module, name, {} if isinstance(getattr(module, name), dict) else None)
        self._generators = _generators()
        self._seed_sources = _seed_sources()
        self._build = _build_state()
        self._gradients = False, True
        """The host's inference mode and gradient mode."""

    @contextmanager
    def as_guest(self) -> Iterator[None]:
        """Set the guest's values during a guest step."""
        self._gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        with self.device.running(), torch.compiler.set_stance("force_eager"):
            self._exchange()
            try:
                yield
            finally:
                self._exchange()

    @contextmanager
    def as_host(self) -> Iterator[None]:
        """Set the host's values while a guest step is paused."""
        inference, gradients = self._gradients
        stance = torch.compiler.set_stance("default")
        with (
            self.device.paused(),
            stance,
            torch.inference_mode(inference),
            torch.set_grad_enabled(gradients),
            override_forward_context(None),
        ):
            self._exchange()
            try:
                yield
            finally:
                self._exchange()

    @contextmanager
    def as_guest_build(self) -> Iterator[None]:
        """Set the guest's values, build values included, during a piece of the build."""
        with torch.compiler.set_stance("force_eager"):
            self._exchange_build()
            self._exchange()
            try:
                yield
            finally:
                self._exchange()
                self._exchange_build()

    def close(self) -> None:
        """Let go of the values of a guest that has ended, and of its memory. The exchange cannot be used afterwards."""
        self._names.clear()
        self.device.release()

    def set(self, module: object, name: str, value: Any) -> None:
        """Set the guest's value for one of SWAPPED_NAMES."""
        self._names[self._exchanged.index((module, name))] = value

    def _current_values(self) -> list[Any]:
        return [getattr(module, name) for module, name in self._exchanged]

    def _exchange(self) -> None:
        now = self._current_values()
        for (module, name), value, mine in zip(self._exchanged, now, self._names, strict=True):
            if mine is not value:
                setattr(module, name, mine)
        if self._names[0] is not now[0]:
            vllm_config.get_cached_compilation_config.cache_clear()
        self._names = now
        self._generators = _set_generators(self._generators)
        if STEPS_DRAW_SEEDS:
            self._seed_sources = _set_seed_sources(self._seed_sources)

    def _exchange_build(self) -> None:
        now = _build_state()
        environment, dtype = self._build
        for name in now[0].keys() - environment.keys():
            del os.environ[name]
        for name, value in environment.items():
            if now[0].get(name) != value:
                os.environ[name] = value
        torch.set_default_dtype(dtype)
        self._build = now
        if not STEPS_DRAW_SEEDS:  # otherwise `_exchange` does
            self._seed_sources = _set_seed_sources(self._seed_sources)


def globals_for_build(device: GuestDevice = CPU) -> GlobalsSwap:
    """Return the values for the build of a guest on this device.

    The guest does not set thread counts, bind memory, freeze the garbage collector's heap, suppress output, replace the
    root of serving's block hashes or its kernels, set the allocator or take its free memory, configure logging, report
    its use, or log that a kernel was compiled. It shares the rotary embeddings that serving has. It has no KV
    connector: serving's would take the guest's blocks for its own.
    """
    swap = GlobalsSwap(device)
    swap.set(torch, "set_num_threads", _no_op)
    swap.set(torch.cuda, "empty_cache", _no_op)
    swap.set(torch.accelerator, "empty_cache", _no_op)
    swap.set(*ALLOCATOR_SETTER, _no_op)
    swap.set(gpu_worker, "report_usage_stats", _no_op)
    swap.set(jit_monitor, "_handle_jit_event", _no_op)
    swap.set(arg_utils, "configure_logging_if_needed", _no_op)
    swap.set(rotary_embedding, "_ROPE_DICT", dict(rotary_embedding._ROPE_DICT))
    swap.set(parallel_state, "suppress_stdout", nullcontext)
    swap.set(kv_transfer_state, "_KV_CONNECTOR_AGENT", None)
    for module, name in MEMORY_BINDING:
        swap.set(module, name, _no_op)
    swap.set(core, "freeze_gc_heap", _no_op)
    swap.set(gpu_worker, "freeze_gc_heap", _no_op)
    if dispatcher._registry:  # otherwise the first guest registers the kernels for all later ones
        swap.set(dispatcher, "register_kernels", _no_op)
    if hasattr(kv_cache_utils, "NONE_HASH"):
        swap.set(core, "init_none_hash", _no_op)
    return swap


def _no_op(*_: object, **__: object) -> None:
    """Do nothing, in place of a function that a guest may not call."""


def _build_state() -> tuple[dict[str, str], torch.dtype]:
    return dict(os.environ), torch.get_default_dtype()


def _generators() -> list[torch.Tensor]:
    """Return the states of torch's generators: the CPU's, then that of the current GPU, the only one in use."""
    device = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *device]


def _set_generators(states: list[torch.Tensor]) -> list[torch.Tensor]:
    """Set the states of torch's generators. Return their states before."""
    before = _generators()
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
    return before


def _seed_sources() -> tuple[Any, Any]:
    """Return the states of the generators that seeds come from: `random` and `numpy.random`."""
    return random.getstate(), np.random.get_state()


def _set_seed_sources(states: tuple[Any, Any]) -> tuple[Any, Any]:
    """Set the states of the generators that seeds come from. Return their states before."""
    before = _seed_sources()
    random.setstate(states[0])
    np.random.set_state(states[1])
    return before


def release_frames(error: BaseException | None) -> None:
    """Empty the frames of an error and of its causes, which may hold a guest's model."""
    released: set[int] = set()
    while error is not None and id(error) not in released:
        released.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


Result = TypeVar("Result")

IMPORT = "<frozen importlib._bootstrap>"
"""File of the functions that import."""

LOCKS = frozenset(
    {IMPORT} | {str(module.__file__) for module in (functools, logging, queue, threading, concurrent.futures.thread)}
)
"""Files whose functions hold locks while they call others."""

GRACE_SECONDS = 0.002
"""How long the caller waits after the end of a piece for a C call or an import."""

CHANGES = {"call": 1, "return": -1}
"""Change of the number of Python functions under way, by event of a profile function."""

LATE_SECONDS = 0.01
"""How long the caller waits after the end of a piece for Python code, which halts at its next call.

The thread may be late by more than `GRACE_SECONDS`: it shares the processor, and another thread keeps the global
interpreter lock for 5 ms at a time. A thread that is later still is in a C call that Python does not trace, such as an
operator or a constructor."""


_current = threading.local()
"""The `TimeSlicedCall` of the current thread."""


def yield_slice() -> None:
    """End the current piece, for a function that waits for the thread that resumes it."""
    _current.pieces.end_slice()


class TimeSlicedCall(Generic[Result]):
    """One run of `function` in pieces."""

    def __init__(self, function: Callable[[], Result], name: str, device: GuestDevice = CPU) -> None:
        """`device`: the device for which the function launches and allocates."""
        self.slices = 0
        self.longest_seconds = 0.0
        """Longest time that a caller of `resume` has waited."""
        self._function = function
        self._device = device
        self._deadline = 0.0
        self._go = threading.Semaphore(0)
        self._halted = threading.Semaphore(0)
        self._out = False
        """Whether the thread was not halted at the end of the last piece."""
        self._cannot_halt = False
        """Whether the thread is in a C call or an import."""
        self._made: Result | None = None
        self._error: Exception | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def resume(self, seconds: float) -> bool:
        """Let the function run for `seconds`. Return whether it is done."""
        if self._done.is_set():
            return True
        began = perf_counter()
        self._deadline = began + seconds
        was_out = self._out and not self._halted.acquire(blocking=False)
        if not was_out:
            self._go.release()
        self._out = not self._wait_for_halt(seconds, 0.0 if was_out else LATE_SECONDS)
        self.slices += 1
        self.longest_seconds = max(self.longest_seconds, perf_counter() - began)
        return self._done.is_set() and not self._out

    def _wait_for_halt(self, seconds: float, late_seconds: float) -> bool:
        """Wait for the end of a piece of `seconds`. Return whether the thread is halted."""
        latest = perf_counter() + seconds + late_seconds
        halted = self._halted.acquire(timeout=seconds + GRACE_SECONDS)
        while not halted and not self._cannot_halt and perf_counter() < latest:
            halted = self._halted.acquire(timeout=GRACE_SECONDS)
        return halted

    def end_slice(self) -> None:
        """End the current piece. Only the function itself may call this."""
        self._deadline = 0.0

    def result(self) -> Result:
        """Return what the function returned, after it is done. Raises what the function raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return cast(Result, self._made)

    def _run(self) -> None:
        self._go.acquire()
        _current.pieces = self
        try:
            with self._device.building():
                sys.setprofile(self._trace_function())
                try:
                    self._made = self._function()
                finally:
                    sys.setprofile(None)
        except Exception as error:  # noqa: BLE001  `result` raises it
            release_frames(error)
            self._error = error.with_traceback(None)
        finally:
            self._done.set()
            self._halted.release()

    def _trace_function(self) -> Callable[[FrameType, str, Any], None]:
        """Return the profile function, which Python calls at each call and return on this thread."""
        holding = importing = 0

        def halt_if_due(frame: FrameType, event: str, _: Any) -> None:
            nonlocal holding, importing
            change = CHANGES.get(event, 0)
            if change and frame.f_code.co_filename in LOCKS:
                holding += change
                importing += change * (frame.f_code.co_filename == IMPORT)
            self._cannot_halt = importing > 0
            if not holding and perf_counter() >= self._deadline:
                with self._device.halted():
                    self._halted.release()
                    self._go.acquire()
            self._cannot_halt = importing > 0 or event == "c_call"

        return halt_if_due
