"""Chat templates of common policies, as TRL ships them, and folders with them."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.tokenizer_fixtures import SPECIAL, byte_level, folder, special_tokens

MARKS = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")


def shipped(name: str) -> str:
    """Return a template that TRL ships; the test is skipped without TRL."""
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl, which ships the templates, is not installed")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def reasoning_tokenizer() -> Tokenizer:
    """Return a tokenizer with the marks of Qwen3 and of the R1 distillations."""
    words = special_tokens("<think>", "</think>", "<tool_call>", "</tool_call>", special=False)
    return byte_level(special_tokens(*SPECIAL, *MARKS) + words)


def model(path: Path, tokenizer: Tokenizer, template: str, **files: str) -> Path:
    """Write a model folder with a template and further files, whose names have two underscores for the dot."""
    made = folder(path, tokenizer, template)
    for name, text in files.items():
        (made / name.replace("__", ".")).write_text(text)
    return made
