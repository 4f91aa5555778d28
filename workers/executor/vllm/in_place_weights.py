"""Versions written in place: what a version changes is staged on the device, and written between two steps.

Keeps true
- Parameters keep their storage: CUDA graphs and compiled code read a new version at the addresses that they know.
- Staging only reads the parameters. A piece of staging copies at most PIECE_BYTES of parameters to the device.
- Staging allocates nothing beyond its memory, 1/MEMORY_PART of the parameters' bytes, but about four pieces.
- What is staged holds the old values after its activation: undo puts these back, bit for bit.

A change is a list of positions with their values, or all values of a slice where that takes less memory. Changes that
do not fit into the memory stay on the host: their slices are copied between the two steps, at the speed of the link. To
undo these, the whole version before is copied from the host.

Imports only torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rose.workers.executor.vllm.loader_copies import (
    NOT_WRITTEN,
    OTHERWISE,
    Copy,
    bounded_slices,
    copy_modules,
    recorded_copies,
    storage_key,
)
from rose.workers.weights.folder_names import BITS

PIECE_BYTES = 32 << 20
"""Most bytes of parameters in one piece."""

MEMORY_PART = 4
"""A model's bytes over the bytes of its staging memory. A quarter holds the changes of 8 % of bfloat16 weights."""

POSITION = torch.int32
"""Type of a position within a slice."""

ALIGNMENT = 16
"""Bytes; more than the size of an element."""


@dataclass(frozen=True, slots=True)
class StagedBytes:
    """The bytes of a staged version."""

    written: int
    """Bytes of parameters that activation writes from the staging memory."""
    staged: int
    """Bytes of staging memory in use: values and positions."""
    left: int
    """Bytes of parameters that activation copies from the host."""


@dataclass(slots=True)
class _Change:
    """The new values of a slice; after `write`, the old values."""

    target: Tensor
    """View of a parameter."""
    positions: Tensor | None
    """Positions in the flattened target; None for all."""
    values: Tensor
    written: bool = False

    def write(self) -> None:
        """Write the new values. If that fails, `undo` restores the old values."""
        positions = None if self.positions is None else self.positions.long()
        new = self.values.clone()
        self.values.copy_(self.target if positions is None else self.target.take(positions))
        self.written = True
        self._put(positions, new)

    def undo(self) -> None:
        """Write the old values again, if the new values were written."""
        if self.written:
            self._put(None if self.positions is None else self.positions.long(), self.values)

    def _put(self, positions: Tensor | None, values: Tensor) -> None:
        if positions is None:
            self.target.copy_(values)
        else:
            self.target.put_(positions, values)


class InPlaceWeights:
    """A way to serve versions. See `weights.WeightWriter`."""

    def __init__(self, model: nn.Module) -> None:
        """Allocate the staging memory. `model`: a model with `load_weights`, loaded, whose parameters never move."""
        self._empty = copy_modules(model, _without_memory)
        """The model without memory, into which the loader is recorded."""
        self._parameters = {
            storage_key(empty): (name, parameter.data)
            for (name, parameter), empty in zip(model.named_parameters(), self._empty.parameters(), strict=True)
        }
        size = sum(parameter.nbytes for _, parameter in self._parameters.values())
        self._device = next(model.parameters()).device
        self._memory = torch.empty(size // MEMORY_PART, dtype=torch.uint8, device=self._device)
        self._used = 0
        """Bytes of the memory in use."""
        self._stream: Any = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """Where versions are staged, beside the steps."""
        self._changes: list[_Change] = []
        self._left: list[Copy] = []
        """Copies of slices whose changes did not fit into the memory."""

    @property
    def staged_bytes(self) -> StagedBytes:
        """The bytes of the staged version."""
        return StagedBytes(
            written=sum(change.values.nbytes for change in self._changes),
            staged=self._used,
            left=sum(target.nbytes for target, _ in self._left),
        )

    def prove(self, served: Mapping[str, Tensor], read: dict[str, int]) -> str:
        """Prove that the loader's copies of the served version are what the model computes with.

        Every element must be written once, with the value that it has. Takes a byte of host memory for each element
        until the proof is done. Return what is wrong, empty if nothing is.
        """
        counts = {
            key: torch.zeros(parameter.untyped_storage().nbytes() // parameter.itemsize, dtype=torch.uint8)
            for key, (_, parameter) in self._parameters.items()
        }
        for copies in recorded_copies(self._empty, served, read=read):
            for empty, source in copies:
                key = storage_key(empty)
                counts[key].as_strided(empty.size(), empty.stride(), empty.storage_offset()).add_(1)
                for target, part in _slices(self._target(empty), source):
                    if bool(_changed(target, part.to(self._device, target.dtype)).any()):
                        return f"{self._parameters[key][0]} {OTHERWISE}"
        for key, (name, parameter) in self._parameters.items():
            if bool((counts[key].as_strided(parameter.size(), parameter.stride()) != 1).any()):
                return f"{name} {NOT_WRITTEN}"
        return ""

    def stage(self, version: Mapping[str, Tensor]) -> Iterator[None]:
        """Find what a version changes and put the changes into the staging memory, in pieces.

        The tensors of the version must not change before it is activated or discarded.
        """
        self._changes, self._left, self._used = [], [], 0
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # it may still write a version
        for piece in self._pieces(version):
            with torch.cuda.stream(self._stream):
                arriving = [(*each, each[1].to(self._device, non_blocking=True)) for each in piece]
            yield  # the copies run beside the next step
            with torch.cuda.stream(self._stream):
                for target, source, values in arriving:
                    self._keep_change(target, source, values)

    def activate(self) -> None:
        """Write the staged changes. If that fails, the caller calls `undo`."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        for change in self._changes:
            change.write()
        for target, source in self._left:
            target.copy_(source)
        self._wait()

    def undo(self, before: Callable[[], Mapping[str, Tensor]]) -> None:
        """Serve the version before again. `before`: returns its tensors."""
        if self._left:
            for copies in recorded_copies(self._empty, before()):
                for empty, source in copies:
                    self._target(empty).copy_(source)
        else:
            for change in reversed(self._changes):
                change.undo()
        self._changes, self._left = [], []
        self._wait()

    def _wait(self) -> None:
        """Wait for the device, which may report an error only now."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).synchronize()

    def _target(self, empty: Tensor) -> Tensor:
        """Return the view of a parameter for a view of its copy without memory."""
        _, parameter = self._parameters[storage_key(empty)]
        return parameter.as_strided(empty.size(), empty.stride(), parameter.storage_offset() + empty.storage_offset())

    def _pieces(self, version: Mapping[str, Tensor]) -> Iterator[list[Copy]]:
        """Yield the copies of a version in pieces of at most PIECE_BYTES."""
        piece: list[Copy] = []
        left = PIECE_BYTES
        for copies in recorded_copies(self._empty, version):
            for empty, source in copies:
                for each in _slices(self._target(empty), source):
                    if each[0].nbytes > left:
                        yield piece
                        piece, left = [], PIECE_BYTES
                    piece.append(each)
                    left -= each[0].nbytes
        yield piece

    def _keep_change(self, target: Tensor, source: Tensor, values: Tensor) -> None:
        """Stage what a slice changes, or leave the slice on the host. `values`: the source on the device."""
        values = values.to(target.dtype)
        changed = _changed(target, values)
        count = int(changed.count_nonzero())
        if not count:
            return
        positions = None
        if count * (POSITION.itemsize + target.itemsize) < target.nbytes:
            positions = changed.flatten().nonzero().flatten()
            values = values.take(positions)
            positions = positions.to(POSITION)
        kept = self._keep([values] if positions is None else [values, positions])
        if kept is None:
            self._left.append((target, source))
        else:
            self._changes.append(_Change(target, None if positions is None else kept[1], kept[0]))

    def _keep(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Copy tensors into the staging memory; None if it has no room for all of them."""
        kept, used = [], self._used
        for tensor in tensors:
            begin = -(-used // ALIGNMENT) * ALIGNMENT
            used = begin + tensor.nbytes
            if used > len(self._memory):
                return None
            kept.append(self._memory[begin:used].view(tensor.dtype).view(tensor.shape).copy_(tensor))
        self._used = used
        return kept


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _slices(target: Tensor, source: Tensor) -> Iterator[Copy]:
    slices = bounded_slices(target, source, most=PIECE_BYTES // target.itemsize)
    yield from ((target, source) for target, source in slices)


def _changed(target: Tensor, values: Tensor) -> Tensor:
    """Return which elements of the target have other bits than the values, which are of the same type."""
    bits = BITS[target.itemsize]
    return target.view(bits) != values.view(bits)
