"""Serving traces (arrival times, prompt lengths and output lengths of real requests), scaled to the engine that serves.

Keeps true
- `Arrival.at` is in seconds since the first arrival that was read and never decreases. Lengths of arrivals are in the
  trace's tokens.
- `blocks` identifies the beginning of a prompt: two prompts share as many leading tokens as they share leading blocks
  of BLOCK_TOKENS each. It is empty if the trace does not have blocks; such prompts share nothing.
- A line that breaks the format raises TraceError with the file and the line. No line is skipped.
- Requests have lengths that are divided by their divisors, rounded up, never to 0; their times are those of the trace
  until `at_pace` divides them.
- The same arrivals and scaling give the same requests, token for token, in every process. Prompts that share leading
  blocks in the trace share exactly these leading tokens; other prompts share tokens only by chance.
- No request is longer than `longest`: a longer prompt is cut at its end, and `truncated` counts these prompts.

`read_trace` reads a file of the Azure LLM inference traces (CSV), or a Mooncake trace (JSON lines).
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from rose.schemas.errors import UsageError

BLOCK_TOKENS = 512
"""Tokens of the trace in each of Mooncake's blocks."""

AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class TraceError(UsageError):
    """The trace is unreadable or breaks its format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a trace."""

    at: float
    """Seconds since the first arrival."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks, from the first token on; the last block may be partial."""


class _MooncakeRow(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """Milliseconds since the beginning of the trace."""
    input_length: Annotated[int, msgspec.Meta(gt=0)]
    output_length: Annotated[int, msgspec.Meta(gt=0)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]]


def read_trace(source: str, *, first: int = 0, count: int | None = None) -> list[Arrival]:
    """Read arrivals of the trace in the file `source`, as `take_arrivals` does. Raises TraceError."""
    return take_arrivals(_rows_of(Path(source)), source, first=first, count=count)


def take_arrivals(rows: Iterable[Arrival], source: str, *, first: int = 0, count: int | None = None) -> list[Arrival]:
    """Take `count` arrivals, beginning at row `first` (0 is the first row); all further rows if `count` is None.

    `source`: name of the trace in errors. Raises TraceError if the trace is unreadable, too short or not in order of
    time, or if all arrivals are at one time.
    """
    try:
        taken = list(islice(rows, first, None if count is None else first + count))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read the trace {source}: {error}") from error
    if len(taken) < (1 if count is None else count):
        raise TraceError(
            f"{source} has {first + len(taken)} requests: there are no {count or 1} from number {first} on"
        )
    start = taken[0].at
    for one, other in pairwise(taken):
        if other.at < one.at:
            raise TraceError(f"{source} goes back in time, from {one.at:.3f} s to {other.at:.3f} s")
    if taken[-1].at == start:
        raise TraceError(f"all {len(taken)} requests of {source} come at one moment: take more of them")
    return [replace(arrival, at=arrival.at - start) for arrival in taken]


def _rows_of(path: Path) -> Iterator[Arrival]:
    with path.open(encoding="utf-8", newline="") as lines:
        head = lines.readline()
        if head.strip().split(",") == AZURE_COLUMNS:
            yield from _azure(path, lines)
        elif head.startswith("{"):
            lines.seek(0)
            yield from _mooncake(path, lines)
        else:
            raise TraceError(
                f"{path} is no trace that is known: its first line is neither {','.join(AZURE_COLUMNS)} nor an object"
            )


def _azure(path: Path, lines: Iterator[str]) -> Iterator[Arrival]:
    begin: datetime | None = None
    for number, row in enumerate(csv.reader(lines), start=2):
        try:
            stamp, prompt, output = row
            moment, prompt_tokens, output_tokens = datetime.fromisoformat(stamp), int(prompt), int(output)
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        if prompt_tokens < 1 or output_tokens < 1:
            raise TraceError(f"{path}, line {number}: a request has at least one token in and one out")
        begin = begin or moment
        at = (moment - begin).total_seconds()
        yield Arrival(at=at, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


def _mooncake(path: Path, lines: Iterator[str]) -> Iterator[Arrival]:
    for number, line in enumerate(lines, start=1):
        try:
            row = msgspec.json.decode(line, type=_MooncakeRow)
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        if len(row.hash_ids) != -(-row.input_length // BLOCK_TOKENS):
            raise TraceError(
                f"{path}, line {number}: {row.input_length} tokens are not {len(row.hash_ids)} blocks of {BLOCK_TOKENS}"
            )
        yield Arrival(
            at=row.timestamp / 1000,
            prompt_tokens=row.input_length,
            output_tokens=row.output_length,
            blocks=tuple(row.hash_ids),
        )


FIRST_WORD = 3
"""Lowest token id in a prompt; lower ids are special tokens."""

UNSHARED, SHARED = 0, 1
"""First number of a seed: tokens of one request, or tokens of a shared block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceScaling:
    """How a trace is scaled."""

    prompt_divisor: int
    output_divisor: int
    longest: int
    """Most tokens of prompt and answer together that the engine takes."""
    vocabulary: int


class Request(msgspec.Struct, frozen=True):
    """One request to the server."""

    at: float
    """Seconds since the beginning of the pass."""
    prompt: list[int]
    tokens: int
    """Number of tokens to generate."""


@dataclass(frozen=True, slots=True)
class TraceWindow:
    """The requests of one pass through a trace."""

    requests: list[Request]
    truncated: int

    @property
    def seconds(self) -> float:
        """Seconds from the beginning to the last request."""
        return self.requests[-1].at

    def at_pace(self, pace: float) -> "TraceWindow":
        """The same requests with all times divided by `pace`."""
        return TraceWindow([msgspec.structs.replace(each, at=each.at / pace) for each in self.requests], self.truncated)


def scale_requests(arrivals: Iterable[Arrival], shape: TraceScaling) -> TraceWindow:
    """Scale arrivals of a trace to requests."""
    requests, cut_short = [], 0
    for row, arrival in enumerate(arrivals):
        tokens = min(_divided(arrival.output_tokens, shape.output_divisor), shape.longest - 1)
        prompt_tokens = _divided(arrival.prompt_tokens, shape.prompt_divisor)
        length = min(prompt_tokens, shape.longest - tokens)
        cut_short += length < prompt_tokens
        prompt = _prompt(arrival.blocks, row, length, shape)
        requests.append(Request(at=arrival.at, prompt=prompt, tokens=tokens))
    return TraceWindow(requests, cut_short)


def _divided(length: int, divisor: int) -> int:
    return -(-length // divisor)


def _prompt(blocks: Sequence[int], row: int, length: int, shape: TraceScaling) -> list[int]:
    if not blocks:
        return _words((UNSHARED, row), length, shape.vocabulary)
    each = _divided(BLOCK_TOKENS, shape.prompt_divisor)
    return [word for block in blocks for word in _words((SHARED, block), each, shape.vocabulary)][:length]


def _words(seed: tuple[int, int], count: int, vocabulary: int) -> list[int]:
    words: list[int] = np.random.default_rng(seed).integers(FIRST_WORD, vocabulary, count).tolist()
    return words
