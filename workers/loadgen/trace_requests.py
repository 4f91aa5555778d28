"""Scales the requests of a trace down to the engine that serves them.

Keeps true
- Lengths are divided by their divisors, rounded up, never to 0; times are those of the trace until `at_pace` divides
  them.
- The same arrivals and scaling give the same requests, token for token, in every process.
- Prompts that share leading blocks in the trace share exactly these leading tokens; other prompts share tokens only by
  chance.
- No request is longer than `longest`: a longer prompt is cut at its end, and `truncated` counts these prompts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from rose.workers.loadgen.traces import BLOCK_TOKENS, Arrival

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
