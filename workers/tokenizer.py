"""Loads the tokenizer of a model folder. ROSE loads every `tokenizer.json` through this module.

Keeps true
- A text always becomes the same tokens. State of earlier use in a `tokenizer.json` is not loaded: truncation, padding,
  a post-processor that adds tokens around a text, dropout of a BPE model.
- Normalizer and pre-tokenizer belong to the policy's training and are loaded unchanged.
- Names of special tokens (`bos_token`) and added tokens are those that transformers finds: from
  `tokenizer_config.json`, and without its `added_tokens_decoder` also from `special_tokens_map.json` and
  `added_tokens.json`.
- Tokens that only the other files of the folder define are added as transformers adds them. An added token has the id
  that the files give; the library `tokenizers` alone would assign new numbers, without an error.
- `check_reading` refuses a folder if transformers' AutoTokenizer makes other tokens of a text. transformers takes some
  settings from `tokenizer_config.json` (`add_prefix_space`, `fix_mistral_regex`), and builds some tokenizers with its
  own code.
- The vocabulary size is that of `config.json`; with several models in one configuration, that of the text model.
  `check_vocabulary` refuses a tokenizer whose tokens lie outside of the model's vocabulary.

Needs only the library `tokenizers`, and that only where a tokenizer is loaded; `check_reading` needs transformers.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rose.schemas.errors import UsageError

CONFIG_FILE, MAP_FILE, ADDED_FILE = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
MODEL_FILE = "config.json"
"""Names of files in a model folder."""

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names of the special tokens that every tokenizer may have. Other names also end in `_token`."""

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Fields of an added token that say how the tokenizer matches the token in a text."""

Token = dict[str, Any]
"""An added token: its `content` and some of FLAGS."""


class TokenizerError(UsageError):
    """A token file of a model folder is unreadable or contradicts another one."""


class Tokens(NamedTuple):
    """The tokens that a folder defines."""

    names: dict[str, str | None]
    """Special tokens by name; None if a file sets the name to null."""
    numbered: dict[int, Token]
    """Added tokens by id. They replace tokens of `tokenizer.json` with the same id."""
    missing: dict[int, Token]
    """Added tokens by id, to be added only if `tokenizer.json` lacks them."""
    special: tuple[str, ...]
    """Special tokens without an id, to be added only if `tokenizer.json` lacks them."""


def read_tokens(folder: Path) -> Tokens:
    """Read the token files of a model folder. Raises TokenizerError."""
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
    """The text of a token, which a file gives as a string or as an object with `content`; None for anything else."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def vocabulary_of(folder: Path) -> int | None:
    """Vocabulary size of the folder's model; None if config.json does not give it. Raises TokenizerError."""
    size = _of_model(folder, "vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def model_stops(folder: Path) -> tuple[int, ...]:
    """Token ids that `config.json` names as the end of a sequence. Raises TokenizerError."""
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
    """Read a JSON object from a file; empty if the file does not exist. Raises TokenizerError.

    The object may hold Infinity and NaN, which Python and transformers write and read.
    """
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_bytes())
        json.dumps(found, ensure_ascii=False).encode()  # a lone surrogate is no valid text
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{file}: {error}") from None
    if not isinstance(found, dict):
        raise TokenizerError(f"{file} is not a JSON object")
    return found


TOKENIZER_FILE = "tokenizer.json"
"""Name of the file in a model folder."""

LOADED = ("version", "added_tokens", "normalizer", "pre_tokenizer", "decoder", "model")
"""Fields of the file that define how a text becomes tokens; other fields hold state of earlier use."""

OLDER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt")
"""Names of files that hold a tokenizer in forms from which transformers makes a `tokenizer.json`."""

PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Tokenizer classes of transformers that add nothing to `tokenizer.json`, and no special tokens to those that the
folder names."""

PROBES = (
    *("word", " word  two ", "Word's HTTPServer camelCase", "1234567 3.14 x1", "a\n\nb \n c\t\td\r\n", "f(x)=[y];//"),
    *("a   12\n    0.5", "It is.\n\nSo {\n}\n"),
    *("caf\u00e9 cafe\u0301 \ufb01n", "\u65e5\u672c\u8a9e\u3068 \u0441\u043b\u043e\u0432\u043e", "\U0001f600!?..."),
)
"""Texts whose tokens depend on flags and pre-tokenizers: spaces, case, digits, lines, accents and scripts."""

MISTRAL_FILE = "tekken.json"
"""Name of a tokenizer's file that only Mistral's own library reads."""

NULL = msgspec.Raw(b"null")

MARKS_FIRST = re.compile(rb'"prepend_scheme"\s*:\s*"first"')
"""Matches a pre-tokenizer that marks the beginning of a word before a text, and not behind an added token."""

Fields = dict[str, msgspec.Raw]


class _Entry(msgspec.Struct):
    """An added token of the file."""

    id: int
    content: str


def load_tokenizer(file: Path, *, special: Collection[str] = (), mid_context: bool = False) -> Any:
    """Load a `tokenizers.Tokenizer` from a `tokenizer.json` and the token files in the same folder.

    Raises TokenizerError.

    `special`: contents of added tokens that count as special, whatever the files say. `mid_context`: encode texts as
    if they followed an added token of a longer text, see `marks_first`.
    """
    from tokenizers import Tokenizer

    tokens = read_tokens(file.parent)
    if not file.exists() and (file.parent / MISTRAL_FILE).is_file():
        raise TokenizerError(
            f"{file.parent} has {MISTRAL_FILE}, Mistral's own format, and no {TOKENIZER_FILE}: take the "
            f"{TOKENIZER_FILE} and {CONFIG_FILE} that the model is published with for transformers"
        )
    if not file.exists() and (other := next((name for name in OLDER_FILES if (file.parent / name).is_file()), None)):
        raise TokenizerError(
            f"{file.parent} has {other} and no {TOKENIZER_FILE}: write the file with transformers' "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        fields = msgspec.json.decode(file.read_bytes(), type=Fields)
        entries = msgspec.json.decode(fields.get("added_tokens", NULL), type=list[_Entry] | None) or []
        loaded = {name: fields[name] for name in LOADED if name in fields}
        model = msgspec.json.decode(fields.get("model", NULL), type=Fields | None)
        if model and "dropout" in model:
            loaded["model"] = msgspec.Raw(msgspec.json.encode(model | {"dropout": NULL}))
        if mid_context and "pre_tokenizer" in loaded:
            loaded["pre_tokenizer"] = msgspec.Raw(MARKS_FIRST.sub(b'"prepend_scheme":"never"', loaded["pre_tokenizer"]))
        tokenizer: Any = Tokenizer.from_str(msgspec.json.encode(loaded).decode())
    except OSError as error:
        raise TokenizerError(f"{file} is no readable tokenizer: {error.strerror}") from None
    except Exception as error:  # tokenizers raises bare Exception for every broken file
        raise TokenizerError(f"{file} is no readable tokenizer: {' '.join(str(error).split())}") from error
    _check_ids(tokenizer, {entry.content: entry.id for entry in entries}, file)
    _add(tokenizer, tokens, file.parent)
    _mark(tokenizer, special)
    return tokenizer


def marks_first(tokenizer: Any) -> bool:
    """Whether the tokenizer marks the first word of a text, and not the same word behind an added token."""
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


def _check_ids(tokenizer: Any, ids: Mapping[str, int], where: Path, *files: str) -> None:
    """Check that tokens have the ids that the files say, by content in `ids`. Raises TokenizerError."""
    for content, number in ids.items():
        if (given := tokenizer.token_to_id(content)) != number:
            raise TokenizerError(
                f"{where}: {' or '.join(files) or 'added_tokens'} says that {content!r} is token {number}, and by the "
                f"tokens of {TOKENIZER_FILE} it would be {given}: export the tokenizer again from where the policy was "
                "trained"
            )


def _mark(tokenizer: Any, special: Collection[str]) -> None:
    """Mark these added tokens as special."""
    from tokenizers import AddedToken

    added = tokenizer.get_added_tokens_decoder().values()
    for token in [token for token in added if token.content in special and not token.special]:
        kept = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        tokenizer.add_tokens([AddedToken(token.content, special=True, **kept)])


def check_reading(folder: Path) -> None:
    """Check that transformers makes the same tokens of PROBES and added tokens as the folder's `tokenizer.json`.

    The class is the one that the folder names if that reads `tokenizer.json` as it is; otherwise AutoTokenizer's, which
    for some model types is another class than the folder names.

    A folder without the file, or whose tokenizer transformers cannot load or use, passes. Imports transformers and
    torch. Raises TokenizerError.
    """
    if not (folder / TOKENIZER_FILE).is_file():
        return
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    named = read_object(folder / CONFIG_FILE).get("tokenizer_class")
    reader: Any = PreTrainedTokenizerFast if named in PLAIN_CLASSES else AutoTokenizer
    try:
        theirs: Any = reader.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, mistral_format=False
        )
        theirs(PROBES[0])
    except Exception:  # noqa: BLE001 - transformers raises any type, for example if it lacks another library
        return
    tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    for text in (*PROBES, *(f"a {token} b" for token in added), *(f"a{token}b" for token in added)):
        ours = tokenizer.encode(text, add_special_tokens=False).ids
        if ours != theirs(text, add_special_tokens=False, verbose=False)["input_ids"]:
            raise TokenizerError(
                f"{folder}: transformers' {reader.__name__} makes other tokens of {text!r} than {TOKENIZER_FILE} says: "
                f"if {TOKENIZER_FILE} is right, take the flags (as add_prefix_space, split_special_tokens) out of "
                f"{CONFIG_FILE} and set its tokenizer_class to PreTrainedTokenizerFast; if transformers is right, "
                "write the files with AutoTokenizer.from_pretrained(folder).save_pretrained(folder), which changes the "
                f"tokens of {TOKENIZER_FILE}, and check again"
            )


def check_vocabulary(tokenizer: Any, vocabulary: int, folder: Path) -> None:
    """Check that the tokenizer produces only token ids below `vocabulary`. Raises TokenizerError.

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
