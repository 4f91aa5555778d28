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
    shutil.copytree(model_folder, partial, ignore=shutil.ignore_patterns(*WEIGHTS))
    model.save_pretrained(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
