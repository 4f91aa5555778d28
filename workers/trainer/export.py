"""The final policy as a Hugging Face folder.

Keeps true: the folder is whole or not there, and it has everything that the folder which the run began with has.
"""

import shutil
from pathlib import Path
from typing import Any

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf")
"""Files of the model that the run began with which are not taken over."""


def export_policy(model: Any, model_folder: Path, target: Path) -> None:
    """Write the model, and beside it tokenizer and turn format of `model_folder`; replaces `target`. Raises OSError."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    _copy(model_folder, partial)
    model.save_pretrained(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def _copy(folder: Path, target: Path) -> None:
    """With the modes of files that are new: a model may be kept where nobody may write."""
    target.mkdir()
    left_out = shutil.ignore_patterns(*WEIGHTS)
    names = [path.name for path in folder.iterdir()]
    for name in set(names) - left_out(str(folder), names):
        if (folder / name).is_dir():
            _copy(folder / name, target / name)
        else:
            shutil.copyfile(folder / name, target / name)
