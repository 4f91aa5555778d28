"""Process-wide values that host and guest set differently, and their exchange (globals swap).

Keeps true
- Outside `as_guest_build` and `as_guest`, and within `as_host`, all listed values are those of the host.
- Nothing is compiled for a guest: serving would pause for seconds, or wait for a lock of the compiler that a halted
  guest holds. Functions that vLLM compiles at their first call run uncompiled.

While a guest is built, vLLM seeds the process's generators, sets its default dtype and current configuration, writes
environment variables and swaps names in modules. A step draws from torch's generator and sets nothing else.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np
import torch
import vllm.config.vllm as vllm_config
from vllm.distributed import parallel_state
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers import utils as layer_utils
from vllm.triton_utils import dispatcher
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import core
from vllm.v1.worker import gpu_worker, workspace

MEMORY_BINDING = ((torch.ops._C, "init_cpu_memory_env"),) if hasattr(torch.ops._C, "init_cpu_memory_env") else ()
"""The operator that binds the process's memory to its NUMA node, if vLLM runs on CPUs. Serving has bound the memory.
The call waits for a kernel thread on each CPU, which can take minutes while serving's ranks spin."""

SWAPPED_NAMES: tuple[tuple[ModuleType, str], ...] = (
    (vllm_config, "_current_vllm_config"),
    (vllm_config, "_current_prefix"),
    (workspace, "_manager"),
    (parallel_state, "_TP"),
    (parallel_state, "suppress_stdout"),
    (torch, "Event"),
    (torch, "set_num_threads"),
    (torch.cuda, "Stream"),
    (torch.accelerator, "synchronize"),
    (torch.accelerator, "empty_cache"),
    (layer_utils, "dispatch_cpu_unquantized_gemm"),
    (dispatcher, "sys"),
    (core, "freeze_gc_heap"),
    (core, "init_none_hash"),
    (gpu_worker, "freeze_gc_heap"),
    *MEMORY_BINDING,
)
"""Names in modules that vLLM, or the build of a guest, sets to another value."""

TP_GROUP = parallel_state, "_TP"
"""The one of SWAPPED_NAMES that is exchanged only if serving's worker has joined its groups in this process. Otherwise
only guests use the group: the first guest makes it, with the related groups, for all later ones."""


class GlobalsSwap:
    """The guest's set of process-wide values, which start as the host's."""

    def __init__(self) -> None:
        self._exchanged = [name for name in SWAPPED_NAMES if name != TP_GROUP or parallel_state._TP is not None]
        self._names = self._current_values()
        self._generators = _generators()
        self._build = _build_state()
        self._gradients = False, True
        """The host's inference mode and gradient mode."""

    @contextmanager
    def as_guest(self) -> Iterator[None]:
        """Set the guest's values during a guest step."""
        self._gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        with torch.compiler.set_stance("force_eager"):
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

    def set(self, module: ModuleType, name: str, value: Any) -> None:
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

    def _exchange_build(self) -> None:
        now = _build_state()
        environment, dtype, python, numpy = self._build
        for name in now[0].keys() - environment.keys():
            del os.environ[name]
        for name, value in environment.items():
            if now[0].get(name) != value:
                os.environ[name] = value
        torch.set_default_dtype(dtype)
        random.setstate(python)
        np.random.set_state(numpy)
        self._build = now


def globals_for_build() -> GlobalsSwap:
    """Return the values for the build of a guest.

    The guest does not set thread counts, bind memory, freeze the garbage collector's heap, suppress output, or replace
    the root of serving's block hashes.
    """
    swap = GlobalsSwap()
    swap.set(torch, "set_num_threads", _no_op)
    swap.set(parallel_state, "suppress_stdout", nullcontext)
    for module, name in MEMORY_BINDING:
        swap.set(module, name, _no_op)
    swap.set(core, "freeze_gc_heap", _no_op)
    swap.set(gpu_worker, "freeze_gc_heap", _no_op)
    if hasattr(kv_cache_utils, "NONE_HASH"):
        swap.set(core, "init_none_hash", _no_op)
    return swap


def _no_op(*_: object) -> None:
    """Do nothing, in place of a function that a guest may not call."""


def _build_state() -> tuple[dict[str, str], torch.dtype, Any, Any]:
    return dict(os.environ), torch.get_default_dtype(), random.getstate(), np.random.get_state()


def _generators() -> list[torch.Tensor]:
    """Return the states of torch's generators: the CPU's, then those of the devices in use."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *devices]


def _set_generators(states: list[torch.Tensor]) -> list[torch.Tensor]:
    """Set the states of torch's generators. Return their states before."""
    before = _generators()
    torch.set_rng_state(states[0])
    for device, state in enumerate(states[1:]):
        torch.cuda.set_rng_state(state, device)
    return before
