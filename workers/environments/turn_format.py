"""How text becomes a trajectory's tokens: observations are appended, actions are kept as they were sampled.

Keeps true
- A context only ever grows: observation tokens, then the sampled tokens as they are (stop token included), and so on.
  Nothing that was sampled is ever decoded and encoded again.
- An environment's text cannot forge a special token: only the format's own strings may contain those.

A model folder says how its policy reads turns by its chat template (see `chat_template.py`), or, where that does not
fit or is not there, by a `turn_format.json`, which wins:
    {"first_prefix": "<|im_start|>user\\n", "prefix": "\\n<|im_start|>user\\n",
     "suffix": "<|im_end|>\\n<|im_start|>assistant\\n"}
The stop tokens are the template's end of a turn and the `eos_token_id` of `generation_config.json`. Needs `tokenizers`
and `jinja2` alone, no torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from schemas.limits import STOPS
from schemas.prompts import TokenId
from workers.environments.chat_template import (
    FIX,
    TEMPLATE_FILE,
    TURNS,
    eos_token,
    framing_of,
    has_template,
    probes,
    written,
)
from workers.environments.chat_template import TurnFormatError as TurnFormatError

FORMAT_FILE, GENERATION_FILE = "turn_format.json", "generation_config.json"
"""Files of a model folder."""


class Frame(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands around an observation; special tokens are written out."""

    first_prefix: str = ""
    """Before the first observation."""
    prefix: str = ""
    """Before every later observation; it follows the stop token of the action."""
    suffix: str = ""
    """After every observation; the policy goes on from here."""


class _Generation(msgspec.Struct, frozen=True):
    eos_token_id: TokenId | Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=STOPS - 1)]
    """One less than a request may name: the template's own end of a turn may come to them."""


class TurnFormat:
    """The tokenizer and frame of one model folder."""

    def __init__(self, model_folder: Path) -> None:
        """Raises TurnFormatError when a file is missing or does not parse."""
        from tokenizers import Tokenizer

        own = (model_folder / FORMAT_FILE).exists()
        if not own and not has_template(model_folder):
            raise TurnFormatError(f"{model_folder} has neither a {TEMPLATE_FILE} nor a {FORMAT_FILE}: {FIX}")
        tokenizer_file = model_folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # tokenizers raises bare Exception for every broken file
            raise TurnFormatError(f"{tokenizer_file} is not a Hugging Face fast tokenizer: {error}") from error
        self._first_prefix: list[int] = []
        self._prefix: list[int] = []
        self._suffix: list[int] = []
        self.stop_token_ids: tuple[int, ...] = ()
        """Any of these ends an action; the first is what a demonstration ends one with."""
        if own:
            self._take_frame(_read(model_folder / FORMAT_FILE, Frame))
            self.stop_token_ids = _stops(model_folder)
        else:
            self._take_template(model_folder)

    def _take_template(self, folder: Path) -> None:
        """Read turns as the folder's chat template does. Raises TurnFormatError."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        framing = framing_of(folder, special=[token.content for token in added if token.special])
        wholes = {probe: self._encode("".join(written(framing, *probe, TURNS))) for probe in probes()}
        self._take_frame(Frame(first_prefix=framing.first_prefix, prefix=framing.prefix, suffix=framing.suffix))
        others = _stops(folder) if (folder / GENERATION_FILE).exists() else (self._id(eos_token(folder)),)
        stops = (self._id(framing.stop), *others)
        self.stop_token_ids = tuple(dict.fromkeys(stop for stop in stops if stop is not None))
        for (observation, action), whole in wholes.items():
            if self._conversation(observation, action, TURNS) != whole:
                raise TurnFormatError(
                    f"{folder}: its tokenizer joins {observation!r} or {action!r} with what its chat template puts "
                    f"around it, so a context could not grow token by token: {FIX}"
                )

    def _take_frame(self, frame: Frame) -> None:
        """From here on text cannot spell a special token."""
        texts = frame.first_prefix, frame.prefix, frame.suffix
        self._first_prefix, self._prefix, self._suffix = (self._encode(text) for text in texts)
        self._tokenizer.encode_special_tokens = True

    def _conversation(self, observation: str, action: str, turns: int) -> list[int]:
        """A conversation of so many observations as a context has it."""
        tokens = self.observation_tokens(observation, first=True)
        for _ in range(turns - 1):
            tokens += self.action_tokens(action) + self.observation_tokens(observation, first=False)
        return tokens

    def _id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token) if token else None
        return found

    def observation_tokens(self, observation: str, *, first: bool) -> list[int]:
        """What an observation appends to the context."""
        return [*(self._first_prefix if first else self._prefix), *self._encode(observation), *self._suffix]

    def action_tokens(self, action: str) -> list[int]:
        """How a demonstration writes an action: its tokens and the stop token."""
        return [*self._encode(action), self.stop_token_ids[0]]

    def action_text(self, tokens: Sequence[int]) -> str:
        """The action that a turn's sampled tokens spell, without its stop token."""
        ended = len(tokens) > 0 and tokens[-1] in self.stop_token_ids
        return str(self._tokenizer.decode(list(tokens[:-1] if ended else tokens), skip_special_tokens=False))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _stops(folder: Path) -> tuple[int, ...]:
    stops: int | tuple[int, ...] = _read(folder / GENERATION_FILE, _Generation).eos_token_id
    return (stops,) if isinstance(stops, int) else stops


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise TurnFormatError(f"{path}: {error.strerror}; a model folder needs this file") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TurnFormatError(f"{path}: {error}") from None
