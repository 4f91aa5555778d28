"""The guest's part on one of serving's ranks, in the worker's process, driven by calls from the loop (`tp_driver`).

Keeps true
- Between two calls the process is as its host left it, as in the loop's own process (`host_process`).
- No error of the guest is raised into the worker: an error is the answer to the call.
- The guest's ranks use their own process group, never serving's. A rank that fails, in a step or in a long call, leaves
  the group, which ends the wait of the other ranks; no rank steps again.
- A rank reads its shard of a version from memory that all ranks map, and holds only this shard.
"""

import ctypes
import faulthandler
import gc
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import Lock
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.serial_utils import run_method
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.worker_base import WorkerWrapperBase

from rose.schemas.errors import describe_error
from rose.workers.executor.ipc.messages import TensorLayout
from rose.workers.executor.vllm.engine_core import hide_llvmlite
from rose.workers.executor.vllm.model_runner import release_runner
from rose.workers.executor.vllm.ranks import Answer, RankPolicy, answer_to
from rose.workers.executor.vllm.weights import keep_unpacked_weights
from rose.workers.lender.status_page import STACK_SIGNAL, ProcessId, current_process_id
from rose.workers.lender.vllm.host_process import GlobalsSwap, TimeSlicedCall, globals_for_build
from rose.workers.lender.vllm.shared_cache import CacheView

GROUP = "rose_guest"
"""Name of the guest's process group. vLLM's groups with the name `tp` use shared memory, where ranks wait for a failed
rank forever; groups with another name use gloo, which reports a rank that leaves."""

_trim = ctypes.CDLL(None).malloc_trim
"""Makes the C library return free memory to the system, also between blocks in use. Without it a freed guest
leaves gaps that other allocations partly fill, and the next guest needs its whole size again."""

_workers: dict[int, "GuestWorker"] = {}
"""Guest workers by the `id()` of serving's worker; a process has one."""


def call_worker(host: WorkerWrapperBase, name: str, *arguments: Any) -> Answer:
    """Call a method of the worker's `GuestWorker`. Raises nothing. Serving's executor runs this in each worker."""
    return answer_to(_call_guest, host, name, *arguments)


def _call_guest(host: WorkerWrapperBase, name: str, *arguments: Any) -> Any:
    return getattr(_workers.setdefault(id(host), GuestWorker(host)), name)(*arguments)


def _outcome_of(work: TimeSlicedCall[Any]) -> tuple[bool, str, Any]:
    """Return the outcome of a long call that is done: True, the error text, and the result."""
    try:
        return True, "", work.result()
    except Exception as error:  # noqa: BLE001  as in `call_worker`
        return True, describe_error(error), None


class GuestWorker:
    """The guest's worker on one rank: at most one model, in the process of serving's worker `host`."""

    def __init__(self, host: WorkerWrapperBase) -> None:
        self._host = host
        self._globals: GlobalsSwap | None = None
        self._call: TimeSlicedCall[Any] | None = None
        """The current long call."""
        self._outcome: tuple[bool, str, Any] = True, "", None
        """Outcome of the newest finished long call: True, the error text, and the result."""
        self._guest: WorkerWrapperBase | None = None
        self._group: parallel_state.GroupCoordinator | None = None
        self._view: CacheView | None = None
        self._policy: RankPolicy | None = None

    def process_id(self, watched: bool) -> ProcessId:
        """Return the identity of this process. `watched`: whether a watchdog may ask for the stacks of its threads.

        Freezes all present objects for the garbage collector, as vLLM does in the engine core and in the workers of
        GPUs. Otherwise each build or release of a guest would scan all of them in one piece.
        """
        if watched:
            faulthandler.register(STACK_SIGNAL, all_threads=True)
        gc.collect()
        gc.freeze()
        return current_process_id()

    def begin(self, name: str, *arguments: Any) -> None:
        """Start a long call.

        The calls are `join`, `load`, then `share_cache`, `run`, `patch_model` and `allocate_spare`; and `release` at
        any time.
        """
        if name == "join" or self._globals is None:
            self._globals = globals_for_build()
        if name == "load":
            self._globals.set(parallel_state, "_TP", self._group)
            self._view = CacheView(self._host.worker.model_runner)
            self._globals.set(gpu_model_runner, "allocate_kv_cache", self._view.allocate)
        self._call = TimeSlicedCall(partial(getattr(self, name), *arguments), "rose-guest-build")

    def resume(self, seconds: float) -> tuple[bool, str, Any]:
        """Continue the long call for `seconds`. Return whether it is done, the error text, and the result."""
        assert self._globals is not None
        if self._call is None:  # done here, but not on another rank
            return self._outcome
        with self._globals.as_guest_build():
            if not self._call.resume(seconds):
                return False, "", None
        self._outcome, self._call = _outcome_of(self._call), None
        if self._outcome[1]:  # here, because the frames of the error no longer hold the group
            self._destroy_group()
        return self._outcome

    def join(self) -> None:
        """Make the guest's process group together with the other ranks."""
        world = parallel_state.get_world_group()
        self._group = parallel_state.GroupCoordinator(
            [list(world.ranks)],
            world.local_rank,
            torch.distributed.get_backend(world.device_group),
            use_device_communicator=True,
            group_name=GROUP,
        )

    def load(self, config: VllmConfig) -> None:
        """Build this rank's shard of the model."""
        host = self._host.worker
        self._guest = WorkerWrapperBase(rpc_rank=self._host.rpc_rank, global_rank=self._host.global_rank)
        settings = {
            "vllm_config": config,
            "local_rank": host.local_rank,
            "rank": host.rank,
            "distributed_init_method": host.distributed_init_method,
            "is_driver_worker": host.is_driver_worker,
            "shared_worker_lock": Lock(),
        }
        with keep_unpacked_weights(), hide_llvmlite():
            self._guest.init_worker([settings] * (self._host.rpc_rank + 1))
            self._guest.init_device()
            self._guest.load_model()
            current_platform.update_block_size_for_backend(config)

    def share_cache(self, block_tokens: int) -> None:
        """Make the guest's cache a view of serving's, with blocks of so many tokens."""
        assert self._guest is not None and self._view is not None
        self._view.share(self._guest.worker.vllm_config, block_tokens)

    def run(self, method: str, arguments: tuple[Any, ...], settings: Mapping[str, Any]) -> Any:
        """Call a method of vLLM's worker during the build of an engine core."""
        with keep_unpacked_weights(), hide_llvmlite():
            return run_method(self._guest, method, arguments, dict(settings))

    def patch_model(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Adapt the model after the build of the core. Return the number of parameters on this rank."""
        assert self._guest is not None and self._view is not None
        self._view.check()
        self._policy = RankPolicy(self._guest.worker, folder, shapes)
        return sum(parameter.numel() for parameter in self._guest.worker.get_model().parameters())

    def allocate_spare(self) -> dict[str, int]:
        """Allocate the memory in which a version is staged. See `RankPolicy.allocate_spare`."""
        return self._loaded_policy.allocate_spare()

    def step(self, scheduled: SchedulerOutput, grammar: GrammarOutput | None) -> Any:
        """Compute and sample one step. Return the output on the first rank, None on the others."""
        assert self._guest is not None and self._globals is not None
        failure, output = "", None
        with self._globals.as_guest():
            try:
                output = self._guest.execute_model(scheduled)
                if output is None:
                    output = self._guest.sample_tokens(grammar)
            except Exception as error:  # noqa: BLE001  the other ranks may wait for this rank
                failure = describe_error(error)
        if failure:  # here, because the frames of the error no longer hold the group
            self._destroy_group()
            raise RuntimeError(failure)
        return output if self._host.global_rank == 0 else None

    def stage(self, file: str, layout: Sequence[TensorLayout], names: Sequence[str]) -> None:
        """Start to stage a version from the weight buffer at path `file`."""
        self._loaded_policy.stage(file, layout, names)

    def continue_staging(self) -> bool:
        """Do one piece of staging. Return whether the version is staged. Raises SwapRefused."""
        assert self._globals is not None
        with self._globals.as_guest():
            return self._loaded_policy.continue_staging()

    def activate(self) -> None:
        """Serve the staged version from the next step on."""
        self._loaded_policy.activate()

    def restore(self) -> None:
        """Serve the version before again, if this rank has activated the staged version."""
        self._loaded_policy.restore()

    @property
    def _loaded_policy(self) -> RankPolicy:
        assert self._policy is not None
        return self._policy

    def release(self) -> None:
        """Free model, KV cache and process group."""
        self._policy = None
        worker: Any = getattr(self._guest, "worker", None)  # None if `load` has failed early
        if getattr(worker, "model_runner", None) is not None:
            release_runner(worker.model_runner)
        worker = self._guest = None
        self._destroy_group()
        gc.collect()
        _trim(0)

    def _destroy_group(self) -> None:
        """Leave and destroy the guest's process group, which ends the wait of other ranks for this rank."""
        group, self._group = self._group, None
        if group is None:
            return
        communicator = group.device_communicator
        group.destroy()
        if communicator is not None:
            communicator.device_group = communicator.cpu_group = None
