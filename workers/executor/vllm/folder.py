"""Check of a model folder before an engine is built from it.

Keeps true: a fault for which vLLM would raise a traceback (no config, a truncated file, another vocabulary) is reported
in one sentence.
"""

from collections.abc import Mapping
from pathlib import Path

from rose.workers.executor.vllm.types import ModelFolderError
from rose.workers.model_config import check_agreement
from rose.workers.tokenizer import TokenizerError, check_tokenizer
from rose.workers.weights.model_folder import FolderError, folder_shapes, read_config

VOCABULARY_TENSORS = tuple(
    f"{name}.weight" for name in ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings")
)
"""Name endings of the tensors with one row per token id."""


def check_folder(folder: Path) -> tuple[dict[str, tuple[int, ...]], int]:
    """Do the same as `read_folder`, and check that the tokenizer fits the model.

    The load of a tokenizer holds Python's global interpreter lock, for half a second if the tokenizer is large.
    """
    shapes, vocabulary = read_folder(folder)
    try:
        check_tokenizer(folder, vocabulary)
    except TokenizerError as error:
        raise ModelFolderError(str(error)) from None
    return shapes, vocabulary


def read_folder(folder: Path) -> tuple[dict[str, tuple[int, ...]], int]:
    """Return the shapes of the folder's tensors by name, and the vocabulary size.

    Raises ModelFolderError or ConfigRefused.
    """
    try:
        config, shapes = read_config(folder), folder_shapes(folder)
    except FolderError as error:
        raise ModelFolderError(str(error)) from None
    check_agreement(folder, config)
    vocabulary: int = config["vocab_size"]
    _check_vocabulary(folder, shapes, vocabulary)
    return shapes, vocabulary


def _check_vocabulary(folder: Path, shapes: Mapping[str, tuple[int, ...]], vocabulary: int) -> None:
    for name, shape in shapes.items():
        if name.endswith(VOCABULARY_TENSORS) and shape[:1] != (vocabulary,):
            what = f"{name} has shape {shape}, config.json says a vocabulary of {vocabulary}"
            raise ModelFolderError(f"{folder}: {what}: the weights belong to another config or tokenizer")
