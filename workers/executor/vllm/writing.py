"""A version written into a model's weights, in pieces that are bounded by elements.

Keeps true
- Between two pieces others may compute: a piece is of one layer, and compares, copies or packs at most PIECE_ELEMENTS
  elements, however large a tensor is.
- The model's own loader says what goes where; only the copies that it asks for are made later, one after the other.
- A large layer is packed in blocks of its rows, each by vLLM's own choice of a kernel, and computes them one after the
  other. An output is a row's own, so what is computed stays the same.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from workers.executor.vllm.spare import PACKED
from workers.executor.vllm.types import EngineStartError
from workers.weights.folder_names import layer_of

PIECE_ELEMENTS = 1 << 21
"""Packed in about a millisecond, copied in half of one."""

WRITTEN = UnquantizedLinearMethod, UnquantizedEmbeddingMethod
"""How layers compute whose weights are written as vLLM has them: as they were loaded, and packed copies of these."""

BLOCK_ROWS = 64
"""Rows of a block are a multiple of this, where they are as many: kernels compute so many at once."""


def refuse_unwritten(model: torch.nn.Module) -> None:
    """Raises EngineStartError for a model of whose weights vLLM makes something on a CPU that `writing` does not make.

    Experts are laid out anew under their old names and shapes, and latent attention is computed from products of its
    weights: a version would be written where nobody reads it, or read as what it is not.
    """
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(layer, MLAAttention) or (isinstance(method, QuantizeMethodBase) and type(method) not in WRITTEN):
            kind = type(layer if method is None else method).__name__
            raise EngineStartError(
                f"on a CPU a new policy version cannot be written into {name} ({kind}): take a policy without experts "
                "and latent attention, or a GPU"
            )


def unlike(model: torch.nn.Module, other: torch.nn.Module) -> str | None:
    """The first parameter in which two models of the same classes differ; None if they do not."""
    pairs = zip(model.named_parameters(), other.parameters(), strict=True)
    return next((name for (name, one), another in pairs if not torch.equal(one.data, another.data)), None)


def cut(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape, as views of at most PIECE_ELEMENTS elements each."""
    first = tensors[0]
    if first.numel() <= PIECE_ELEMENTS:
        yield tensors
    elif first.numel() // len(first) > PIECE_ELEMENTS:
        for rows in zip(*tensors, strict=True):
            yield from cut(*rows)
    else:
        yield from zip(*(torch.split(tensor, _rows(tensor)) for tensor in tensors), strict=True)


def equal(one: Tensor, other: Tensor) -> Iterator[bool]:
    """Whether two tensors of one shape are the same, piece by piece."""
    for pieces in cut(one, other):
        yield torch.equal(*pieces)


def not_finite(version: Mapping[str, Tensor]) -> Generator[None, None, str]:
    """The first tensor with a value that is no finite number, or an empty name; piece by piece."""
    left = PIECE_ELEMENTS
    for name, tensor in version.items():
        for (piece,) in cut(tensor):
            if piece.numel() > left:
                yield
                left = PIECE_ELEMENTS
            if piece.numel() and not all(bound.isfinite() for bound in torch.aminmax(piece)):
                return name
            left -= piece.numel()
    return ""


def writing(model: Any, version: Mapping[str, Tensor], *, unread: set[str] | None = None) -> Iterator[None]:
    """By the model's own loader, then packed again. `unread` comes to hold the tensors that the loader passes over."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for _, tensors in groupby(sorted(version.items()), key=lambda named: layer_of(named[0])):  # as loaders want them
        layer = list(tensors)
        with torch.no_grad(), _Copies(own) as copies:
            model.load_weights(list(layer))
        if unread is not None:
            unread.update(name for name, tensor in layer if id(tensor) not in copies.read)
        yield  # it has filled up rows that no tensor has
        yield from _copying(copies.asked)
    for module in model.modules():
        if hasattr(module, PACKED):
            yield from _packing(module)


class _Copies(TorchFunctionMode):
    """Copies into storages that are the model's `own` are noted, and not made."""

    def __init__(self, own: set[int]) -> None:
        super().__init__()
        self.asked: list[tuple[Tensor, Tensor]] = []
        """To and from."""
        self.read: set[int] = set()
        """Of tensors that anything was done with."""
        self._own = own

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.read.update(map(id, args))
        if function is Tensor.copy_ and args[0].untyped_storage().data_ptr() in self._own:
            self.asked.append((args[0], args[1].expand_as(args[0])))
            return args[0]
        return function(*args, **(kwargs or {}))


def _copying(asked: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    left = PIECE_ELEMENTS
    for tensors in asked:
        for to, origin in cut(*tensors):
            if to.numel() > left:
                yield
                left = PIECE_ELEMENTS
            with torch.no_grad():
                to.copy_(origin)
            left -= to.numel()
    yield


def _packing(layer: Any) -> Iterator[None]:
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
    """Of a piece."""
    rows = max(1, PIECE_ELEMENTS // (tensor.numel() // len(tensor)))
    return rows - rows % BLOCK_ROWS or rows
