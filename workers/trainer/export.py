"""Exports a policy as a model folder: the final policy of a run, or the policy of its newest checkpoint."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from rose.workers.trainer.checkpoint import CheckpointRefused, Checkpoints
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.optimizer import make_optimizer
from rose.workers.trainer.policy import load_policy
from rose.workers.weights.folder_names import FolderTensors
from rose.workers.weights.model_folder import INDEX

WEIGHT_PATTERNS = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf"),
    *("*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data"),
)
"""Weight files of the initial model folder, which are not copied to the exported folder."""

HIDDEN_PATTERN = ".*"


def export_newest(config: TrainerConfig, target: Path) -> int:
    """Export the policy of the run's newest checkpoint; returns its version. Replaces `target`.

    Raises CheckpointRefused if there is no whole checkpoint, UsageError for a broken model folder, or OSError.
    """
    checkpoints = Checkpoints(config.checkpoints, None)
    progress = next(checkpoints.newest_first(), None)
    if progress is None:
        raise CheckpointRefused(f"{checkpoints.folder} has no whole checkpoint: the trainer has not saved a policy yet")
    model = load_policy(config.model_folder)
    checkpoints.restore(progress, model, make_optimizer(model, learning_rate=config.learning_rate))
    export_policy(FolderTensors(model, config.model_folder), target)
    return progress.version


def export_policy(tensors: FolderTensors, target: Path) -> None:
    """Write the weights and copy all other files of the policy's folder; replaces `target`. Raises OSError."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    _copy_other_files(tensors.folder.resolve(), partial.resolve())
    _write(tensors, partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def _write(tensors: FolderTensors, target: Path) -> None:
    from safetensors.torch import save_file

    total = 0
    for file in sorted(set(tensors.files.values())):
        apart = _without_shared_memory(tensors.all_of(file))
        total += sum(tensor.nbytes for tensor in apart.values())
        save_file(apart, target / file, metadata={"format": "pt"})
    if (tensors.folder / INDEX).is_file():
        index = {"metadata": {"total_size": total}, "weight_map": dict(tensors.files)}
        (target / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _without_shared_memory(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors, copied where two share memory, as safetensors requires."""
    apart: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in named:
        memory = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if memory in taken else tensor.contiguous()
        taken.add(memory)
    return apart


def _copy_other_files(folder: Path, target: Path) -> None:
    """Copy a folder without weights and hidden files.

    Copies get default modes, since the model folder may be read-only.
    """
    target.mkdir()
    left_out = shutil.ignore_patterns(*WEIGHT_PATTERNS, HIDDEN_PATTERN)
    names = [path.name for path in folder.iterdir()]
    for name in set(names) - left_out(str(folder), names):
        if target.is_relative_to(folder / name):  # the run's folder lies inside the model folder
            continue
        if (folder / name).is_dir():
            if not (folder / name).is_symlink():
                _copy_other_files(folder / name, target / name)
        elif (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
