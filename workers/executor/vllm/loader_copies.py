"""The copies by which a model's own loader puts a version into the model's parameters, recorded instead of made.

Keeps true
- Code for fused, transposed, permuted or sharded parameters is the loader's. A recorded target is a view of a
  parameter. A recorded source is a view of a loaded tensor, or what the loader computed from a loaded tensor.
- Recording writes to no parameter by `copy_`, `fill_` and `zero_`. A loader that writes in another way is not recorded:
  the users of this module prove at the start that the copies write every element.

Imports only torch.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from rose.workers.weights.folder_names import layer_of

Copy = tuple[Tensor, Tensor]
"""Target and source, of one shape."""

NOT_WRITTEN = "is not written, or not all of it: do its files lack a tensor that its config.json asks for?"
OTHERWISE = "is not what was written"
"""Results of the proof that copies write a parameter."""

BLOCK_ROWS = 64
"""The rows of a slice are a multiple of this if there are as many: kernels compute so many rows at once."""


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors have in common if they share a storage, also one without memory (meta)."""
    return int(tensor.untyped_storage()._cdata)


def copy_modules(model: nn.Module, copy_data: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a module tree of the same classes, whose parameters hold `copy_data` of the model's data.

    Everything else is shared with the model. Tied parameters are tied in the copy.
    """
    return _copy(model, copy_data, {}, {})


def _copy(
    module: nn.Module,
    copy_data: Callable[[Tensor], Tensor],
    modules: dict[int, nn.Module],
    tensors: dict[int, nn.Parameter],
) -> nn.Module:
    known = modules.get(id(module))
    if known is not None:
        return known
    copied = copy.copy(module)
    modules[id(module)] = copied
    for parameter in module._parameters.values():
        if parameter is not None and id(parameter) not in tensors:
            made = Tensor._make_subclass(type(parameter), copy_data(parameter.data), False)
            made.__dict__.update(parameter.__dict__)  # its loader and vLLM's other attributes
            tensors[id(parameter)] = made
    copied.__dict__["_parameters"] = {
        name: None if parameter is None else tensors[id(parameter)] for name, parameter in module._parameters.items()
    }
    copied.__dict__["_modules"] = {
        name: None if child is None else _copy(child, copy_data, modules, tensors)
        for name, child in module._modules.items()
    }
    return copied


def recorded_copies(
    model: Any, version: Mapping[str, Tensor], *, read: dict[str, int] | None = None
) -> Iterator[list[Copy]]:
    """Yield the copies by which the loader of `model` would load a version, for one layer after another.

    `read`: receives, by name, how many elements of each tensor the loader reads.
    """
    own = {storage_key(parameter) for parameter in model.parameters()}
    for _, tensors in groupby(sorted(version.items()), key=lambda named: layer_of(named[0])):  # as loaders need them
        layer = list(tensors)
        with torch.no_grad(), _Recorder(own, [tensor for _, tensor in layer]) as recorder:
            model.load_weights(list(layer))
        if read is not None:
            read.update({name: recorder.elements_of(tensor) for name, tensor in layer})
        yield recorder.copies


class _Recorder(TorchFunctionMode):
    """Records copies into the storages `own` instead of making them."""

    def __init__(self, own: set[int], loaded: Sequence[Tensor]) -> None:
        """`loaded`: the tensors that a loader reads."""
        super().__init__()
        self.copies: list[Copy] = []
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
        if function in (Tensor.copy_, Tensor.fill_, Tensor.zero_) and storage_key(args[0]) in self._own:
            target = args[0]
            if function is Tensor.copy_:
                source = args[1]
                self._elements[id(origin)] += source.numel()
            else:
                source = torch.as_tensor(0 if function is Tensor.zero_ else args[1], dtype=target.dtype)
            self.copies.append((target, source.expand_as(target)))
            return target
        made = function(*args, **(kwargs or {}))
        if origin is not None:
            several = made if isinstance(made, tuple | list) else (made,)
            self._origins.update({one: origin for one in several if isinstance(one, Tensor)})
        return made


def bounded_slices(*tensors: Tensor, most: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of tensors of one shape, of at most `most` elements each."""
    first = tensors[0]
    if first.numel() <= most:
        yield tensors
    elif first.numel() // len(first) > most:
        for rows in zip(*tensors, strict=True):
            yield from bounded_slices(*rows, most=most)
    else:
        rows_each = slice_rows(first, most)
        yield from zip(*(torch.split(tensor, rows_each) for tensor in tensors), strict=True)


def slice_rows(tensor: Tensor, most: int) -> int:
    """Return the number of rows of a slice of at most `most` elements."""
    rows = max(1, most // (tensor.numel() // len(tensor)))
    return rows - rows % BLOCK_ROWS or rows
