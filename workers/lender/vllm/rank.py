"""The guest's share on one of serving's ranks: in that worker's process, driven by calls from the loop (`ranks`).

Keeps true
- Between two calls the process is as its host left it, as in the loop's own (`apart`).
- Nothing that goes wrong here is raised into the worker: it is the answer to the call.
- The guest's ranks compute together over a group of their own, never over serving's. One that fails, in a step or in a
  long call, leaves that group, which ends the wait of the others there; none of them steps again.
- A rank reads its own share of a version, out of memory that all ranks map, and holds no more than that.
"""

import ctypes
import faulthandler
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
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
from vllm.v1.worker.worker_base import WorkerWrapperBase

from schemas.errors import in_words
from workers.executor.slabs import Laid, Lying
from workers.executor.vllm.place import fit_runner, let_go
from workers.executor.vllm.start import llvmlite_unseen
from workers.executor.vllm.weights import PolicyWeights, plain_weights_kept
from workers.lender.identity import Identity, this_process
from workers.lender.pulse import STACK_SIGNAL
from workers.lender.vllm.apart import Apart, apart_for_building
from workers.lender.vllm.pages import give_all_back
from workers.lender.vllm.pieces import Pieces

GROUP = "rose_guest"
"""The guest's group. vLLM has groups called `tp` compute over shared memory, where one waits for a rank that has failed
for as long as the process lives; any other name gets gloo, which tells the others when one leaves."""

_trim = ctypes.CDLL(None).malloc_trim
"""Has the C library give free memory back to the system, also between what is in use. Without it a small KV cache that
is freed leaves a gap, of which something else takes a little, and the next cache needs as much again."""

_ranks: dict[int, "Rank"] = {}
"""By the id of serving's worker. There is one in a process."""


def call(host: WorkerWrapperBase, name: str, *arguments: Any) -> tuple[bool, Any]:
    """What serving's executor runs in each worker: whether it went well, and what came of it. Raises nothing."""
    try:
        rank = _ranks.setdefault(id(host), Rank(host))
        return True, getattr(rank, name)(*arguments)
    except Exception as error:  # noqa: BLE001  whatever a guest does, serving goes on
        return False, in_words(error)


def _came_of(work: Pieces[Any]) -> tuple[bool, str, Any]:
    """A long call that is done."""
    try:
        return True, "", work.result()
    except Exception as error:  # noqa: BLE001  as in `call`
        return True, in_words(error), None


class Rank:
    """At most one model, beside that of `host`."""

    def __init__(self, host: WorkerWrapperBase) -> None:
        self._host = host
        self._apart: Apart | None = None
        self._work: Pieces[Any] | None = None
        """The newest long call, until it is done."""
        self._came: tuple[bool, str, Any] = True, "", None
        """Of the newest that is done: that it is, what went wrong, and what it returned."""
        self._guest: WorkerWrapperBase | None = None
        self._group: parallel_state.GroupCoordinator | None = None
        self._weights: PolicyWeights | None = None
        self._version: dict[str, torch.Tensor] = {}
        """That is being prepared, or is prepared: views over the slab."""
        self._pieces: Iterator[None] = iter(())
        """Of preparing it."""

    def process(self, watched: bool) -> Identity:
        """Which it is. `watched`: by a keeper, that may ask for the stacks of its threads.

        What is there by now is no garbage, and is not looked through again: as vLLM has it in the engine core and in
        the workers of GPUs. Each guest that is built or let go of would have all of it looked through, in one piece.
        """
        if watched:
            faulthandler.register(STACK_SIGNAL, all_threads=True)
        gc.collect()
        gc.freeze()
        return this_process()

    def begin(self, name: str, *arguments: Any) -> None:
        """Begin a long call: `join`, then `load`, `run`, `fit`, `hold_spare`, or `release` at any time."""
        if name == "join" or self._apart is None:
            self._apart = apart_for_building()
        if name == "load":
            self._apart.set(parallel_state, "_TP", self._group)
        self._work = Pieces(partial(getattr(self, name), *arguments), "rose-guest-build")

    def go_on(self, seconds: float) -> tuple[bool, str, Any]:
        """Go on with it for so long; whether it is done, what went wrong, and what it returned."""
        assert self._apart is not None
        if self._work is None:  # another rank is not done yet
            return self._came
        with self._apart.building():
            if not self._work.go_on(seconds):
                return False, "", None
        self._came, self._work = _came_of(self._work), None
        if self._came[1]:  # here, where the error's frames hold the group no more
            self._leave()
        return self._came

    def join(self) -> None:
        """Make the guest's group, with the other ranks."""
        world = parallel_state.get_world_group()
        self._group = parallel_state.GroupCoordinator(
            [list(world.ranks)],
            world.local_rank,
            torch.distributed.get_backend(world.device_group),
            use_device_communicator=True,
            group_name=GROUP,
        )

    def load(self, config: VllmConfig) -> None:
        """Build this rank's share of the model."""
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
        with plain_weights_kept(), llvmlite_unseen():
            self._guest.init_worker([settings] * (self._host.rpc_rank + 1))
            self._guest.init_device()
            self._guest.load_model()
            current_platform.update_block_size_for_backend(config)

    def run(self, method: str, arguments: tuple[Any, ...], settings: Mapping[str, Any]) -> Any:
        """A method of vLLM's worker, while an engine core is made."""
        with plain_weights_kept(), llvmlite_unseen():
            return run_method(self._guest, method, arguments, dict(settings))

    def fit(self, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Once the core is made; the parameters that are held here."""
        assert self._guest is not None
        fit_runner(self._guest.worker.model_runner)
        self._weights = PolicyWeights(self._guest.worker, folder, shapes)
        return sum(parameter.numel() for parameter in self._guest.worker.get_model().parameters())

    def hold_spare(self) -> None:
        assert self._weights is not None
        self._weights.hold_spare()

    def step(self, scheduled: SchedulerOutput, grammar: GrammarOutput | None) -> Any:
        """Compute and sample; what came of it, of the first rank alone."""
        assert self._guest is not None and self._apart is not None
        failure, output = "", None
        with self._apart.stepping():
            try:
                output = self._guest.execute_model(scheduled)
                if output is None:
                    output = self._guest.sample_tokens(grammar)
            except Exception as error:  # noqa: BLE001  the others may wait for this rank
                failure = in_words(error)
        if failure:  # here, where the error's frames hold the group no more
            self._leave()
            raise RuntimeError(failure)
        return output if self._host.global_rank == 0 else None

    def prepare(self, slab: str, layout: Sequence[Laid], names: Sequence[str]) -> None:
        """Begin with a version that lies in the file `slab`."""
        assert self._weights is not None
        descriptor = os.open(slab, os.O_RDWR)
        try:
            lying = dict(Lying(descriptor, layout))
        finally:
            os.close(descriptor)
        self._version = {name: lying[name] for name in names}
        self._pieces = self._weights.preparing(self._version)

    def prepare_on(self) -> bool:
        """One piece of it; whether it is prepared. Raises SwapRefused."""
        assert self._apart is not None
        with self._apart.stepping():
            return next(self._pieces, self) is self

    def apply(self) -> None:
        """Serve it from the next step on."""
        assert self._weights is not None
        version, self._version = self._version, {}
        self._weights.apply(version)

    def release(self) -> None:
        """Let go of all of it."""
        self._version, self._pieces = {}, iter(())
        worker: Any = getattr(self._guest, "worker", None)  # as far as `load` came
        if getattr(worker, "model_runner", None) is not None:
            if current_platform.is_cpu():
                give_all_back(worker.model_runner.kv_caches)
            let_go(worker.model_runner)
        worker = self._guest = self._weights = None
        self._leave()
        gc.collect()
        _trim(0)

    def _leave(self) -> None:
        """The guest's group, in which nobody waits for this rank any more."""
        group, self._group = self._group, None
        if group is None:
            return
        communicator = group.device_communicator
        group.destroy()
        if communicator is not None:
            communicator.device_group = communicator.cpu_group = None
