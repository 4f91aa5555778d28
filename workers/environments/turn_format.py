"""How text becomes a trajectory's tokens: observations are appended, actions are kept as they were sampled.

Keeps true
- A context only ever grows: observation tokens, then the sampled tokens as they are (stop token included), and so on.
  Nothing that was sampled is ever decoded and encoded again.
- An environment's text cannot forge a special token: only the format's own strings may contain those.

A model folder says how its policy reads turns in `turn_format.json`:
    {"first_prefix": "<|im_start|>user\\n", "prefix": "\\n<|im_start|>user\\n",
     "suffix": "<|im_end|>\\n<|im_start|>assistant\\n"}
The stop tokens are the `eos_token_id` of its `generation_config.json`. Needs `tokenizers` alone, no torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from schemas.errors import UsageError


class TurnFormatError(UsageError):
    """A model folder that does not say how its policy reads turns."""


class Frame(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands around an observation; special tokens are written out."""

    first_prefix: str = ""
    """Before the first observation."""
    prefix: str = ""
    """Before every later observation; it follows the stop token of the action."""
    suffix: str = ""
    """After every observation; the policy goes on from here."""


class _Generation(msgspec.Struct, frozen=True):
    eos_token_id: int | tuple[int, ...]


class TurnFormat:
    """The tokenizer and frame of one model folder."""

    def __init__(self, model_folder: Path) -> None:
        """Raises TurnFormatError when a file is missing or does not parse."""
        from tokenizers import Tokenizer

        frame = _read(model_folder / "turn_format.json", Frame)
        stops = _read(model_folder / "generation_config.json", _Generation).eos_token_id
        tokenizer_file = model_folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # tokenizers raises bare Exception for every broken file
            raise TurnFormatError(f"{tokenizer_file} is not a Hugging Face fast tokenizer: {error}") from error
        self.stop_token_ids: tuple[int, ...] = (stops,) if isinstance(stops, int) else stops
        self._first_prefix, self._prefix, self._suffix = (
            self._encode(text) for text in (frame.first_prefix, frame.prefix, frame.suffix)
        )
        self._tokenizer.encode_special_tokens = True

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


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise TurnFormatError(f"{path}: {error.strerror}; a model folder needs this file") from None
    except msgspec.DecodeError as error:
        raise TurnFormatError(f"{path}: {error}") from None
