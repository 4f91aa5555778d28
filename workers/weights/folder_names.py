"""The tensors of a model under the names that the files of its folder use.

Keeps true
- Names are those of the folder. transformers renames some tensors on loading, joins those of experts, adds or drops the
  base model's name, and ignores what it computes itself.
- Every tensor of the folder that travels (`FolderTensor.travels`) does so once: trained weights from the model, tied
  weights under each of their names, and tensors without a parameter in the model as the folder has them.
- A folder or a model for which this is impossible is refused in the constructor, not when a version is published.
- A version lacks no tensor: if the model has lost one since, as an adapter that is put on takes them, iteration raises.
- No second copy of the model is held: converted tensors are converted back layer by layer, during iteration.
"""

import json
import re
from collections.abc import Container, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rose.workers.weights.model_folder import FolderError, folder_tensors, held_tensors, read_config

COMPUTED = r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$"
"""Pattern of tensor names that old versions of transformers wrote and that no version reads; the values follow from
the configuration."""

WRAPPERS = r"\b(_orig_mod|base_layer|original_module)\."
"""Pattern of what torch.compile and adapters put into the names of the weights that they wrap."""

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types in which bits are compared, by element size, so that a NaN equals itself."""


class FolderTensors:
    """The tensors of a version by their names in the model folder. Iterate again for each version."""

    def __init__(self, model: Any, folder: Path) -> None:
        """`model`: a `transformers.PreTrainedModel` loaded from the folder, or a wrapper of one (torch.compile, DDP).

        Raises FolderError.
        """
        self.folder = folder
        self._model = _unwrapped(model)
        self._kind = type(self._model).__name__
        self._held = folder_tensors(folder)
        self._names = self._checked_names()
        constants = held_tensors(folder, self._held, self._without_parameter())
        self._constants = {
            name: tensor.float() if tensor.dtype == torch.float64 else tensor.clone() for name, tensor in constants
        }
        refuse_untied(self._model, folder)
        self._refuse_untrained()
        self.folder_digest = b""
        """Digest of the folder's weights and configuration; empty before `check_values`."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        gone = set(self._names)
        for layer in self._layers():
            gone -= layer.keys()
            for name, tensor in layer.items():
                if tuple(tensor.shape) != (shape := self._held[name].shape):
                    raise FolderError(f"{name} has shape {tuple(tensor.shape)} now, and {shape} in {self.folder}")
                yield name, tensor
        if gone:
            raise FolderError(
                f"{min(gone)} is not in the {self._kind} any more: was an adapter put on the model? Merge it before "
                "publishing"
            )
        yield from self._constants.items()

    @property
    def files(self) -> Mapping[str, str]:
        """The file of each tensor, by tensor name."""
        return {name: tensor.file for name, tensor in self._held.items()}

    def all_of(self, file: str) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of a file of the folder.

        Tensors that travel have their current values, the others have the folder's values.
        """
        names = {name for name, tensor in self._held.items() if tensor.file == file}
        yield from ((name, tensor) for name, tensor in self if name in names)
        yield from held_tensors(self.folder, self._held, (name for name in names if not self._held[name].travels))

    def check_values(self) -> None:
        """Check that a model that was just loaded would be published bit for bit as the folder holds it.

        Computes `folder_digest`. Raises FolderError if the model would be published otherwise.
        """
        digests = {name: _digest(tensor) for name, tensor in self._constants.items()}
        for layer in self._layers():
            for name, held in held_tensors(self.folder, self._held, layer):
                if not _same_bits(layer[name], held):
                    what = f"what transformers loads from {name} into {self._kind} cannot be put back"
                    raise FolderError(f"{self.folder}: {what}, so no version of it can be published")
                digests[name] = _digest(held)
        from rose.workers.weights.layout import digest_of  # needs blake3, which checks of a GPU do without

        contents = read_config(self.folder), sorted(digests.items())
        self.folder_digest = digest_of(json.dumps(contents, sort_keys=True).encode())

    def _checked_names(self) -> set[str]:
        """Names of the tensors that the model provides. Raises FolderError if one is ambiguous or has another shape."""
        found: set[str] = set()
        try:
            for name, tensor in (named for layer in self._layers() for named in layer.items()):
                if name in found:
                    raise FolderError(f"{self.folder}: {self._kind} has two tensors for {name}")
                if tuple(tensor.shape) != (shape := self._held[name].shape):
                    raise FolderError(f"{self.folder}: {name} has shape {shape}, the model's {tuple(tensor.shape)}")
                found.add(name)
        except FolderError:
            raise
        except Exception as error:  # undoing a conversion may raise any exception
            what = f"what transformers made of the files for {self._kind} cannot be undone"
            raise FolderError(f"{self.folder}: {what}: {error}") from error
        return found

    def _without_parameter(self) -> list[str]:
        """Names of the folder's tensors that the model does not have. Raises FolderError if one is a weight."""
        patterns = (COMPUTED, *(getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ()))
        buffers = {self._own_name(name) for name, _ in self._model.named_buffers()}
        wrapped = {self._own_name(re.sub(WRAPPERS, "", name)) for name in self._model.state_dict()}
        missing = [name for name, tensor in self._held.items() if tensor.travels and name not in self._names]
        for name in missing:
            if name in wrapped:
                raise FolderError(
                    f"{name} is inside an adapter or a wrapper of the {self._kind}: merge the adapter, or unwrap the "
                    "module, before publishing"
                )
            if name not in buffers and not any(re.search(pattern, name) for pattern in patterns):
                what = f"{self.folder} holds {name}, for which transformers' {self._kind} has no place"
                raise FolderError(f"{what}: it cannot be trained, so take it out of the folder's files")
        return missing

    def _refuse_untrained(self) -> None:
        """Refuse a model of which something is trained, and nothing that travels. Raises FolderError."""
        parameters = self._model.named_parameters(remove_duplicate=False)
        trained = {name for name, parameter in parameters if parameter.requires_grad}
        if trained and not any(self._layers(trained)):
            raise FolderError(
                f"{self.folder} has none of the parameters of the {self._kind} that are trained, such as "
                f"{min(trained)}: every version would be the same; merge the adapter before publishing, or train "
                "weights of the folder"
            )

    def _layers(self, names: Container[str] | None = None) -> Iterator[dict[str, Tensor]]:
        """The model's tensors under the folder's names, layer by layer. `names`: tensors of the model; None: all."""
        tensors = (
            (name, tensor) for name, tensor in self._model.state_dict().items() if names is None or name in names
        )
        for _, layer in groupby(tensors, key=lambda named: layer_of(named[0])):
            yield self._put_back(dict(layer))

    def _put_back(self, layer: dict[str, Tensor]) -> dict[str, Tensor]:
        as_loaded = self._in_folder(layer)
        if getattr(self._model, "_weight_conversions", None) == []:  # no tensor was renamed or joined
            return as_loaded
        from transformers.core_model_loading import revert_weight_conversion

        put_back = self._in_folder(revert_weight_conversion(self._model, layer))
        return put_back if len(put_back) >= len(as_loaded) else as_loaded

    def _in_folder(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        named = ((self._own_name(name), tensor) for name, tensor in tensors.items())
        return {name: tensor for name, tensor in named if name is not None and self._held[name].travels}

    def _own_name(self, name: str) -> str | None:
        """Return the folder's name of a model tensor, with or without the base model's name.

        None if the folder does not have the tensor.
        """
        base = f"{self._model.base_model_prefix}."
        return next((one for one in (name, name.removeprefix(base), base + name) if one in self._held), None)


def refuse_untied(model: Any, folder: Path) -> None:
    """Refuse tensors that differ although config.json ties them, such as head and embedding. Raises FolderError.

    If the head differs from the embedding, transformers and vLLM 0.32 compute with the head. Programs that follow
    config.json compute with the embedding, so the folder with these tensors would be two policies.
    """
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    for name, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if own.get(name) is not own.get(other):
            raise FolderError(
                f"{folder}: config.json says that {name} is {other}, but they differ: train them as one, or set "
                "tie_word_embeddings to false in a folder that holds both"
            )


def _unwrapped(model: Any) -> Any:
    """The model inside torch.compile, DDP and their like. Raises FolderError if it is no model of transformers."""
    from transformers import PreTrainedModel

    while not isinstance(model, PreTrainedModel):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if inner is None:
            raise FolderError(
                f"{type(model).__name__} is no transformers.PreTrainedModel: give the model itself (with an adapter: "
                "the merged model)"
            )
        model = inner
    return model


def layer_of(name: str) -> str:
    """The layer of a tensor: `model.layers.3` of `model.layers.3.mlp.up_proj.weight`.

    A name without a layer number is its own layer.
    """
    parts = name.split(".")
    ends = next((place + 1 for place, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[:ends])


def _digest(tensor: Tensor) -> str:
    from rose.workers.weights.layout import digest_of

    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{tensor.dtype} {tuple(tensor.shape)} {digest_of(data).hex()}"


def _same_bits(loaded: Tensor, current: Tensor) -> bool:
    loaded = loaded.detach().cpu()
    bits = BITS[loaded.element_size()]
    return torch.equal(loaded.contiguous().view(bits), current.to(loaded.dtype).contiguous().view(bits))
