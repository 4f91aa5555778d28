"""Tensors as bytes and back, without pickle.

Keeps true: bytes are those of a contiguous tensor in host memory, rows one after the other. Hosts are little-endian, as
every platform of torch and vLLM is.
"""

import torch
from torch import Tensor

from schemas.weights import TensorSpec

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes, flat. A view if it is contiguous and in host memory; a copy otherwise."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def empty(spec: TensorSpec) -> Tensor:
    """A tensor in host memory to be filled through `bytes_of`."""
    return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
