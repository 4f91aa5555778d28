"""Conversion of tensors to arrays of bits and back.

Keeps true: the arrays are row-major copies or views of contiguous tensors in host memory. Hosts are little-endian, as
all platforms of torch and vLLM.
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
