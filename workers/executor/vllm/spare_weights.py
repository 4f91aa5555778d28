"""Spare weights: a second set of a model's parameters, written in pieces and exchanged with the model's parameters.

For models that compute with packed copies of their weights, which only a CPU has. Imports only torch: the copies are
packed with vLLM's function when they are written.
"""

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import SimpleNamespace
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
    slice_rows,
)

PACKED = "cpu_linear"
"""Attribute of a layer: vLLM's function that computes with a packed copy of the layer's weight."""

PIECE_ELEMENTS = 1 << 21
"""Most elements of one piece: packed in about a millisecond, copied in half a millisecond."""


def has_packed_weights(model: nn.Module) -> bool:
    """Return whether a layer of the model computes with a packed copy of its weight."""
    linear = nn.functional.linear  # vLLM's function for a layer that is not packed
    return any(layer.__dict__.get(PACKED, linear) is not linear for layer in model.modules())


class SpareWeights:
    """A way to serve versions. See `weights.WeightWriter`."""

    def __init__(self, model: nn.Module) -> None:
        """Allocate the spare weights. `model`: vLLM's, loaded."""
        self._model = model
        self._spare = make_spare(model)

    def prove(self, served: Mapping[str, Tensor], read: dict[str, int]) -> str:
        """Write the served version into empty spare weights and compare. Return what is wrong, empty if nothing is."""
        with torch.no_grad():
            for parameter in self._spare.parameters():
                parameter.fill_(math.nan if parameter.is_floating_point() else -1)
        for _ in write_version(self._spare, served, read=read):
            pass
        for (name, mine), other in zip(self._model.named_parameters(), self._spare.parameters(), strict=True):
            if not torch.equal(mine.data, other.data):
                return f"{name} {NOT_WRITTEN if other.is_floating_point() and other.isnan().any() else OTHERWISE}"
        return ""

    def stage(self, version: Mapping[str, Tensor]) -> Iterator[None]:
        """Write a version into the spare weights, in pieces."""
        yield from write_version(self._spare, version)

    def activate(self) -> None:
        """Exchange the spare weights with the model's."""
        exchange_parameters(self._model, self._spare)

    def undo(self, before: Callable[[], Mapping[str, Tensor]]) -> None:
        """Exchange back."""
        exchange_parameters(self._model, self._spare)


def make_spare(model: nn.Module) -> nn.Module:
    """Return a module tree of the same classes with copies of the model's parameters."""
    return copy_modules(model, torch.clone)


def exchange_parameters(model: nn.Module, spare: nn.Module) -> None:
    """Exchange the parameters, packed copies included, of two module trees."""
    exchanged: set[int] = set()
    for mine, other in zip(model.modules(), spare.modules(), strict=True):
        for name, parameter in mine._parameters.items():
            theirs = other._parameters[name]
            if parameter is None or theirs is None or id(parameter) in exchanged:
                continue
            exchanged.add(id(parameter))
            parameter.data, theirs.data = theirs.data, parameter.data
        if PACKED in mine.__dict__:
            mine.__dict__[PACKED], other.__dict__[PACKED] = other.__dict__[PACKED], mine.__dict__[PACKED]


def tensors_equal(left: Tensor, right: Tensor) -> Iterator[bool]:
    """Yield, piece by piece, whether two tensors of one shape are equal."""
    for pieces in bounded_slices(left, right, most=PIECE_ELEMENTS):
        yield torch.equal(*pieces)


def first_not_finite(version: Mapping[str, Tensor]) -> Generator[None, None, str]:
    """Return the name of the first tensor with a value that is not finite, empty if there is none. Yields by piece."""
    left = PIECE_ELEMENTS
    for name, tensor in version.items():
        for (piece,) in bounded_slices(tensor, most=PIECE_ELEMENTS):
            if piece.numel() > left:
                yield
                left = PIECE_ELEMENTS
            if piece.numel() and not all(bound.isfinite() for bound in torch.aminmax(piece)):
                return name
            left -= piece.numel()
    return ""


def write_version(model: Any, version: Mapping[str, Tensor], *, read: dict[str, int] | None = None) -> Iterator[None]:
    """Write a version with the model's own loader and pack it again, in pieces: yields after each piece.

    `read`: receives, by name, how many elements of each tensor the loader reads.
    """
    for copies in recorded_copies(model, version, read=read):
        yield
        yield from _copy_pieces(copies)
    for module in model.modules():
        if hasattr(module, PACKED):
            yield from _pack_pieces(module)


def _copy_pieces(copies: Sequence[Copy]) -> Iterator[None]:
    left = PIECE_ELEMENTS
    for each in copies:
        for to, origin in bounded_slices(*each, most=PIECE_ELEMENTS):
            if to.numel() > left:
                yield
                left = PIECE_ELEMENTS
            with torch.no_grad():
                to.copy_(origin)
            left -= to.numel()
    yield


def _pack_pieces(layer: Any) -> Iterator[None]:
    from vllm.model_executor.layers import utils as layer_utils

    weight: Tensor = layer.weight.data
    if weight.ndim != 2 or weight.numel() <= PIECE_ELEMENTS:
        with torch.no_grad():
            layer_utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
        yield
        return
    bias = getattr(layer, "bias", None)
    blocks, rows = [], slice_rows(weight, PIECE_ELEMENTS)
    for start in range(0, len(weight), rows):
        block = SimpleNamespace(weight=weight[start : start + rows], bias=None)
        if bias is not None:
            block.bias = bias.data[start : start + rows].clone()  # a kernel may want it in another element type
        with torch.no_grad():
            layer_utils.dispatch_cpu_unquantized_gemm(block, remove_weight=False)
        blocks.append(block)
        yield
    setattr(layer, PACKED, _in_blocks(blocks, rows))


def _in_blocks(blocks: Sequence[Any], rows: int) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    kernels = [getattr(block, PACKED) for block in blocks]
    biases = [block.bias for block in blocks]

    def linear(x: Tensor, weight: Tensor, _: Tensor | None) -> Tensor:
        each = zip(kernels, torch.split(weight, rows), biases, strict=True)
        return torch.cat([kernel(x, part, bias) for kernel, part, bias in each], -1)

    return linear
