"""The requests that a slice of a trace becomes, small enough for the engine that is asked.

Keeps true
- Lengths are divided by their divisors (rounded up, never to 0); time is the trace's until `at_pace` divides it.
- The same arrivals and shape give the same requests, token for token, in every process.
- Prompts that share leading blocks in the trace share exactly those leading tokens; others share none but by chance.
- No request is longer than `longest`: the prompt's end is cut off, and `cut_short` says how many it was.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from rose.workers.loadgen.traces import BLOCK_TOKENS, Arrival

FIRST_WORD = 3
"""The least token id in a prompt: those below are special."""

UNSHARED, SHARED = 0, 1
"""First word of a seed: the tokens of a row, the tokens of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceScaling:
    """How a trace is compressed."""

    prompt_divisor: int
    output_divisor: int
    longest: int
    """Tokens of prompt and answer together that the engine takes."""
    vocabulary: int


class Request(msgspec.Struct, frozen=True):
    """One request as a client sends it."""

    at: float
    """Seconds after the beginning of the window."""
    prompt: list[int]
    tokens: int
    """To be generated."""


@dataclass(frozen=True, slots=True)
class TraceWindow:
    """The requests of every window of a run."""

    requests: list[Request]
    truncated: int

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].at

    def at_pace(self, pace: float) -> "TraceWindow":
        """The same requests, `pace` times as fast."""
        return TraceWindow([msgspec.structs.replace(each, at=each.at / pace) for each in self.requests], self.truncated)


def scale_requests(arrivals: Iterable[Arrival], shape: TraceScaling) -> TraceWindow:
    """The requests of a window."""
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
