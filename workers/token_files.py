"""What a model folder says of its tokens beside `tokenizer.json`, read as transformers reads it.

Keeps true
- The names of special tokens (`bos_token`) and the tokens that come to those of `tokenizer.json` are what transformers
  takes them for: `tokenizer_config.json` says both, and where it has no `added_tokens_decoder`, so do
  `special_tokens_map.json` and `added_tokens.json`.
- The size of the model's vocabulary is that of `config.json`, of its text model where it has several.

Needs no library.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from rose.schemas.errors import UsageError

CONFIG_FILE, MAP_FILE, ADDED_FILE = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
MODEL_FILE = "config.json"
"""Files of a model folder."""

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Of special tokens that every tokenizer may have. Others end in `_token` too."""

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Of an added token: how a text is searched for it."""

Token = dict[str, Any]
"""An added token: its `content` and FLAGS."""


class TokenizerError(UsageError):
    """A file on the tokens of a model folder that cannot be read or contradicts another."""


class Tokens(NamedTuple):
    """What the folder says of its tokens."""

    names: dict[str, str | None]
    """Special tokens by name; None: said to be none."""
    numbered: dict[int, Token]
    """Added tokens by id; they win over those of `tokenizer.json`."""
    missing: dict[int, Token]
    """Added tokens by id, for a tokenizer that lacks them."""
    special: tuple[str, ...]
    """Special tokens without an id, for a tokenizer that lacks them."""


def read_tokens(folder: Path) -> Tokens:
    """Read the folder's files. Raises TokenizerError."""
    tokens = read_object(folder / CONFIG_FILE)
    legacy = "added_tokens_decoder" not in tokens
    if legacy:
        tokens |= {name: value for name, value in read_object(folder / MAP_FILE).items() if value is not None}
    extra = tokens.get("extra_special_tokens") or tokens.get("additional_special_tokens") or ()
    own: dict[str, Any] = extra if isinstance(extra, dict) else {}
    listed: list[Any] = extra if isinstance(extra, list) else []
    names = {name: _text(tokens.get(name)) for name in NAMES if name in tokens}
    others = {name: _text(value) for name, value in (tokens | own).items() if name.endswith("_token") or name in own}
    names |= {name: text for name, text in others.items() if name not in names and text is not None}
    special = tuple(dict.fromkeys(text for text in (*names.values(), *map(_text, listed)) if text))
    if legacy:
        return Tokens(names, {}, _added(folder, special), special)
    try:
        entries = {int(number): token for number, token in dict(tokens["added_tokens_decoder"] or {}).items()}
        numbered = {number: _flagged(token) for number, token in sorted(entries.items())}
    except (TypeError, ValueError, KeyError):
        raise TokenizerError(f"{folder / CONFIG_FILE}: added_tokens_decoder is no map from ids to tokens") from None
    return Tokens(names, numbered, {}, special)


def _added(folder: Path, special: Iterable[str]) -> dict[int, Token]:
    """The tokens of `added_tokens.json` by id."""
    found = read_object(folder / ADDED_FILE)
    if not all(isinstance(number, int) for number in found.values()):
        raise TokenizerError(f"{folder / ADDED_FILE} is no map from tokens to ids")
    by_id = sorted((number, text) for text, number in found.items())
    return {
        number: {"content": text, "special": text in special, "normalized": text not in special}
        for number, text in by_id
    }


def _flagged(token: Token) -> Token:
    return {"content": str(token["content"]), **{flag: bool(token[flag]) for flag in FLAGS if flag in token}}


def _text(token: Any) -> str | None:
    """A token as a file has it: its text, or an object that holds it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def vocabulary_of(folder: Path) -> int | None:
    """How many tokens the folder's model knows; None if the folder does not say. Raises TokenizerError."""
    size = _of_model(folder, "vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def model_stops(folder: Path) -> tuple[int, ...]:
    """What `config.json` names as the ends of a sequence. Raises TokenizerError."""
    named = _of_model(folder, "eos_token_id")
    return tuple(
        each for each in (named if isinstance(named, list) else [named]) if isinstance(each, int) and each >= 0
    )


def _of_model(folder: Path, name: str) -> Any:
    """A field of the text model's configuration."""
    config = read_object(folder / MODEL_FILE)
    inner = config.get("text_config")
    return inner[name] if isinstance(inner, dict) and inner.get(name) is not None else config.get(name)


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object of the folder; empty if there is no such file. Raises TokenizerError.

    It may have Infinity and NaN, which Python and transformers write and read.
    """
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_bytes())
        json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{file}: {error}") from None
    if not isinstance(found, dict):
        raise TokenizerError(f"{file} is not a JSON object")
    return found
