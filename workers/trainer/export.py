"""Exports a policy as a model folder: the final policy of a run, or the policy of its newest checkpoint."""

import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from rose.schemas.errors import UsageError
from rose.workers.trainer.checkpoint import CheckpointRefused, Checkpoints, Progress, check_folder
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.policy import load_policy
from rose.workers.weights.folder_names import FolderTensors
from rose.workers.weights.model_folder import INDEX

WEIGHT_PATTERNS = (
    *("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf"),
    *("*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data"),
)
"""Weight files of the initial model folder, which are not copied to the exported folder."""

HIDDEN_PATTERN = ".*"

TRIES = 8
"""How often the newest checkpoint of a run is looked for while its trainer writes others."""


def export_newest(config: TrainerConfig, target: Path) -> int:
    """Export the policy of the run's newest checkpoint to a new folder; returns its version.

    The run may go on meanwhile. Raises UsageError if `target` exists, lies in the model folder or has no parent folder,
    and for a broken model folder; CheckpointRefused if there is no whole checkpoint or if the run began with another
    model folder; OSError.
    """
    target, source = target.absolute(), config.model_folder.resolve()
    if os.path.lexists(target):
        raise UsageError(f"{target} is there already: name a folder that is not there yet")
    if target.resolve().is_relative_to(source):
        raise UsageError(f"{target} lies in the model folder {source}: name a folder elsewhere")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent} is no folder: make it, or name another place for the policy")
    checkpoints = Checkpoints(config.checkpoints, None)
    model = load_policy(config.model_folder)
    tensors = FolderTensors(model, config.model_folder)
    tensors.check_values()
    progress = _restore_newest(checkpoints, model)
    check_folder(progress, tensors.folder_digest, config.model_folder)
    with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as partial:
        export_policy(tensors, Path(partial) / target.name)
        (Path(partial) / target.name).rename(target)
    return progress.version


def export_checkpoint(config: TrainerConfig, checkpoints: Checkpoints, progress: Progress, target: Path) -> None:
    """Export the policy of a checkpoint to `target`, which is replaced. Raises CheckpointRefused, OSError.

    For a trainer whose policy is sharded, or trains on: this process loads the whole policy once more.
    """
    model = load_policy(config.model_folder)
    tensors = FolderTensors(model, config.model_folder)
    checkpoints.restore_weights(progress, model)
    export_policy(tensors, target)


def _restore_newest(checkpoints: Checkpoints, model: Any) -> Progress:
    """Load the weights of the newest checkpoint. A trainer that runs may delete it before it is read."""
    for _ in range(TRIES):
        progress = next(checkpoints.newest_first(), None)
        if progress is None:
            break
        with suppress(FileNotFoundError):
            checkpoints.restore_weights(progress, model)
            return progress
    raise CheckpointRefused(f"{checkpoints.folder} has no whole checkpoint: the trainer has not saved a policy yet")


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
