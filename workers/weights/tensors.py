"""Tensors as words and back, without pickle.

Keeps true: words are those of a contiguous tensor in host memory, rows one after the other. Hosts are little-endian, as
every platform of torch and vLLM is.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rose.schemas.weights import TensorSpec
from rose.workers.weights.layout import DTYPE_BYTES, Box, LayoutError, matrix

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WORDS = {2: torch.uint16, 4: torch.uint32}

INFINITY = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}
"""Its bits by element type. Those of what is no number are above them, but for the sign."""

Matrix = NDArray[Any]
"""uint16 or uint32 [rows, columns]: a tensor's bits."""


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """Raises LayoutError for an element type that cannot travel."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise LayoutError(f"{name} is {dtype}: only {', '.join(DTYPE_BYTES)} can be published")
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype)


def to_wire_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """In its own element type if `dtype` has all values of that exactly, else rounded to it."""
    return tensor if dtype is None or torch.promote_types(tensor.dtype, dtype) == dtype else tensor.to(dtype)


def bits_of(tensor: Tensor) -> Matrix:
    """A tensor's bits as a matrix. A view if it is contiguous and in host memory; a copy otherwise."""
    flat = tensor.detach().to("cpu").contiguous().reshape(matrix(tensor.shape))
    words: Matrix = flat.view(WORDS[tensor.element_size()]).numpy()
    return words


def finite(words: Matrix, dtype: str) -> bool:
    """Whether all of these are finite numbers."""
    infinity = INFINITY[dtype]
    unsigned = words.dtype.type(np.iinfo(words.dtype).max >> 1)
    return not words.size or int((words & unsigned).max()) < infinity


def read_box(words: Matrix, box: Box) -> Matrix:
    """The elements of a box, flat; a view where they lie together."""
    rows = words[box.row_start : box.row_start + box.rows]
    flat = rows[:, box.column_start : box.column_start + box.columns].reshape(-1)
    return np.ascontiguousarray(flat)  # of one column it is a view with strides


def write_box(words: Matrix, box: Box, flat: Matrix) -> None:
    """Write the elements of a box."""
    rows = words[box.row_start : box.row_start + box.rows]
    rows[:, box.column_start : box.column_start + box.columns] = flat.reshape(box.rows, box.columns)


def empty_tensor(spec: TensorSpec) -> Tensor:
    """A tensor in host memory to be filled through `words_of`; what is never written takes no memory."""
    return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
