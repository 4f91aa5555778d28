"""The parts of a turn: what attempts before this one sampled, and how it goes on from there.

Keeps true
- A turn sampled in parts is, in tokens, logprobs, spans and device-seconds, what it is sampled in one.
- What was sampled is context to the engine that goes on: it is prefilled, or found in cache, and never drawn again.
- `max_tokens` counts the whole turn.
- What is taken on can be answered: nothing that a dispatch carries makes a result that its readers would refuse.

Pure. Example: a turn of 10 context tokens and max_tokens 8, of which 3 were sampled
    context 13 tokens, max_tokens 5; the engine samples 5 under version 4
    spans (0, 3, version 3) and (0, 5, version 4) -> (0, 3, version 3), (3, 8, version 4)
"""

import msgspec

from schemas.arrays import count
from schemas.limits import SPANS
from schemas.prompts import Sampling
from schemas.turns import CLASSES, Part, TurnDispatch, VersionSpan


def begun_from(dispatch: TurnDispatch, context: bytes) -> bytes:
    """The packed tokens that the engine begins with: the turn's context, and what was sampled of the turn."""
    return context if dispatch.begun is None else context + dispatch.begun.tokens


def sampling_of(dispatch: TurnDispatch) -> Sampling:
    """How the rest is sampled; an engine refuses a turn of which nothing is left."""
    sampling, begun = dispatch.request.sampling, dispatch.begun
    if begun is None:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - count(begun.tokens))


def flaw_of(dispatch: TurnDispatch, *, homes: int) -> str:
    """Why this dispatch cannot be answered, where there are so many homes; empty when it can."""
    if dispatch.home >= homes:
        return f"its answer is awaited in home {dispatch.home}, and there are {homes}"
    if not dispatch.cut and dispatch.request.flaw:
        return f"what was asked contradicts itself: {dispatch.request.flaw}"
    begun = dispatch.begun
    if begun is None:
        return ""
    if begun.flaw:
        return f"what it is to go on from is malformed: {begun.flaw}"
    if len(begun.spans) >= SPANS or len(begun.device_seconds) >= CLASSES:
        return (
            f"what it is to go on from has {len(begun.spans)} spans and {len(begun.device_seconds)} worker classes, "
            f"and what is sampled on needs one more of each: {SPANS} and {CLASSES} are the most"
        )
    return ""


def joined(begun: Part | None, rest: Part) -> Part:
    """The turn so far: `rest` was sampled behind `begun`."""
    if begun is None:
        return rest
    seconds = dict(begun.device_seconds)
    for worker_class, more in rest.device_seconds.items():
        seconds[worker_class] = seconds.get(worker_class, 0.0) + more
    return Part(
        tokens=begun.tokens + rest.tokens,
        logprobs=begun.logprobs + rest.logprobs,
        spans=_behind(begun.spans, rest.spans, count(begun.tokens)),
        device_seconds=seconds,
    )


def _behind(first: tuple[VersionSpan, ...], then: tuple[VersionSpan, ...], tokens: int) -> tuple[VersionSpan, ...]:
    """Both, the second moved by so many tokens; one span where the same version went on."""
    moved = [VersionSpan(span.start + tokens, span.end + tokens, span.version) for span in then]
    if first and moved and first[-1].version == moved[0].version:
        moved[0] = VersionSpan(first[-1].start, moved[0].end, moved[0].version)
        first = first[:-1]
    return (*first, *moved)
