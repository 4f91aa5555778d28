"""Tensors as arrays of bits, and the copy of a policy that is published while training changes the policy.

Keeps true
- The arrays are row-major copies or views of contiguous tensors in host memory. Hosts are little-endian, as all
  platforms of torch and vLLM.
- The same values with the same slices have the same digests, whatever their device.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rose.schemas.weights import TensorSpec
from rose.workers.weights.gpu_changes import ChangeCollector, SliceChanges
from rose.workers.weights.layout import DTYPE_BYTES, Box, LayoutError, WholeDigest, digest_of, matrix, slices_of

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WORDS = {2: torch.uint16, 4: torch.uint32}

INFINITY = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}
"""Bits of infinity by element type. Without the sign bit, the bits of every NaN are larger."""

Matrix = NDArray[Any]
"""The bits of a tensor: uint16 or uint32 of shape [rows, columns]."""


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """Name, shape and element type of a tensor. Raises LayoutError if the element type cannot be published."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise LayoutError(f"{name} is {dtype}: only {', '.join(DTYPE_BYTES)} can be published")
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype)


def to_wire_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in its own element type if `dtype` holds all its values exactly, otherwise rounded to `dtype`."""
    return tensor if dtype is None or torch.promote_types(tensor.dtype, dtype) == dtype else tensor.to(dtype)


def bits_of(tensor: Tensor) -> Matrix:
    """A tensor's bits as a matrix: a view of a contiguous tensor in host memory, otherwise a copy."""
    flat = tensor.detach().to("cpu").contiguous().reshape(matrix(tensor.shape))
    words: Matrix = flat.view(WORDS[tensor.element_size()]).numpy()
    return words


def finite(words: Matrix, dtype: str) -> bool:
    """Whether all values are finite."""
    infinity = INFINITY[dtype]
    unsigned = words.dtype.type(np.iinfo(words.dtype).max >> 1)
    return not words.size or int((words & unsigned).max()) < infinity


def read_box(words: Matrix, box: Box) -> Matrix:
    """The elements of a box as a flat array; a view if they are contiguous."""
    rows = words[box.row_start : box.row_start + box.rows]
    flat = rows[:, box.column_start : box.column_start + box.columns].reshape(-1)
    return np.ascontiguousarray(flat)  # a single column would be a view with strides


def write_box(words: Matrix, box: Box, flat: Matrix) -> None:
    """Write a flat array to a box."""
    rows = words[box.row_start : box.row_start + box.rows]
    rows[:, box.column_start : box.column_start + box.columns] = flat.reshape(box.rows, box.columns)


def empty_tensor(spec: TensorSpec) -> Tensor:
    """An uninitialised tensor in host memory, to be filled through `bits_of`.

    Pages that are never written take no memory.
    """
    return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])


def owned_part(tensor: Tensor) -> tuple[Box, Tensor] | None:
    """The box and the values of the part that this process owns; None if other ranks own all of the tensor.

    A plain tensor is owned whole. Raises LayoutError for a DTensor that is sharded along an axis other than the first
    or holds partial sums.
    """
    rows, columns = matrix(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box(0, rows, 0, columns), tensor
    mesh, placements = tensor.device_mesh, tensor.placements
    for dimension, placement in enumerate(placements):
        if placement.is_replicate():
            if mesh.get_local_rank(dimension) != 0:
                return None
        elif not (isinstance(placement, Shard) and placement.dim == 0):
            raise LayoutError(f"a tensor is placed as {placement}: only Shard(0) and Replicate can be published")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if 0 in shape:
        return None
    return Box(offset[0] if offset else 0, matrix(shape)[0], 0, columns), tensor.to_local()


class NotFinite(LayoutError):
    """The policy has values that are not finite in the published element type."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The specs of all tensors, and the boxes and bits of the owned parts, by name."""

    specs: dict[str, TensorSpec] = field(default_factory=dict)
    boxes: dict[str, Box] = field(default_factory=dict)
    words: dict[str, Matrix] = field(default_factory=dict)
    digests: dict[tuple[str, Box], bytes] = field(default_factory=dict)
    """Digest of every owned slice, in the manifest's order."""
    changes: dict[tuple[str, Box], SliceChanges] = field(default_factory=dict)
    """Changes of slices since an earlier snapshot, of slices that were collected on a GPU."""

    @property
    def owned_bytes(self) -> int:
        """Bytes that this process publishes in an anchor."""
        return sum(words.nbytes for words in self.words.values())

    @property
    def model_bytes(self) -> int:
        """Bytes of the whole model; the same on all ranks."""
        return sum(prod(spec.shape) * DTYPE_BYTES[spec.dtype] for spec in self.specs.values())

    def within(self, name: str, box: Box) -> Matrix:
        """The bits of a slice of an owned part, as a flat array."""
        own = self.boxes[name]
        at = Box(box.row_start - own.row_start, box.rows, box.column_start - own.column_start, box.columns)
        return read_box(self.words[name], at)

    def digest(self) -> bytes:
        """The digest that the manifest of this version has, if one process owns all tensors."""
        digest = WholeDigest()
        for (name, box), of_slice in self.digests.items():
            digest.add(name, box, of_slice)
        return digest.digest()


def snapshot_of(
    named_tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype | None,
    column_parts: int,
    collector: ChangeCollector | None = None,
) -> Snapshot:
    """Copy tensors, with more precise values rounded to `dtype`. `column_parts`: see `layout.slices_of`.

    `collector` collects the changes since its last snapshot.

    Raises LayoutError if an element type or placement cannot be published, and NotFinite if a value is not finite or
    too large for `dtype`.
    """
    snapshot = Snapshot()
    for name, tensor in named_tensors:
        wired = to_wire_dtype(tensor.detach(), dtype)
        snapshot.specs[name] = spec_of(name, wired)
        local = owned_part(wired)
        if local is None:
            continue
        snapshot.boxes[name], shard = local
        words = bits_of(shard)
        # Rounding, or the way from a GPU, has made a copy already.
        snapshot.words[name] = words.copy() if wired.dtype == tensor.dtype and shard.is_cpu else words
        digests: dict[Box, bytes] = {}
        for box in slices_of(snapshot.boxes[name], column_parts=column_parts):
            flat = snapshot.within(name, box)
            if not finite(flat, snapshot.specs[name].dtype):
                raise NotFinite(_nonfinite_error(name, owned_part(tensor.detach()), snapshot.specs[name].dtype))
            digests[box] = digest_of(flat.data)
        snapshot.digests.update({(name, box): digest for box, digest in digests.items()})
        if collector is not None:
            collected = collector.collect(name, shard, snapshot.boxes[name], digests, snapshot.specs[name].dtype)
            snapshot.changes.update({(name, box): changes for box, changes in collected.items()})
    return snapshot


def _nonfinite_error(name: str, own: tuple[Box, Tensor] | None, dtype: str) -> str:
    """The message of NotFinite. `own`: the owned part of the tensor before rounding."""
    assert own is not None
    values = own[1].float()
    if not values.isfinite().all():
        return f"{name} holds a value that is not finite: lower the learning rate"
    most = float(values.abs().max())
    return f"{name} holds {most:g}, which {dtype} does not: set weights.dtype and executor.dtype to bfloat16 or float32"
