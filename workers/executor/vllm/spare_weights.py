"""Spare weights: a second set of a model's parameters, written in pieces and exchanged with the model's parameters.

Imports only torch: packed copies, which only a CPU has, are made with vLLM's function when they are written.
"""

import copy
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from rose.workers.weights.folder_names import layer_of

PACKED = "cpu_linear"
"""Attribute of a layer: vLLM's function that computes with a packed copy of the layer's weight."""

PIECE_ELEMENTS = 1 << 21
"""Most elements of one piece: packed in about a millisecond, copied in half a millisecond."""

BLOCK_ROWS = 64
"""The rows of a piece are a multiple of this if there are as many: kernels compute so many rows at once."""


def make_spare(model: nn.Module) -> nn.Module:
    """Return a module tree of the same classes with copies of the model's parameters."""
    return _copy(model, {}, {})


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


def _copy(module: nn.Module, modules: dict[int, nn.Module], tensors: dict[int, nn.Parameter]) -> nn.Module:
    known = modules.get(id(module))
    if known is not None:
        return known
    copied = copy.copy(module)
    modules[id(module)] = copied
    copied.__dict__["_parameters"] = {
        name: None if parameter is None else _copy_parameter(parameter, tensors)
        for name, parameter in module._parameters.items()
    }
    copied.__dict__["_modules"] = {
        name: None if child is None else _copy(child, modules, tensors) for name, child in module._modules.items()
    }
    return copied


def _copy_parameter(parameter: nn.Parameter, tensors: dict[int, nn.Parameter]) -> nn.Parameter:
    if id(parameter) not in tensors:
        copied = torch.Tensor._make_subclass(type(parameter), parameter.data.clone(), False)
        copied.__dict__.update(parameter.__dict__)  # its loader and vLLM's other attributes
        tensors[id(parameter)] = copied
    return tensors[id(parameter)]


def bounded_slices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of tensors of one shape, of at most PIECE_ELEMENTS elements each."""
    first = tensors[0]
    if first.numel() <= PIECE_ELEMENTS:
        yield tensors
    elif first.numel() // len(first) > PIECE_ELEMENTS:
        for rows in zip(*tensors, strict=True):
            yield from bounded_slices(*rows)
    else:
        yield from zip(*(torch.split(tensor, _rows(tensor)) for tensor in tensors), strict=True)


def tensors_equal(left: Tensor, right: Tensor) -> Iterator[bool]:
    """Yield, piece by piece, whether two tensors of one shape are equal."""
    for pieces in bounded_slices(left, right):
        yield torch.equal(*pieces)


def first_not_finite(version: Mapping[str, Tensor]) -> Generator[None, None, str]:
    """Return the name of the first tensor with a value that is not finite, empty if there is none. Yields by piece."""
    left = PIECE_ELEMENTS
    for name, tensor in version.items():
        for (piece,) in bounded_slices(tensor):
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
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for _, tensors in groupby(sorted(version.items()), key=lambda named: layer_of(named[0])):  # as loaders need them
        layer = list(tensors)
        with torch.no_grad(), _RecordedCopies(own, [tensor for _, tensor in layer]) as copies:
            model.load_weights(list(layer))
        if read is not None:
            read.update({name: copies.elements_of(tensor) for name, tensor in layer})
        yield  # the loader has filled padding rows
        yield from _copy_pieces(copies.pairs)
    for module in model.modules():
        if hasattr(module, PACKED):
            yield from _pack_pieces(module)


class _RecordedCopies(TorchFunctionMode):
    """Records copies into the storages `own` instead of making them."""

    def __init__(self, own: set[int], loaded: Sequence[Tensor]) -> None:
        """`loaded`: the tensors that a loader reads."""
        super().__init__()
        self.pairs: list[tuple[Tensor, Tensor]] = []
        """Recorded copies: target and source."""
        self._own = own
        self._read: set[int] = set()
        """`id()` of every tensor that was an argument of a torch function."""
        self._elements: Counter[int] = Counter()
        """Number of elements that were copied, by `id()` of the loaded tensor."""
        self._origins: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary({tensor: tensor for tensor in loaded})
        """The loaded tensor that a tensor is made of."""

    def elements_of(self, loaded: Tensor) -> int:
        """Return how many elements of a loaded tensor were copied: all, if it was read and no copy of it was seen."""
        return self._elements[id(loaded)] or loaded.numel() * (id(loaded) in self._read)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self._read.update(map(id, args))
        origins = (self._origins.get(one) for one in args if isinstance(one, Tensor))
        origin = next((one for one in origins if one is not None), None)
        if function is Tensor.copy_ and args[0].untyped_storage().data_ptr() in self._own:
            self.pairs.append((args[0], args[1].expand_as(args[0])))
            self._elements[id(origin)] += args[1].numel()
            return args[0]
        made = function(*args, **(kwargs or {}))
        if origin is not None:
            several = made if isinstance(made, tuple | list) else (made,)
            self._origins.update({one: origin for one in several if isinstance(one, Tensor)})
        return made


def _copy_pieces(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    left = PIECE_ELEMENTS
    for tensors in pairs:
        for to, origin in bounded_slices(*tensors):
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
    blocks, rows = [], _rows(weight)
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


def _rows(tensor: Tensor) -> int:
    """Return the number of rows of a piece."""
    rows = max(1, PIECE_ELEMENTS // (tensor.numel() // len(tensor)))
    return rows - rows % BLOCK_ROWS or rows
