"""A model folder's tokenizer: the one way in which ROSE loads a `tokenizer.json`.

Keeps true
- A text is always the same tokens, all of them and no others. A `tokenizer.json` also remembers how it was used last:
  truncation, padding, a post-processor that puts tokens around a text, dropout of a BPE model. None of it is loaded.
- Normalizer and pre-tokenizer belong to what the policy was trained with: they are loaded as they are.

Needs `tokenizers` alone.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from schemas.errors import UsageError

TOKENIZER_FILE = "tokenizer.json"
"""In a model folder."""

LOADED = ("version", "added_tokens", "normalizer", "pre_tokenizer", "decoder", "model")
"""Fields of the file that say what a text is; the others say how it was used."""

NULL = msgspec.Raw(b"null")

Fields = dict[str, msgspec.Raw]


class TokenizerError(UsageError):
    """A `tokenizer.json` that cannot be read."""


def load_tokenizer(file: Path, *, special: Collection[str] = ()) -> Any:
    """The `tokenizers.Tokenizer` of a file. Raises TokenizerError.

    `special`: added tokens that are to count as special whatever the file says of them.
    """
    from tokenizers import Tokenizer

    try:
        said = msgspec.json.decode(file.read_bytes(), type=Fields)
        loaded = {name: said[name] for name in LOADED if name in said}
        model = msgspec.json.decode(said.get("model", NULL), type=Fields | None)
        if model and "dropout" in model:
            loaded["model"] = msgspec.Raw(msgspec.json.encode(model | {"dropout": NULL}))
        if special:
            added = msgspec.json.decode(said["added_tokens"], type=list[dict[str, Any]])
            marked = [token | {"special": token["special"] or token["content"] in special} for token in added]
            loaded["added_tokens"] = msgspec.Raw(msgspec.json.encode(marked))
        return Tokenizer.from_str(msgspec.json.encode(loaded).decode())
    except OSError as error:
        raise TokenizerError(f"{file} is no readable tokenizer: {error.strerror}") from None
    except Exception as error:  # tokenizers raises bare Exception for every broken file
        raise TokenizerError(f"{file} is no readable tokenizer: {' '.join(str(error).split())}") from error
