"""Loads the tokenizer of a model folder. ROSE loads every `tokenizer.json` through this module.

Keeps true
- A text always becomes the same tokens. State of earlier use in a `tokenizer.json` is not loaded: truncation, padding,
  a post-processor that adds tokens around a text, dropout of a BPE model.
- Normalizer and pre-tokenizer belong to the policy's training and are loaded unchanged.
- Tokens that only the other files of the folder define are added as transformers adds them. An added token has the id
  that the files give; the library `tokenizers` alone would number it anew, without an error.
- `check_vocabulary` refuses a tokenizer whose tokens lie outside of the model's vocabulary.

Needs only the library `tokenizers`.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rose.workers.token_files import ADDED_FILE, CONFIG_FILE, Tokens, read_tokens
from rose.workers.token_files import TokenizerError as TokenizerError

TOKENIZER_FILE = "tokenizer.json"
"""Name of the file in a model folder."""

LOADED = ("version", "added_tokens", "normalizer", "pre_tokenizer", "decoder", "model")
"""Fields of the file that define how a text becomes tokens; other fields hold state of earlier use."""

OLDER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt")
"""Names of files that hold a tokenizer in forms from which transformers makes a `tokenizer.json`."""

NULL = msgspec.Raw(b"null")

MARKS_FIRST = re.compile(rb'"prepend_scheme"\s*:\s*"first"')
"""Of a pre-tokenizer that puts a mark of a word's beginning before a text, and before nothing behind an added token."""

Fields = dict[str, msgspec.Raw]


class _Entry(msgspec.Struct):
    """An added token of the file."""

    id: int
    content: str


def load_tokenizer(file: Path, *, special: Collection[str] = (), amid: bool = False) -> Any:
    """Load a `tokenizers.Tokenizer` from a `tokenizer.json` and the token files in the same folder. Raises
    TokenizerError.

    `special`: contents of added tokens that count as special, whatever the files say. `amid`: texts are read as if they
    followed an added token of a longer text, see `marks_first`.
    """
    from tokenizers import Tokenizer

    tokens = read_tokens(file.parent)
    if not file.exists() and (other := next((name for name in OLDER_FILES if (file.parent / name).is_file()), None)):
        raise TokenizerError(
            f"{file.parent} has {other} and no {TOKENIZER_FILE}: write the file with transformers' "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        fields = msgspec.json.decode(file.read_bytes(), type=Fields)
        said = msgspec.json.decode(fields.get("added_tokens", NULL), type=list[_Entry] | None) or []
        loaded = {name: fields[name] for name in LOADED if name in fields}
        model = msgspec.json.decode(fields.get("model", NULL), type=Fields | None)
        if model and "dropout" in model:
            loaded["model"] = msgspec.Raw(msgspec.json.encode(model | {"dropout": NULL}))
        if amid and "pre_tokenizer" in loaded:
            loaded["pre_tokenizer"] = msgspec.Raw(MARKS_FIRST.sub(b'"prepend_scheme":"never"', loaded["pre_tokenizer"]))
        tokenizer: Any = Tokenizer.from_str(msgspec.json.encode(loaded).decode())
    except OSError as error:
        raise TokenizerError(f"{file} is no readable tokenizer: {error.strerror}") from None
    except Exception as error:  # tokenizers raises bare Exception for every broken file
        raise TokenizerError(f"{file} is no readable tokenizer: {' '.join(str(error).split())}") from error
    _check_ids(tokenizer, {entry.content: entry.id for entry in said}, file)
    _add(tokenizer, tokens, file.parent)
    _mark(tokenizer, special)
    return tokenizer


def marks_first(tokenizer: Any) -> bool:
    """Whether it begins a text with a mark that the same text has not behind an added token."""
    steps = tokenizer.pre_tokenizer
    return steps is not None and MARKS_FIRST.search(steps.__getstate__()) is not None


def _add(tokenizer: Any, tokens: Tokens, folder: Path) -> None:
    """Add the tokens that only other files define. Raises TokenizerError if the tokenizer gives a token another id."""
    from tokenizers import AddedToken

    added = tokenizer.get_added_tokens_decoder().values()
    known, alike = {token.content for token in added}, {repr(token) for token in added}
    numbered = {number: AddedToken(**token) for number, token in tokens.numbered.items()}
    numbered |= {
        number: AddedToken(**token) for number, token in tokens.missing.items() if token["content"] not in known
    }
    tokenizer.add_tokens([token for token in numbered.values() if repr(token) not in alike])
    _check_ids(
        tokenizer, {token.content: number for number, token in numbered.items()}, folder, CONFIG_FILE, ADDED_FILE
    )
    known.update(token.content for token in numbered.values())
    named = [AddedToken(text, special=True) for text in tokens.special if text not in known]
    tokenizer.add_tokens(named)


def _check_ids(tokenizer: Any, said: Mapping[str, int], where: Path, *files: str) -> None:
    """Raises TokenizerError if the tokenizer gives a token another id than the files say."""
    for content, number in said.items():
        if (given := tokenizer.token_to_id(content)) != number:
            raise TokenizerError(
                f"{where}: {' or '.join(files) or 'added_tokens'} says that {content!r} is token {number}, and by the "
                f"tokens of {TOKENIZER_FILE} it would be {given}: export the tokenizer anew, from where the policy was "
                "trained"
            )


def _mark(tokenizer: Any, special: Collection[str]) -> None:
    """Mark these added tokens as special."""
    from tokenizers import AddedToken

    added = tokenizer.get_added_tokens_decoder().values()
    for token in [token for token in added if token.content in special and not token.special]:
        kept = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        tokenizer.add_tokens([AddedToken(token.content, special=True, **kept)])


def check_vocabulary(tokenizer: Any, vocabulary: int, folder: Path) -> None:
    """Raises TokenizerError if the tokenizer can produce a token id that is not below `vocabulary`.

    Added tokens are not checked here; the caller decides which of them a text may contain.
    """
    added = tokenizer.get_added_tokens_decoder()
    texts = ((number, text) for text, number in tokenizer.get_vocab().items() if number not in added)
    last, text = max(texts, default=(-1, ""))
    if last >= vocabulary:
        raise TokenizerError(
            f"{folder}: the tokenizer has {last + 1} tokens, the model {vocabulary}: an observation with {text!r} "
            f"(token {last}) could not be computed; is {TOKENIZER_FILE} of another model?"
        )
