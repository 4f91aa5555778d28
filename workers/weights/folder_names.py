"""A model's tensors under the names that the files of its folder have for them.

Keeps true
- Names are those of the folder, whatever transformers calls them: it renames some when it loads them, joins those of
  experts, adds or drops the name of the base model, and passes over what it computes itself.
- What is in the folder travels, each once: trained weights from the model, tied ones under each of their names, and
  what the model has no parameter for as the folder holds it.
- A folder for which that does not go is refused when this is made, not when a version is published.
- No second model is held: what transformers has in another form is put back layer by layer, while it is read.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rose.workers.weights.model_folder import FolderError, folder_tensors, held_tensors

COMPUTED = (r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$", r"\bmasked_bias$")
"""Names of what old versions of transformers wrote and nobody reads: it follows from the configuration."""

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the size of a value the element type in which its bits are compared: one in which a NaN equals itself."""


class FolderTensors:
    """The tensors of a version, by name in the model's folder: iterate over it, anew for each version."""

    def __init__(self, model: Any, folder: Path) -> None:
        """`model`: a `transformers.PreTrainedModel` of the folder. Raises FolderError."""
        self.folder = folder
        self._model = model
        self._kind = type(model).__name__
        self._held = folder_tensors(folder)
        constants = held_tensors(folder, self._held, self._without_parameter(self._checked_names()))
        self._constants = {
            name: tensor.float() if tensor.dtype == torch.float64 else tensor.clone() for name, tensor in constants
        }

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for layer in self._layers():
            yield from layer.items()
        yield from self._constants.items()

    @property
    def files(self) -> Mapping[str, str]:
        """The file of each of the folder's tensors."""
        return {name: tensor.file for name, tensor in self._held.items()}

    def all_of(self, file: str) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of a file of the folder: what travels as it is now, all else as it is held."""
        names = {name for name, tensor in self._held.items() if tensor.file == file}
        yield from ((name, tensor) for name, tensor in self if name in names)
        yield from held_tensors(self.folder, self._held, (name for name in names if not self._held[name].travels))

    def check_values(self) -> None:
        """That a model which was loaded just now is published as the folder holds it. Raises FolderError."""
        for layer in self._layers():
            for name, held in held_tensors(self.folder, self._held, layer):
                if not _same_bits(layer[name], held):
                    what = f"what transformers loads from {name} into {self._kind} cannot be put back"
                    raise FolderError(f"{self.folder}: {what}, so no version of it can be published")

    def _checked_names(self) -> set[str]:
        """What comes from the model."""
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
        except Exception as error:  # what undoes a conversion raises what it likes
            what = f"what transformers made of the files for {self._kind} cannot be undone"
            raise FolderError(f"{self.folder}: {what}: {error}") from error
        return found

    def _without_parameter(self, found: set[str]) -> list[str]:
        """Tensors of the folder that the model has in no form. Weights among them are refused."""
        patterns = (*COMPUTED, *(getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ()))
        buffers = {self._own_name(name) for name, _ in self._model.named_buffers()}
        missing = [name for name, tensor in self._held.items() if tensor.travels and name not in found]
        for name in missing:
            if name not in buffers and not any(re.search(pattern, name) for pattern in patterns):
                what = f"{self.folder} holds {name}, for which transformers' {self._kind} has no place"
                raise FolderError(f"{what}: it cannot be trained, so take it out of the folder's files")
        return missing

    def _layers(self) -> Iterator[dict[str, Tensor]]:
        """What the model has of the folder's tensors, layer by layer."""
        for _, layer in groupby(self._model.state_dict().items(), key=lambda named: layer_of(named[0])):
            yield self._put_back(dict(layer))

    def _put_back(self, layer: dict[str, Tensor]) -> dict[str, Tensor]:
        as_loaded = self._in_folder(layer)
        if getattr(self._model, "_weight_conversions", None) == []:  # nothing was renamed or joined
            return as_loaded
        from transformers.core_model_loading import revert_weight_conversion

        put_back = self._in_folder(revert_weight_conversion(self._model, layer))
        return put_back if len(put_back) >= len(as_loaded) else as_loaded

    def _in_folder(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        named = ((self._own_name(name), tensor) for name, tensor in tensors.items())
        return {name: tensor for name, tensor in named if name is not None and self._held[name].travels}

    def _own_name(self, name: str) -> str | None:
        """As the folder has it: also with the base model's name before it, or without."""
        base = f"{self._model.base_model_prefix}."
        return next((one for one in (name, name.removeprefix(base), base + name) if one in self._held), None)


def layer_of(name: str) -> str:
    """Of `model.layers.3.mlp.up_proj.weight`: `model.layers.3`. What is in no layer is one of its own."""
    parts = name.split(".")
    ends = next((place + 1 for place, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[:ends])


def _same_bits(loaded: Tensor, current: Tensor) -> bool:
    loaded = loaded.detach().cpu()
    bits = BITS[loaded.element_size()]
    return torch.equal(loaded.contiguous().view(bits), current.to(loaded.dtype).contiguous().view(bits))
