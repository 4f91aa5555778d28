"""The final policy as a Hugging Face folder.

Keeps true
- The folder is whole or not there, and it has every file of the folder which the run began with.
- What training does not change is copied as it is. Weights are in files and under names as they were there.
- What is no part of a model fails no export and leads to no other place: a directory that is a link, a link to nothing,
  a pipe or a device are left out, as is what is hidden, such as the history and the caches of a download.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from workers.weights.folder_names import FolderTensors
from workers.weights.model_folder import INDEX

WEIGHTS = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf"),
    *("*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data"),
)
"""Files of the model that the run began with which are not taken over."""

HIDDEN = ".*"


def export_policy(tensors: FolderTensors, target: Path) -> None:
    """Write the weights, and beside them all other files of the policy's folder; replaces `target`. Raises OSError."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    _copy(tensors.folder.resolve(), partial.resolve())
    _write(tensors, partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def _write(tensors: FolderTensors, target: Path) -> None:
    from safetensors.torch import save_file

    total = 0
    for file in sorted(set(tensors.files.values())):
        apart = _apart(tensors.all_of(file))
        total += sum(tensor.nbytes for tensor in apart.values())
        save_file(apart, target / file, metadata={"format": "pt"})
    if (tensors.folder / INDEX).is_file():
        index = {"metadata": {"total_size": total}, "weight_map": dict(tensors.files)}
        (target / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _apart(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of which no two share memory, as safetensors wants them."""
    apart: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in named:
        memory = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if memory in taken else tensor.contiguous()
        taken.add(memory)
    return apart


def _copy(folder: Path, target: Path) -> None:
    """With the modes of files that are new: a model may be kept where nobody may write."""
    target.mkdir()
    left_out = shutil.ignore_patterns(*WEIGHTS, HIDDEN)
    names = [path.name for path in folder.iterdir()]
    for name in set(names) - left_out(str(folder), names):
        if target.is_relative_to(folder / name):  # the run's own folder lies in that of its model
            continue
        if (folder / name).is_dir():
            if not (folder / name).is_symlink():
                _copy(folder / name, target / name)
        elif (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
