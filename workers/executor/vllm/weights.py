"""The engine's weights, which are replaced between two steps.

Keeps true
- A version is activated completely or not at all: names, shapes, element types, completeness and finite values are
  checked before the first write, and a failed activation is undone.
- The engine computes with the weights that were written. Before the first version, the folder's weights are written in
  the way of later versions, and compared with what vLLM has loaded.
- A version is staged while the old version computes, except by `Reload`.

There are three ways to serve a version; the loaded model decides.

- Layers with packed weights, as on a CPU: `SpareWeights`. vLLM computes with packed copies of linear weights and
  discards the plain weights; here the plain weights are kept, written by the model's own loader, and packed again. The
  cost is that a CPU holds all weights twice, each with packed copies.
- Plain linear layers and embeddings, as on a GPU: `InPlaceWeights`.
- Any other layer, as experts, latent attention and quantized layers on a GPU: `Reload`.

vLLM's `reload_weights` is not used on a CPU: with tied embeddings it does not update the head's packed copy (logprobs
off by 10), and it takes twice as long (18 ms against 7.5 ms, 0.4M parameters). Plain weights alone are not used there
either, because steps of a model with 25M parameters take up to 1.4 times as long.
"""

import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from rose.workers.executor.ipc.engine_client import StagedTensors
from rose.workers.executor.ipc.weight_mappings import WeightMappings
from rose.workers.executor.vllm.in_place_weights import MEMORY_PART, InPlaceWeights
from rose.workers.executor.vllm.spare_weights import SpareWeights, first_not_finite, has_packed_weights, tensors_equal
from rose.workers.executor.vllm.types import EngineBroken, EngineStartError, SwapRefused, first_line
from rose.workers.weights.folder_names import COMPUTED
from rose.workers.weights.model_folder import folder_tensors, held_tensors

WRITABLE_METHODS = UnquantizedLinearMethod, UnquantizedEmbeddingMethod
"""Methods of layers that compute with the loaded weights, or packed copies of them, and nothing else."""


def transforming_layer(model: torch.nn.Module) -> str:
    """Return the first layer whose weights vLLM may transform after it has loaded them, with its kind; or nothing.

    vLLM rearranges the weights of experts under the same names and shapes, and computes latent attention from products
    of its weights. A new version would be written where it is not read, or would be misread.
    """
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(layer, MLAAttention) or (
            isinstance(method, QuantizeMethodBase) and type(method) not in WRITABLE_METHODS
        ):
            return f"{name} ({type(layer if method is None else method).__name__})"
    return ""


class WeightWriter(Protocol):
    """A way to serve versions of one loaded model."""

    def prove(self, served: Mapping[str, Tensor], read: dict[str, int]) -> str:
        """Prove that a version is written where the model reads it. Return what is wrong, empty if nothing is.

        `served`: the tensors that the model serves. `read`: receives how many elements of each the loader reads here.
        """

    def stage(self, version: Mapping[str, Tensor]) -> Iterator[None]:
        """Prepare a version while the version before computes, in pieces. An earlier staged version is discarded."""

    def activate(self) -> None:
        """Serve the staged version. After an exception the caller calls `undo`."""

    def undo(self, before: Callable[[], Mapping[str, Tensor]]) -> None:
        """Serve the version before again, bit for bit, after `activate` or a part of it. `before`: its tensors."""


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
    if name := (yield from first_not_finite(version)):
        raise SwapRefused(f"{name} holds a value that is not finite")
    return version


def _check_head(head: Tensor, embedding: Tensor) -> Iterator[None]:
    if head.shape == embedding.shape and head.dtype == embedding.dtype and head.device == embedding.device:
        for same in tensors_equal(head, embedding):
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


class Reload:
    """Serves versions by vLLM's `reload_weights`, between two steps. See `WeightWriter`."""

    def __init__(self, worker: Any, constants: Mapping[str, Tensor]) -> None:
        """`worker`: vLLM's worker. `constants`: tensors of the folder that belong to no version."""
        self._worker = worker
        self._constants = constants
        self._version: Mapping[str, Tensor] = {}

    def prove(self, served: Mapping[str, Tensor], read: dict[str, int]) -> str:
        """Load the served version again, and compare the parameters with copies of them in host memory.

        Experts on a CPU, for example, are other experts after a reload. `read` receives nothing.
        """
        model = self._worker.get_model()
        held = {name: parameter.data.to("cpu", copy=True) for name, parameter in model.named_parameters()}
        self._load(served)
        changed = (name for name, parameter in model.named_parameters() if not _same(held.get(name), parameter.data))
        name = next(changed, "")
        return name and f"{name} is another after vLLM has loaded the same weights again"

    def stage(self, version: Mapping[str, Tensor]) -> Iterator[None]:
        """Prepare nothing."""
        self._version = version
        yield

    def activate(self) -> None:
        """Load the version."""
        self._load(self._version)

    def undo(self, before: Callable[[], Mapping[str, Tensor]]) -> None:
        """Load the version before."""
        self._load(before())

    def _load(self, version: Mapping[str, Tensor]) -> None:
        self._worker.reload_weights(weights_iterator=iter(sorted({**self._constants, **version}.items())))


def _same(one: Tensor | None, other: Tensor) -> bool:
    """Return whether two tensors have the same shape and bits."""
    if one is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.cpu().contiguous().flatten().view(torch.uint8) for tensor in (one, other)))


class PolicyWeights:
    """The weights of one model runner, which may hold one rank's shard of a model."""

    def __init__(
        self, worker: Any, folder: Path, shapes: Mapping[str, tuple[int, ...]], *, registers: bool = True
    ) -> None:
        """`worker`: vLLM's worker. `shapes`: shapes of the folder's tensors.

        `registers`: whether weight buffers are registered with CUDA (`weight_mappings`).
        """
        self._worker = worker
        self._folder = folder
        self._shapes = shapes
        self._held = folder_tensors(folder)
        self._dtype: torch.dtype = worker.model_config.dtype
        self._buffers = WeightMappings(registers=registers)
        self._writer: WeightWriter | None = None
        self._serving: dict[str, Tensor] | None = None
        """The version that serves, while the writer may need it again; None for the folder's weights."""
        self._before: dict[str, Tensor] | None = None
        """The version before `_serving`, for `restore`."""
        self._activated = False
        """Whether the version that was staged last serves."""

    def check(self, tensors: Iterable[tuple[str, Tensor]]) -> Generator[None, None, dict[str, Tensor]]:
        """Check a version: see `check_version`."""
        mapped = self._buffers.tensors(tensors) if isinstance(tensors, StagedTensors) else tensors
        return check_version(mapped, self._shapes, self._dtype)

    def mapped(self, staged: StagedTensors) -> dict[str, Tensor]:
        """Return the tensors of a version in a weight buffer of the engine."""
        return dict(self._buffers.tensors(staged))

    def allocate_spare(self) -> None:
        """Allocate the memory of staging, which `stage` otherwise allocates at its first call.

        Raises EngineStartError.
        """
        try:
            read = self.prove_writer()
        except EngineBroken as broken:
            raise EngineStartError(str(broken)) from broken
        if read:
            require_all_read(self._folder, self._shapes, read)

    def prove_writer(self) -> dict[str, int]:
        """Choose the way to serve versions, and return how many elements of each tensor the loader reads here.

        Proves first that a written version is what the model computes with (`WeightWriter.prove`). Returns nothing if
        the way is chosen already, or for a `Reload`. Raises EngineStartError; EngineBroken if a reload failed, which
        may have changed the weights.
        """
        if self._writer is not None:
            return {}
        read: dict[str, int] = {}
        writer = self._make_writer()
        failure = EngineBroken if isinstance(writer, Reload) else EngineStartError
        try:
            wrong = writer.prove(self._of_folder(), read)
        except Exception as error:  # a loader raises any type of exception if it needs more than a version has
            raise failure(f"vLLM takes no new version of {self._folder}: {first_line(error)}") from error
        if wrong:
            raise failure(f"vLLM takes no new version of {self._folder}: {wrong}")
        self._writer = writer
        return read

    def _make_writer(self) -> WeightWriter:
        model = self._worker.get_model()
        layer = transforming_layer(model)
        if has_packed_weights(model):
            if layer:
                raise EngineStartError(
                    f"on a CPU a new policy version cannot be written into {layer}: take a policy without experts and "
                    "latent attention, or a GPU"
                )
            return SpareWeights(model)
        if layer:
            constants = (name for name, tensor in self._held.items() if not tensor.travels)
            return Reload(self._worker, dict(held_tensors(self._folder, self._held, constants)))
        try:
            return InPlaceWeights(model)
        except torch.OutOfMemoryError as error:
            raise EngineStartError(
                f"no memory is left to stage versions of {self._folder} (1/{MEMORY_PART} of its weights): set a "
                "lower gpu_memory_utilization in executor.vllm, or of the server that lends"
            ) from error

    def stage(self, version: dict[str, Tensor]) -> Iterator[None]:
        """Prepare a checked version while the old version computes, in pieces, on any thread.

        Prepares one version at a time: start the next only when the pieces of this one are no longer used. The tensors
        are read until another version is activated. Raises SwapRefused, or EngineBroken as `prove_writer`.
        """
        self._before, self._activated = None, False
        try:
            self.prove_writer()
            assert self._writer is not None
            yield from self._writer.stage(version)
        except EngineBroken:
            raise
        except Exception as error:  # after any error of a loader or kernel the old version continues to serve
            raise SwapRefused(f"it could not be prepared: {error}") from error

    def activate(self, version: dict[str, Tensor]) -> None:
        """Serve the version that was staged last.

        Raises SwapRefused if the old version continues to serve, EngineBroken if no version does.
        """
        assert self._writer is not None
        try:
            self._writer.activate()
        except Exception as error:  # after any error of a loader or kernel, a partial version must not serve
            self._undo(error)
            raise SwapRefused(f"it could not be applied: {error}") from error
        if not isinstance(self._writer, SpareWeights):  # spare weights hold the version before
            self._before, self._serving = self._serving, version
        self._activated = True

    def restore(self) -> None:
        """Serve the version before again, if the version that was staged last serves. Raises EngineBroken."""
        if self._activated:
            self._serving, self._activated = self._before, False
            self._undo(SwapRefused("another rank has refused the version"))

    def _undo(self, error: Exception) -> None:
        """Serve `_serving` again."""
        assert self._writer is not None
        try:
            self._writer.undo(lambda: self._of_folder() if self._serving is None else self._serving)
        except Exception as again:  # no complete version is left to serve
            raise EngineBroken(f"a swap failed ({error}) and could not be undone ({again})") from again

    def _of_folder(self) -> dict[str, Tensor]:
        return dict(held_tensors(self._folder, self._held, self._shapes))
