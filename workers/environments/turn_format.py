r"""Converts text to a trajectory's tokens: observations are appended, actions are kept as they were sampled.

Keeps true
- A context only ever grows: observation tokens, then the sampled tokens as they are (stop token included), and so on.
  Nothing that was sampled is ever decoded and encoded again.
- Every turn has an end: an observation behind an action without a stop token of the model begins with the first stop
  token. If that token also begins a user's turn (GLM), so does an observation behind any other stop token.
- An environment's text cannot spell a special token, nor an added token that stands around observations or ends a
  turn: only the format's own strings may contain these tokens. White space is no such token.
- A context equals the tokens of the whole conversation written as one text; otherwise the model folder is refused.
- A context has no token outside of the model's vocabulary. A folder whose turns or texts need such a token is refused;
  text spells other such tokens letter by letter.

The chat template of a model folder says how its policy reads turns (see `chat_template.py`). A `turn_format.json` takes
precedence, for folders whose template does not fit or does not exist:
    {"first_prefix": "<|im_start|>user\n", "prefix": "\n<|im_start|>user\n",
     "suffix": "<|im_end|>\n<|im_start|>assistant\n"}
The stop tokens are the template's end of a turn and the `eos_token_id` of `generation_config.json`; without the latter,
the tokenizer's `eos_token`, or the `eos_token_id` of `config.json`. With `turn_format.json` the end of a turn is the
mark in `suffix` that ends an observation, if there is one. Needs only `tokenizers` and `jinja2`, no torch.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rose.schemas.limits import MAX_STOP_TOKENS
from rose.schemas.prompts import TokenId
from rose.workers.environments.chat_template import (
    FIX,
    OBSERVATIONS,
    TEMPLATE_FILE,
    TRIMS,
    TURNS,
    Framing,
    Template,
    framed_conversation,
    has_template,
    probes,
    read_chat_template,
    read_template,
    reading,
    renderer_of,
    unread_template,
)
from rose.workers.environments.chat_template import TurnFormatError as TurnFormatError
from rose.workers.environments.first_observation import PROBE, Piece, written
from rose.workers.environments.misspelt_marks import misspelt
from rose.workers.environments.protocol import FirstObservation
from rose.workers.tokenizer import (
    MODEL_FILE,
    TOKENIZER_FILE,
    check_vocabulary,
    load_tokenizer,
    marks_first,
    model_stops,
    read_object,
    read_tokens,
    vocabulary_of,
)

FORMAT_FILE, GENERATION_FILE = "turn_format.json", "generation_config.json"
"""Files of a model folder that are read here."""

HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair: Python's strings may hold it, UTF-8 and tokenizers cannot."""

UNKNOWN = "\ue000\U0010fffd\U0003134a"
"""Characters that few tokenizers know. Any text may contain the tokens that stand for them."""


SHORT_CHARACTERS = 4_096
"""Length above which a text is encoded as a batch of one; only then does the tokenizer let other threads run."""


class Frame(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Text around an observation; special tokens are written out."""

    first_prefix: str = ""
    """Text before the first observation."""
    prefix: str = ""
    """Text before every later observation; it follows the stop token of the action."""
    suffix: str = ""
    """Text after every observation; the policy's action follows it."""
    rendering: Literal["suffix"] | msgspec.UnsetType = msgspec.UNSET
    """`suffix`: the other fields are empty, and the text is what the chat template writes behind the newest action."""


class _Generation(msgspec.Struct, frozen=True):
    eos_token_id: (
        TokenId | Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_STOP_TOKENS - 1)] | None
    ) = None
    """At most one token less than a request may have: the template's end of a turn may be added."""


@dataclass(frozen=True, slots=True)
class _Around:
    """Tokens around an observation, and the adjacent text that is encoded together with the observation."""

    before: list[int]
    head: str
    tail: str
    after: list[int]


class TurnFormat:
    """The tokenizer and frame of one model folder."""

    def __init__(self, model_folder: Path) -> None:
        """Raises TurnFormatError when a file is missing, does not parse, or contradicts another."""
        if not model_folder.is_dir():
            raise TurnFormatError(f"{model_folder.absolute()} is no folder: name the model folder")
        frame = _read_frame(model_folder)
        own = frame is not None and not frame.rendering
        if not own and not has_template(model_folder):
            found = unread_template(model_folder)
            copy = f"; a template is in {found}: copy it to {TEMPLATE_FILE}, or {FIX}" if found else f": {FIX}"
            raise TurnFormatError(f"{model_folder} has neither a {TEMPLATE_FILE} nor a {FORMAT_FILE}{copy}")
        self._folder = model_folder
        self._load(model_folder)
        self._named = reading(read_tokens, model_folder).names
        added = self._tokenizer.get_added_tokens_decoder().items()
        self._marks = {number: token.content for number, token in added if not _is_space(token.content)}
        """Added tokens, special or not, by id."""
        if own:
            assert frame is not None
            framing, self.stop_token_ids = self._own(model_folder, frame)
            render = renderer_of(model_folder, self._named)
            self._template = None if render is None else Template(model_folder, framing, render)
        else:
            self._template, self.stop_token_ids = self._of_template(model_folder, suffix=frame is not None)
            framing = self._template.framing
        """Stop tokens, each of which ends an action; the first one is appended to an action without a stop token."""
        probe = self._probe()
        tried: list[tuple[str, str]] = [(observation, "") for observation in OBSERVATIONS] if own else probes()
        turns = TURNS if framing.stop else 1
        wholes = {probe: self._encoded(framed_conversation(framing, *probe, turns)).ids for probe in tried}
        self._first = self._around("", framing.first_prefix, framing.suffix)
        self._later = self._around(framing.stop, framing.prefix, framing.suffix)
        self._trim = framing.trim
        self._ends = self._ending(framing)
        """Stop tokens behind which an observation can follow as it is."""
        self._lead = self._behind_marks(framing.suffix)
        """Text before an action when the action is encoded: some tokenizers encode the start of a text differently."""
        self._unspeakable = frozenset(number for number, token in added if token.special)
        """Tokens that no text can spell."""
        self._read_text_from_here_on(model_folder)
        self._check(model_folder, wholes, turns, own=own)
        self._reads_roles = probe is None or self._tokens_of(probe[0]) == probe[1]
        """Whether a first observation with several roles has the tokens of its whole text."""

    def _load(self, folder: Path, special: Collection[str] = ()) -> None:
        """Load the tokenizer, and the tokenizer for text that follows other tokens. Raises TurnFormatError."""
        file = folder / TOKENIZER_FILE
        self._tokenizer = reading(load_tokenizer, file, special=special)
        first = marks_first(self._tokenizer)
        self._mid_context = (
            reading(load_tokenizer, file, special=special, mid_context=True) if first else self._tokenizer
        )

    def _own(self, folder: Path, frame: Frame) -> tuple[Framing, tuple[int, ...]]:
        """Read turns by the folder's `turn_format.json`; returns its stop tokens. Raises TurnFormatError."""
        file = folder / FORMAT_FILE
        known = read_template(folder) or ""
        for text in (frame.first_prefix, frame.prefix, frame.suffix):
            if (found := misspelt(text, self._marks.values(), known=known)) is not None:
                meant = f" (is {found[1]!r} meant?)" if found[1] else ""
                raise TurnFormatError(
                    f"{file}: {found[0]!r} is no token of {TOKENIZER_FILE}{meant}, so it would be read letter by "
                    "letter: write special tokens as the tokenizer has them"
                )
        stops = self._stops(folder)
        if not stops:
            raise TurnFormatError(
                f"{folder / GENERATION_FILE} has no eos_token_id, and no other file says what ends a turn"
            )
        named = self._id(self._named.get("eos_token"))
        ends = self._ends_of_observations(frame, {*stops, named})  # an action ends as a user's turn ends
        ends += [named] if named in stops else []
        stops = tuple(dict.fromkeys((*ends[:1], *stops)))
        stop = self._marks.get(stops[0], "")  # a stop token that is no mark has no certain text
        return Framing(frame.first_prefix, frame.prefix, frame.suffix, stop), stops

    def _ends_of_observations(self, frame: Frame, known: Collection[int | None]) -> list[int]:
        """Return the tokens of `suffix` that end an observation.

        These are the tokens in `known`; without any, the mark before the first mark that `prefix` has too (`<|im_end|>`
        of ChatML).
        """
        suffix, opening = self._encoded(frame.suffix).ids, self._marks.keys() & self._encoded(frame.prefix).ids
        until = next((at for at, token in enumerate(suffix) if token in opening), 0)
        before = [token for token in suffix[:until] if token in self._marks]
        return [token for token in suffix if token in known] or before[-1:]

    def _of_template(self, folder: Path, *, suffix: bool) -> tuple[Template, tuple[int, ...]]:
        """Read turns by the folder's templates; returns its stop tokens. Raises TurnFormatError."""
        template = read_chat_template(folder, marks=self._marks.values(), named=self._named, suffix=suffix)
        stops = (self._id(template.framing.stop), *self._stops(folder))
        return template, tuple(dict.fromkeys(stop for stop in stops if stop is not None))

    def _probe(self) -> tuple[list[Piece], list[int]] | None:
        """Return a first observation with several roles, and the tokens of its whole text; None if there is none.

        Called before text can no longer spell marks.
        """
        if self._template is None:
            return None
        try:
            pieces = written(self._template, PROBE)
        except TurnFormatError:  # the policy has no system prompt, for example; who uses one is told
            return None
        return pieces, list(self._encoded("".join(piece.text for piece in pieces)).ids)

    def _stops(self, folder: Path) -> tuple[int, ...]:
        """Return the tokens that end a sequence by the generation configuration, else the tokenizer, else the model."""
        file = folder / GENERATION_FILE
        stops: int | tuple[int, ...] | None = _read(file, _Generation).eos_token_id if file.exists() else None
        if stops is None:
            stops = self._id(self._named.get("eos_token"))
        if stops is None:
            stops = reading(model_stops, folder)[: MAX_STOP_TOKENS - 1]
        return (stops,) if isinstance(stops, int) else stops

    def _around(self, stop: str, prefix: str, suffix: str) -> _Around:
        """Return the tokens of a frame behind a stop token, and the text that an observation touches."""
        text = stop + prefix
        encoded = self._encoded(text)
        marks = [at for at, token in enumerate(encoded.ids) if token in self._marks]
        last = marks[-1] if marks else -1
        head = text[encoded.offsets[last][1] :] if marks else text
        ending = self._encoded(suffix)
        first = next((at for at, token in enumerate(ending.ids) if token in self._marks), None)
        tail = suffix if first is None else suffix[: ending.offsets[first][0]]
        after = [] if first is None else ending.ids[first:]
        return _Around(encoded.ids[bool(stop) : last + 1], head, tail, after)

    def _ending(self, framing: Framing) -> tuple[int, ...]:
        """Return the stop tokens behind which an observation can follow as it is.

        These are all stop tokens, or the first stop token alone if the same token also begins a user's turn.
        """
        marks = [token for token in self._encoded(framing.first_prefix).ids if token in self._marks]
        return self.stop_token_ids[:1] if marks[-1:] == [*self.stop_token_ids[:1]] else self.stop_token_ids

    def _behind_marks(self, text: str) -> str:
        """Return the part of a text behind its last added token."""
        encoded = self._encoded(text)
        spelt = zip(encoded.ids, encoded.offsets, strict=True)
        return text[max((end for token, (_, end) in spelt if token in self._marks), default=0) :]

    def _read_text_from_here_on(self, folder: Path) -> None:
        """Make text unable to spell marks around turns and special tokens from now on. Raises TurnFormatError."""
        around = (*self._first.before, *self._first.after, *self._later.before, *self._later.after)
        shut = {number: self._marks[number] for number in (*around, *self.stop_token_ids) if number in self._marks}
        shut |= self._beyond_the_model(folder, (*around, *self.stop_token_ids))
        if not shut.keys() <= self._unspeakable:
            self._load(folder, special=shut.values())
        self._tokenizer.encode_special_tokens = self._mid_context.encode_special_tokens = True
        words = (stop for stop in self.stop_token_ids if not _is_space(self._tokenizer.decode([stop])))
        self._unspeakable = (self._unspeakable.union(shut, words)).difference(self._encoded(UNKNOWN).ids)
        for number, mark in shut.items():
            if number in self._encode(mark):
                raise TurnFormatError(
                    f"{folder}: text can spell {mark!r}, which marks turns: give the tokenizer one of "
                    "several letters that is not in the vocabulary of its model"
                )

    def _beyond_the_model(self, folder: Path, needed: Sequence[int]) -> dict[int, str]:
        """Return the added tokens with ids outside of the model's vocabulary.

        Raises TurnFormatError if turns need a token outside of the vocabulary, or text can become one.
        """
        vocabulary = reading(vocabulary_of, folder)
        if vocabulary is None:
            return {}
        reading(check_vocabulary, self._tokenizer, vocabulary, folder)
        last = max((*needed, *self._encoded(UNKNOWN).ids), default=-1)
        if last >= vocabulary:
            mark = f" ({self._marks[last]!r})" if last in self._marks else ""
            raise TurnFormatError(
                f"{folder}: turns are marked or ended with token {last}{mark}, and the model has {vocabulary} tokens: "
                f"are {GENERATION_FILE} and {TOKENIZER_FILE} of another model than {MODEL_FILE}?"
            )
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {number: token.content for number, token in added if number >= vocabulary}

    def _check(self, folder: Path, wholes: Mapping[tuple[str, str], list[int]], turns: int, *, own: bool) -> None:
        """Choose how observations are trimmed, and check that a context has the tokens of its whole text.

        Probes whose action has a mark that text cannot spell are left out: a policy samples such tokens, and they are
        never encoded from text. Raises TurnFormatError.
        """
        closed = [mark for number, mark in self._marks.items() if number in self._unspeakable]
        wholes = {probe: whole for probe, whole in wholes.items() if not any(mark in probe[1] for mark in closed)}
        for trim in (self._trim,) if own else dict.fromkeys((self._trim, *TRIMS)):
            self._trim = trim
            apart = [probe for probe, whole in wholes.items() if self._conversation(*probe, turns) != whole]
            if not apart:
                return
        observation, action = apart[0]
        if own:
            raise TurnFormatError(
                f"{folder / FORMAT_FILE}: its tokenizer reads {observation!r} and what the file puts around it "
                "otherwise piece by piece than written out as one text: let what stands between a special token and an "
                "observation begin or end with a space"
            )
        raise TurnFormatError(
            f"{folder}: its tokenizer joins {observation!r} or {action!r} with what its chat template puts around it, "
            f"so a context could not grow token by token: {FIX}"
        )

    def _conversation(self, observation: str, action: str, turns: int) -> list[int]:
        """Return the tokens of a conversation of `turns` observations, as a context has them."""
        tokens = self.observation_tokens(observation, first=True)
        for _ in range(turns - 1):
            tokens += self.action_tokens(action) + self.observation_tokens(observation, first=False)
        return tokens

    def _id(self, token: str | None) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token) if token else None
        return found

    def first_tokens(self, observation: str | FirstObservation) -> list[int]:
        """Return the tokens of a first observation. Raises ValueError as `observation_tokens`, and TurnFormatError."""
        if isinstance(observation, str):
            return self.observation_tokens(observation, first=True)
        if self._template is None or not self._reads_roles:
            reason = "its tokenizer joins pieces of such a text" if self._template else f"there is no {TEMPLATE_FILE}"
            raise TurnFormatError(f"{self._folder}: a first observation with several roles cannot be read: {reason}")
        for message in observation.messages:
            _check_halves(message.content)
        declared = msgspec.json.encode(observation.tools).decode()
        if mark := next(
            (self._marks[n] for n in self._unspeakable & self._marks.keys() if self._marks[n] in declared), ""
        ):
            raise TurnFormatError(
                f"{self._folder}: the tools of the first observation spell {mark!r}: name it otherwise"
            )
        return self._tokens_of(written(self._template, observation))

    def _tokens_of(self, pieces: Sequence[Piece]) -> list[int]:
        """Return the tokens of a text of which only the template's pieces may spell marks."""
        marks = {self._marks[number]: number for number in self._unspeakable & self._marks.keys()}
        longest_first = "|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True))
        flags = self._tokenizer.get_added_tokens_decoder()
        tokens: list[int] = []
        run, swallows = "", False
        for text, by_template in pieces:
            parts = re.split(f"({longest_first})", text) if by_template and marks else [text]
            for part in parts:
                number = marks.get(part) if by_template else None
                if number is None:
                    run += part
                    continue
                run = run.rstrip() if flags[number].lstrip else run
                tokens += self._encode(run.lstrip() if swallows else run, mid_context=bool(tokens))
                tokens.append(number)
                run, swallows = "", flags[number].rstrip
        return tokens + self._encode(run.lstrip() if swallows else run, mid_context=bool(tokens))

    def observation_tokens(self, observation: str, *, first: bool, after: Sequence[int] = ()) -> list[int]:
        """Return the tokens that an observation appends to the context.

        Raises ValueError for text with half of a surrogate pair.
        """
        around = self._first if first else self._later
        cut = bool(after) and after[-1] not in self._ends
        _check_halves(observation)
        framed = around.head + TRIMS[self._trim](observation) + around.tail
        text = self._encode(framed, mid_context=not first or bool(around.before))
        return [*self.stop_token_ids[:cut], *around.before, *text, *around.after]

    def action_tokens(self, action: str) -> list[int]:
        """Return the tokens of an action of a demonstration, with the stop token."""
        before, whole = self._encode(self._lead, mid_context=True), self._encode(self._lead + action, mid_context=True)
        apart = whole[: len(before)] == before
        return [*(whole[len(before) :] if apart else self._encode(action, mid_context=True)), self.stop_token_ids[0]]

    def action_text(self, tokens: Sequence[int], stop_token_ids: Sequence[int] = ()) -> str:
        """Return the text of a turn's sampled tokens, without the stop token.

        `stop_token_ids`: stop tokens of the turn's request, in addition to those of the model.
        """
        ended = len(tokens) > 0 and (tokens[-1] in self.stop_token_ids or tokens[-1] in stop_token_ids)
        return self.text(tokens[:-1] if ended else tokens)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of any tokens of a context, with special tokens written out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def _encode(self, text: str, *, mid_context: bool = False) -> list[int]:
        """Return the tokens of a text. Text that would become a token of `_unspeakable` is cut behind its first letter.

        `mid_context`: whether the text follows other tokens of a context.
        """
        encoded = self._encoded(text, mid_context=mid_context)
        if self._unspeakable.isdisjoint(encoded.ids):
            return list(encoded.ids)
        spelt = zip(encoded.ids, encoded.offsets, strict=True)
        cuts = [begin + 1 for token, (begin, end) in spelt if token in self._unspeakable and end - begin > 1]
        if not cuts:
            return list(encoded.ids)
        pieces = ((text[begin:end], mid_context or begin > 0) for begin, end in pairwise((0, *cuts, len(text))))
        return [token for piece, behind in pieces for token in self._encode(piece, mid_context=behind)]

    def _encoded(self, text: str, *, mid_context: bool = False) -> Any:
        tokenizer = self._mid_context if mid_context else self._tokenizer
        if len(text) > SHORT_CHARACTERS:
            return tokenizer.encode_batch([text], add_special_tokens=False)[0]
        return tokenizer.encode(text, add_special_tokens=False)


def _check_halves(text: str) -> None:
    """Raises ValueError for text with half of a surrogate pair."""
    if (half := HALF.search(text)) is not None:
        raise ValueError(
            f"the observation holds half of a surrogate pair and no character ({half[0]!r} at {half.start()}): "
            "replace it, as text.encode(errors='replace').decode() does"
        )


def _read_frame(folder: Path) -> Frame | None:
    """Return the content of the folder's `turn_format.json`; None without the file. Raises TurnFormatError."""
    file = folder / FORMAT_FILE
    if not file.exists():
        return None
    frame: Frame = _read(file, Frame)
    if frame.rendering and frame != Frame(rendering=frame.rendering):
        raise TurnFormatError(
            f"{file}: with rendering, the chat template says all of the text: remove the other fields"
        )
    return frame


def _is_space(text: str) -> bool:
    """Whether a token is only white space, also written with marks of a word's beginning."""
    return text.replace("▁", " ").isspace()


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(reading(read_object, path), kind)
    except msgspec.ValidationError as error:
        raise TurnFormatError(f"{path}: {error}") from None
