"""The engine's weights, replaced between two steps.

Keeps true
- A version is taken whole or not at all: names, shapes, element types, coverage and that every value is a finite number
  are checked before the first write.
  On a CPU it is written into spare weights while the old version computes, and the two are exchanged between steps. On
  a GPU it is written between steps, and a write that fails is undone by writing the version that served before.
- What computes is what was written. On a CPU vLLM computes from packed copies of linear weights and throws the plain
  ones away; here they are kept, written by the model's own loader, and packed again.

Why not vLLM's `reload_weights` on a CPU: with tied embeddings it leaves the head's packed copy as it was (logprobs off
by 10), and it takes twice as long (18 ms against 7.5 ms, 0.4M parameters). Why not plain weights alone: steps of a 25M
parameter model take up to 1.4 times as long. The price is that a CPU holds weights twice, and packed ones beside them.
"""

import math
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers import utils as layer_utils
from vllm.platforms import current_platform

from workers.executor.vllm.spare import exchange, spare_of
from workers.executor.vllm.types import EngineBroken, EngineStartError, SwapRefused, first_line
from workers.executor.vllm.writing import equal, not_finite, refuse_unwritten, unlike, writing
from workers.weights.folder_names import COMPUTED
from workers.weights.model_folder import folder_tensors, held_tensors

HEAD = "lm_head.weight"
"""The tensor that a tied model does not have of its own."""

EMBEDDING = "model.embed_tokens.weight"
"""The tensor that a tied head is."""

UNTRAINED = "|".join((*COMPUTED, r"\battn\.(attention\.)?bias$"))
"""Names of what files of old versions of transformers hold and nobody trains; the last are masks."""


@contextmanager
def plain_weights_kept() -> Iterator[None]:
    """While a model loads: linear layers keep their weights beside the packed ones. Only a CPU packs."""
    dispatch = layer_utils.dispatch_cpu_unquantized_gemm

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        dispatch(layer, remove_weight=False)

    layer_utils.dispatch_cpu_unquantized_gemm = keep
    try:
        yield
    finally:
        layer_utils.dispatch_cpu_unquantized_gemm = dispatch


def checking(
    tensors: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]], engine_dtype: torch.dtype
) -> Generator[None, None, dict[str, Tensor]]:
    """A whole version of a model with these shapes, by name, in pieces; a tied head that is the embedding is left out.

    Raises SwapRefused.
    """
    version: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name in version:
            raise SwapRefused(f"{name} comes twice")
        version[name] = tensor
    tied = EMBEDDING in shapes and HEAD not in shapes
    if tied and HEAD in version and EMBEDDING in version:
        _check_tensor(EMBEDDING, version[EMBEDDING], shapes[EMBEDDING], engine_dtype)
        yield from _check_head(version.pop(HEAD), version[EMBEDDING])
    if unknown := version.keys() - shapes.keys():
        raise SwapRefused(f"the model has no tensor {min(unknown)}")
    if missing := shapes.keys() - version.keys():
        raise SwapRefused(f"{len(missing)} tensors are missing, the first is {min(missing)}")
    for name, tensor in version.items():
        _check_tensor(name, tensor, shapes[name], engine_dtype)
    if name := (yield from not_finite(version)):
        raise SwapRefused(f"{name} holds a value that is not finite")
    return version


def _check_head(head: Tensor, embedding: Tensor) -> Iterator[None]:
    if head.shape == embedding.shape and head.dtype == embedding.dtype and head.device == embedding.device:
        for same in equal(head, embedding):
            if not same:
                break
            yield
        else:
            return
    raise SwapRefused(f"{HEAD} is not {EMBEDDING}, but the model ties them")


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], engine_dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape:
        raise SwapRefused(f"{name} has shape {tuple(tensor.shape)}, the model's has {shape}")
    if tensor.is_meta or tensor.layout != torch.strided:
        raise SwapRefused(f"{name} holds no dense data")
    if not tensor.is_floating_point() or torch.promote_types(tensor.dtype, engine_dtype) != engine_dtype:
        raise SwapRefused(f"{name} is {tensor.dtype}: the engine's {engine_dtype} cannot hold that exactly")


class PolicyWeights:
    """The weights of one model runner, which may be one rank's share of a model."""

    def __init__(self, worker: Any, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`worker` is vLLM's, `shapes` those of the folder's tensors."""
        self._worker = worker
        self._folder = folder
        self._shapes = shapes
        self._held = folder_tensors(folder)
        unchanged = (name for name, tensor in self._held.items() if not tensor.travels)
        self._constants = dict(held_tensors(folder, self._held, unchanged))
        self._dtype: torch.dtype = worker.model_config.dtype
        self._serving: dict[str, Tensor] | None = None
        self._spare: torch.nn.Module | None = None

    def checking(self, tensors: Iterable[tuple[str, Tensor]]) -> Generator[None, None, dict[str, Tensor]]:
        """See `checking`."""
        return checking(tensors, self._shapes, self._dtype)

    def hold_spare(self) -> None:
        """Take the memory that `preparing` takes when it is first asked for. Raises EngineStartError.

        It is proven first that a version becomes what vLLM makes of the same weights when it loads them: the folder's
        own are written where nothing is, and compared.
        """
        if self._spare is not None or not current_platform.is_cpu():
            return
        model = self._worker.get_model()
        refuse_unwritten(model)
        spare = spare_of(model)
        with torch.no_grad():
            for parameter in spare.parameters():
                parameter.fill_(math.nan if parameter.is_floating_point() else -1)
        unread: set[str] = set()
        held = self._of_folder()
        try:
            for _ in writing(spare, held, unread=unread):
                pass
            name = unlike(model, spare)
        except Exception as error:  # whatever a loader raises that wants what a version has not
            raise EngineStartError(f"vLLM takes no new version of {self._folder}: {first_line(error)}") from error
        if name is not None:
            raise EngineStartError(self._unwritten(name, spare.get_parameter(name)))
        if (name := self._passed_over(held, unread)) is not None:
            raise EngineStartError(
                f"{self._folder} holds {name}, which a trainer changes and vLLM leaves out of what it computes: begin "
                "with another model"
            )
        self._spare = spare

    def _unwritten(self, name: str, parameter: Tensor) -> str:
        what = f"vLLM takes no new version of {self._folder}: {name}"
        if parameter.is_floating_point() and parameter.isnan().any():
            return f"{what} is not written, or not all of it: do its files lack a tensor that its config.json asks for?"
        return f"{what} is not what was written"

    @staticmethod
    def _passed_over(held: Mapping[str, Tensor], unread: set[str]) -> str | None:
        """Of the tensors that a loader did not look at, one that is neither computed from the configuration, nor a
        mask, nor the same as one that it read, as a tied head is.
        """
        weights = [name for name in unread if not re.search(UNTRAINED, name)]
        read = [tensor for name, tensor in held.items() if name not in unread]
        alone = (
            name
            for name in sorted(weights)
            if not any(one.shape == held[name].shape and torch.equal(one, held[name]) for one in read)
        )
        return next(alone, None)

    def preparing(self, version: dict[str, Tensor]) -> Iterator[None]:
        """Do for a checked version what can be done while the old one computes, in pieces (`writing`), on any thread.

        One version at a time: another one's pieces may only follow when these are no longer asked for. Raises
        SwapRefused.
        """
        try:
            self.hold_spare()
            if self._spare is not None:
                yield from writing(self._spare, version)
        except Exception as error:  # whatever a loader or a kernel raises, the old version serves on
            raise SwapRefused(f"it could not be prepared: {error}") from error

    def apply(self, version: dict[str, Tensor]) -> None:
        """Serve the version that was prepared last. Its tensors are kept, to undo a later swap.

        Raises SwapRefused when the old version serves on, EngineBroken when nothing does.
        """
        if current_platform.is_cpu():
            assert self._spare is not None
            exchange(self._worker.get_model(), self._spare)
            return
        try:
            self._reload(version)
        except Exception as error:  # whatever a loader or a kernel raises, half a version must not serve
            self._undo(error)
            raise SwapRefused(f"it could not be applied: {error}") from error
        self._serving = version

    def _undo(self, error: Exception) -> None:
        try:
            self._reload(self._serving if self._serving is not None else self._of_folder())
        except Exception as again:  # as above; now nothing whole is left to serve
            raise EngineBroken(f"a swap failed ({error}) and could not be undone ({again})") from again

    def _of_folder(self) -> dict[str, Tensor]:
        return dict(held_tensors(self._folder, self._held, self._shapes))

    def _reload(self, version: Mapping[str, Tensor]) -> None:
        self._worker.reload_weights(weights_iterator=iter(sorted({**self._constants, **version}.items())))
