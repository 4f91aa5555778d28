"""What belongs to the process and has two values: the host's, and the guest's while the guest computes.

Keeps true
- Outside `as_guest_build` and `as_guest`, and within `as_host`, everything listed here is as the host left it.
- Nothing is compiled for a guest: serving would stand still for seconds, or wait for a lock of the compiler's that a
  guest which is halted holds. What vLLM has compiled when it is first called is run as it is written.

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
"""What binds a process's memory to its NUMA node, where vLLM runs on CPUs. Serving has it bound. Linux waits there for
a kernel thread on each CPU, and beside processes that never sleep, as ranks that wait for work, that can be minutes."""

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
"""Names in modules, that vLLM or the building of a guest gives another value."""

TP_GROUP = parallel_state, "_TP"
"""Of NAMES, the one that is exchanged only where serving's workers have joined their groups in this process. Where they
are elsewhere it is nobody's but the guests': the first of them makes it, with all groups that go with it, once for all.
"""


class GlobalsSwap:
    """The guest's values of what is the process's. They begin as the host's."""

    def __init__(self) -> None:
        self._exchanged = [name for name in SWAPPED_NAMES if name != TP_GROUP or parallel_state._TP is not None]
        self._names = self._current_values()
        self._generators = _generators()
        self._build = _build_state()
        self._gradients = False, True
        """Of the host's thread: whether it infers, and whether it keeps what gradients need."""

    @contextmanager
    def as_guest(self) -> Iterator[None]:
        """While the guest steps."""
        self._gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        with torch.compiler.set_stance("force_eager"):
            self._exchange()
            try:
                yield
            finally:
                self._exchange()

    @contextmanager
    def as_host(self) -> Iterator[None]:
        """While a step of the guest stands still."""
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
        """While a piece of the guest is built."""
        with torch.compiler.set_stance("force_eager"):
            self._exchange_build()
            self._exchange()
            try:
                yield
            finally:
                self._exchange()
                self._exchange_build()

    def set(self, module: ModuleType, name: str, value: Any) -> None:
        """Give the guest a value of its own for one of NAMES."""
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
    """A guest sets no thread counts, binds no memory, freezes no garbage, keeps nobody's output back, and leaves the
    root of serving's block hashes as it is.
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
    """In place of what a guest may not do."""


def _build_state() -> tuple[dict[str, str], torch.dtype, Any, Any]:
    return dict(os.environ), torch.get_default_dtype(), random.getstate(), np.random.get_state()


def _generators() -> list[torch.Tensor]:
    """The states of torch's generators: the CPU's, then each device's in use."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *devices]


def _set_generators(states: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns what they were."""
    before = _generators()
    torch.set_rng_state(states[0])
    for device, state in enumerate(states[1:]):
        torch.cuda.set_rng_state(state, device)
    return before
