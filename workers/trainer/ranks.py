"""The processes of one trainer: rank 0 is the only one on the bus for samples and outcomes, the others compute with it.

Keeps true
- All ranks make the same collective calls in the same order. A rank that fails elsewhere ends, and with it the others:
  a collective call with a rank that is gone raises.
- A fault that a step can bear is agreed before it is raised, so all ranks raise it at the same place.
- Messages between ranks are bytes of typed MessagePack.
- A rank waits for a command of rank 0 for as long as rank 0 waits for samples. Every other wait for a rank ends with an
  error after `timeout`: a rank that is frozen, or whose host is gone, ends the job.
- One rank without a launcher uses no process group.

The launcher is torchrun, or anything that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from rose.schemas.errors import RoseError, UsageError

log = structlog.get_logger("trainer")

COMMAND_TIMEOUT = timedelta(days=365)
"""Longest time that another rank waits for the next command of rank 0."""


class RankLost(RoseError):
    """Another rank of the trainer has ended."""


class FailedOnARank(Exception):
    """A step failed on one of the ranks; raised on all of them."""


class Ranks:
    """The ranks of this trainer, seen from one of them: a single process, until `join`."""

    def __init__(self, device: str = "cpu") -> None:
        """`device`: `cpu` or `cuda`; on `cuda`, each rank of a host has a GPU of its own. Raises UsageError."""
        if device == "cuda" and not torch.cuda.is_available():
            raise UsageError("trainer.device is cuda, and torch finds no GPU here: set cpu, or install torch for CUDA")
        local = int(os.environ.get("LOCAL_RANK", "0"))  # the only GPU, if each rank sees its own alone
        self.device = torch.device(f"cuda:{local % torch.cuda.device_count()}" if device == "cuda" else "cpu")
        self.rank, self.size = 0, 1
        self.grouped = False
        """Whether there is a process group, as FSDP2 needs."""
        self.publishing: Any = None
        """Process group of the threads that publish: their calls have an order of their own."""
        self._step: Any = None
        """Process group of the main threads."""
        self._commands: Any = None
        """Process group in which the main threads wait for commands."""

    def join(self, *, launched: bool, timeout: timedelta) -> None:
        """Join the ranks that a launcher has started, or make a group of this process alone. Raises UsageError."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        if launched:
            log.info("ranks_awaited", rank=os.environ.get("RANK"), ranks=os.environ.get("WORLD_SIZE"))
        try:
            if launched:
                dist.init_process_group(backend, timeout=timeout)
            else:
                dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=0, world_size=1)
        except (ValueError, RuntimeError) as error:
            raise UsageError(
                f"the ranks of the trainer do not find each other ({error}): start them with torchrun"
            ) from error
        self.rank, self.size, self.grouped = dist.get_rank(), dist.get_world_size(), True
        self._commands = dist.new_group(backend="gloo", timeout=timeout if self.leads else COMMAND_TIMEOUT)
        self._step = dist.new_group(backend="gloo", timeout=timeout)
        self.publishing = dist.new_group(backend="gloo", timeout=timeout)

    def leave(self) -> None:
        """Leave the process group."""
        if self.grouped:
            self.grouped = False
            dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def send_to_all(self, data: bytes) -> None:
        """Send a message from rank 0 to the others, which call `receive`. Raises RankLost."""
        if self.size > 1:
            with _lost_ranks():
                dist.broadcast(torch.tensor([len(data)]), 0, group=self._commands)
                dist.broadcast(_tensor_of(data), 0, group=self._commands)

    def receive(self) -> bytes:
        """Wait for the next message of rank 0. Raises RankLost."""
        with _lost_ranks():
            length = torch.zeros(1, dtype=torch.long)
            dist.broadcast(length, 0, group=self._commands)
            data = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(data, 0, group=self._commands)
        return data.numpy().tobytes()

    def gather(self, data: bytes, *, group: Any = None) -> list[bytes]:
        """The messages of all ranks, in their order, on every rank. Raises RankLost.

        `group`: the process group; None for that of the main threads.
        """
        if self.size == 1:
            return [data]
        group = group or self._step
        with _lost_ranks():
            lengths = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
            most = max(map(int, lengths))
            parts = [torch.empty(most, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(parts, torch.nn.functional.pad(_tensor_of(data), (0, most - len(data))), group=group)
        return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of the ranks' values, place by place. Raises RankLost."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        with _lost_ranks():
            dist.all_reduce(total, group=self._step)
        found: list[float] = total.tolist()
        return found

    def all_true(self, value: bool) -> bool:
        """Whether the value is true on all ranks. Raises RankLost."""
        return self.sum([float(not value)])[0] == 0

    def raise_agreed(self, error: Exception | None) -> None:
        """Raise if a rank has an error: `error` itself without a process group, else FailedOnARank on all ranks."""
        if not self.grouped:
            if error is not None:
                raise error
            return
        texts = self.gather(b"" if error is None else f"{type(error).__name__}: {error}".encode())
        if failed := [(rank, text) for rank, text in enumerate(texts) if text]:
            rank, text = failed[0]
            raise FailedOnARank(f"on rank {rank}: {text.decode()}") from error

    def require_alike(self, data: bytes, what: str) -> None:
        """Raise UsageError on all ranks if a rank gives other bytes: the ranks would no longer make the same calls."""
        if len(set(self.gather(hashlib.blake2b(data).digest()))) > 1:
            raise UsageError(f"{what} differ between the ranks of the trainer: have all ranks compute the same")

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Have an exception of the block, which makes no collective call, raised on all ranks (`raise_agreed`)."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # noqa: BLE001  of a user's algorithm; raised again on all ranks
            error = raised
        self.raise_agreed(error)


ALONE = Ranks()
"""A trainer of one process."""


@contextmanager
def _lost_ranks() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo has no type of its own for a connection that the other side has closed
        raise RankLost(
            f"another rank of the trainer has ended or hangs, so this rank ends ({str(error)[:200]})"
        ) from error


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
