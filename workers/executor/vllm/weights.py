"""The engine's weights, which are replaced between two steps.

Keeps true
- A version is activated completely or not at all: names, shapes, element types, completeness and finite values are
  checked before the first write. On a CPU the version is written into spare weights while the old version computes, and
  the two are exchanged between steps. On a GPU the version is written between steps, and a failed write is undone by a
  write of the version before.
- The engine computes with the weights that were written. On a CPU vLLM computes with packed copies of linear weights
  and discards the plain weights; here the plain weights are kept, written by the model's own loader, and packed again.

vLLM's `reload_weights` is not used on a CPU: with tied embeddings it does not update the head's packed copy (logprobs
off by 10), and it takes twice as long (18 ms against 7.5 ms, 0.4M parameters). Plain weights alone are not used either,
because steps of a model with 25M parameters take up to 1.4 times as long. The cost is that a CPU holds all weights
twice, each with packed copies.
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
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from rose.workers.executor.vllm import spare_weights
from rose.workers.executor.vllm.types import EngineBroken, EngineStartError, SwapRefused, first_line
from rose.workers.weights.folder_names import COMPUTED
from rose.workers.weights.model_folder import folder_tensors, held_tensors

WRITABLE_METHODS = UnquantizedLinearMethod, UnquantizedEmbeddingMethod
"""Methods of layers that compute with the loaded weights, or packed copies of them, and nothing else."""


def refuse_unsupported_layers(model: torch.nn.Module) -> None:
    """Raise EngineStartError for a layer whose weights vLLM transforms on a CPU in a way `write_version` does not.

    vLLM rearranges the weights of experts under the same names and shapes, and computes latent attention from products
    of its weights. A new version would be written where it is not read, or would be misread.
    """
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(layer, MLAAttention) or (
            isinstance(method, QuantizeMethodBase) and type(method) not in WRITABLE_METHODS
        ):
            kind = type(layer if method is None else method).__name__
            raise EngineStartError(
                f"on a CPU a new policy version cannot be written into {name} ({kind}): take a policy without experts "
                "and latent attention, or a GPU"
            )


def first_difference(model: torch.nn.Module, other: torch.nn.Module) -> str | None:
    """Return the name of the first parameter in which two models of the same classes differ; None if none does."""
    pairs = zip(model.named_parameters(), other.parameters(), strict=True)
    return next((name for (name, one), another in pairs if not torch.equal(one.data, another.data)), None)


HEAD_TENSOR = "lm_head.weight"
"""The head's tensor, which a model with a tied head does not have."""

EMBEDDING_TENSOR = "model.embed_tokens.weight"
"""The tensor that a tied head shares."""

UNTRAINED = rf"{COMPUTED}|\battn\.(attention\.)?bias$"
"""Names of tensors in files of old transformers versions that are not trained; the last pattern matches masks."""


@contextmanager
def keep_unpacked_weights() -> Iterator[None]:
    """Make linear layers keep their plain weights besides the packed copies while a model loads. Only a CPU packs."""
    dispatch = layer_utils.dispatch_cpu_unquantized_gemm

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        dispatch(layer, remove_weight=False)

    layer_utils.dispatch_cpu_unquantized_gemm = keep
    try:
        yield
    finally:
        layer_utils.dispatch_cpu_unquantized_gemm = dispatch


def check_version(
    tensors: Iterable[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]], engine_dtype: torch.dtype
) -> Generator[None, None, dict[str, Tensor]]:
    """Check a version in pieces, and return its tensors by name, without a head that equals a tied embedding.

    `shapes`: shapes of the model's tensors. Raises SwapRefused if the version is incomplete or invalid.
    """
    version: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name in version:
            raise SwapRefused(f"{name} comes twice")
        version[name] = tensor
    tied = EMBEDDING_TENSOR in shapes and HEAD_TENSOR not in shapes
    if tied and HEAD_TENSOR in version and EMBEDDING_TENSOR in version:
        _check_tensor(EMBEDDING_TENSOR, version[EMBEDDING_TENSOR], shapes[EMBEDDING_TENSOR], engine_dtype)
        yield from _check_head(version.pop(HEAD_TENSOR), version[EMBEDDING_TENSOR])
    if unknown := version.keys() - shapes.keys():
        raise SwapRefused(f"the model has no tensor {min(unknown)}")
    if missing := shapes.keys() - version.keys():
        raise SwapRefused(f"{len(missing)} tensors are missing, the first is {min(missing)}")
    for name, tensor in version.items():
        _check_tensor(name, tensor, shapes[name], engine_dtype)
    if name := (yield from spare_weights.first_not_finite(version)):
        raise SwapRefused(f"{name} holds a value that is not finite")
    return version


def _check_head(head: Tensor, embedding: Tensor) -> Iterator[None]:
    if head.shape == embedding.shape and head.dtype == embedding.dtype and head.device == embedding.device:
        for same in spare_weights.tensors_equal(head, embedding):
            if not same:
                break
            yield
        else:
            return
    raise SwapRefused(f"{HEAD_TENSOR} is not {EMBEDDING_TENSOR}, but the model ties them")


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], engine_dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape:
        raise SwapRefused(f"{name} has shape {tuple(tensor.shape)}, the model's has {shape}")
    if tensor.is_meta or tensor.layout != torch.strided:
        raise SwapRefused(f"{name} holds no dense data")
    if not tensor.is_floating_point() or torch.promote_types(tensor.dtype, engine_dtype) != engine_dtype:
        raise SwapRefused(f"{name} is {tensor.dtype}: the engine's {engine_dtype} cannot hold that exactly")


def require_all_read(folder: Path, shapes: Mapping[str, tuple[int, ...]], read: Mapping[str, int]) -> None:
    """Check that vLLM's loader reads the folder's tensors, and reads them whole.

    `read`: elements of each tensor that were read, summed over the ranks, so a part of a tensor that every rank holds
    may pass. Of ignored tensors only those count that are trained: not what is computed from the configuration, masks,
    and copies of a tensor that was read (a tied head). Raises EngineStartError.
    """
    for name, shape in sorted(shapes.items()):
        if 0 < read.get(name, 0) < math.prod(shape):
            raise EngineStartError(
                f"vLLM reads only a part of {name} ({read[name]} of {math.prod(shape)} elements), as {folder}/"
                "config.json says a size that vLLM does not read: begin with another model"
            )
    files = folder_tensors(folder)
    for name in sorted(name for name in shapes if not read.get(name) and not re.search(UNTRAINED, name)):
        alike = [other for other in shapes if read.get(other) and shapes[other] == shapes[name]]
        tensors = dict(held_tensors(folder, files, [name, *alike]))
        if not any(torch.equal(tensors[other], tensors[name]) for other in alike):
            raise EngineStartError(
                f"{folder} holds {name}, which a trainer changes and vLLM leaves out of what it computes: begin with "
                "another model"
            )


class PolicyWeights:
    """The weights of one model runner, which may hold one rank's shard of a model."""

    def __init__(self, worker: Any, folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`worker`: vLLM's worker. `shapes`: shapes of the folder's tensors."""
        self._worker = worker
        self._folder = folder
        self._shapes = shapes
        self._held = folder_tensors(folder)
        unchanged = (name for name, tensor in self._held.items() if not tensor.travels)
        self._constants = dict(held_tensors(folder, self._held, unchanged))
        self._dtype: torch.dtype = worker.model_config.dtype
        self._serving: dict[str, Tensor] | None = None
        self._spare: torch.nn.Module | None = None

    def check(self, tensors: Iterable[tuple[str, Tensor]]) -> Generator[None, None, dict[str, Tensor]]:
        """Check a version: see `check_version`."""
        return check_version(tensors, self._shapes, self._dtype)

    def allocate_spare(self) -> None:
        """Allocate the spare weights, which `stage` otherwise allocates at its first call. Raises EngineStartError."""
        if read := self.prove_spare():
            require_all_read(self._folder, self._shapes, read)

    def prove_spare(self) -> dict[str, int]:
        """Allocate the spare weights, and return how many elements of each tensor the loader reads here.

        Proves first that `write_version` gives the same weights as vLLM's load: writes the folder's weights into empty
        spare weights, and compares. Returns nothing on a GPU, which needs no spare weights, and if they are there.
        Raises EngineStartError.
        """
        if self._spare is not None or not current_platform.is_cpu():
            return {}
        model = self._worker.get_model()
        refuse_unsupported_layers(model)
        spare = spare_weights.make_spare(model)
        with torch.no_grad():
            for parameter in spare.parameters():
                parameter.fill_(math.nan if parameter.is_floating_point() else -1)
        read: dict[str, int] = {}
        try:
            for _ in spare_weights.write_version(spare, self._of_folder(), read=read):
                pass
            name = first_difference(model, spare)
        except Exception as error:  # a loader raises any type of exception if it needs more than a version has
            raise EngineStartError(f"vLLM takes no new version of {self._folder}: {first_line(error)}") from error
        if name is not None:
            raise EngineStartError(self._unwritten(name, spare.get_parameter(name)))
        self._spare = spare
        return read

    def _unwritten(self, name: str, parameter: Tensor) -> str:
        what = f"vLLM takes no new version of {self._folder}: {name}"
        if parameter.is_floating_point() and parameter.isnan().any():
            return f"{what} is not written, or not all of it: do its files lack a tensor that its config.json asks for?"
        return f"{what} is not what was written"

    def stage(self, version: dict[str, Tensor]) -> Iterator[None]:
        """Prepare a checked version while the old version computes, in pieces (`write_version`), on any thread.

        Prepares one version at a time: start the next only when the pieces of this one are no longer used. Raises
        SwapRefused.
        """
        try:
            self.prove_spare()
            if self._spare is not None:
                yield from spare_weights.write_version(self._spare, version)
        except Exception as error:  # after any error of a loader or kernel the old version continues to serve
            raise SwapRefused(f"it could not be prepared: {error}") from error

    def activate(self, version: dict[str, Tensor]) -> None:
        """Serve the version that was staged last. On a GPU its tensors are kept, to undo a later swap.

        Raises SwapRefused if the old version continues to serve, EngineBroken if no version does.
        """
        if current_platform.is_cpu():
            assert self._spare is not None
            spare_weights.exchange_parameters(self._worker.get_model(), self._spare)
            return
        try:
            self._reload(version)
        except Exception as error:  # after any error of a loader or kernel, a partial version must not serve
            self._undo(error)
            raise SwapRefused(f"it could not be applied: {error}") from error
        self._serving = version

    def _undo(self, error: Exception) -> None:
        try:
            self._reload(self._serving if self._serving is not None else self._of_folder())
        except Exception as again:  # no complete version is left to serve
            raise EngineBroken(f"a swap failed ({error}) and could not be undone ({again})") from again

    def _of_folder(self) -> dict[str, Tensor]:
        return dict(held_tensors(self._folder, self._held, self._shapes))

    def _reload(self, version: Mapping[str, Tensor]) -> None:
        self._worker.reload_weights(weights_iterator=iter(sorted({**self._constants, **version}.items())))
