"""A square wave of load: `square:HIGH,LOW,SECONDS` is HIGH requests a second for SECONDS, then LOW, in turn."""

import random
from collections.abc import Iterator

from rose.workers.loadgen.traces import Arrival, TraceError, read_trace, take_arrivals

SQUARE = "square:"
"""Prefix of a square wave's name, which is no file."""

SQUARE_PROMPT_TOKENS, SQUARE_OUTPUT_TOKENS = 1024, 64
"""Prompt and output length of every request of a square wave."""


def read_arrivals(source: str, *, first: int, count: int) -> list[Arrival]:
    """Read `count` arrivals of a square wave or of a trace file, from row `first` on. Raises TraceError."""
    if source.startswith(SQUARE):
        return take_arrivals(square(source), source, first=first, count=count)
    return read_trace(source, first=first, count=count)


def square(source: str) -> Iterator[Arrival]:
    """Yield endless Poisson arrivals at two alternating rates, the same in each call.

    Raises TraceError if `source` is malformed.
    """
    try:
        high, low, seconds = (float(part) for part in source.removeprefix(SQUARE).split(","))
    except ValueError as error:
        raise TraceError(f"{source} is not {SQUARE}HIGH,LOW,SECONDS: three numbers") from error
    if not (0 < low <= high < float("inf") and 0 < seconds < float("inf")):
        raise TraceError(f"{source}: the rates must be above 0, the high one no lower, and the seconds above 0")
    draw = random.Random(0)
    at, end, rate = 0.0, seconds, high
    while True:
        # Exponential waiting times have no memory: a wait that reaches beyond the end of a phase is drawn again from
        # there.
        wait = draw.expovariate(rate)
        if at + wait >= end:
            at, end, rate = end, end + seconds, low if rate == high else high
            continue
        at += wait
        yield Arrival(at=at, prompt_tokens=SQUARE_PROMPT_TOKENS, output_tokens=SQUARE_OUTPUT_TOKENS)
