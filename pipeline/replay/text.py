"""A trajectory's life in words.

Keeps true: without a tokenizer it says how many tokens there were, and guesses nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from pipeline.replay.life import Attempt, Life, LifeTurn
from schemas.arrays import count, unpack_logprobs, unpack_tokens
from schemas.turns import TurnDispatch, TurnRequest, TurnResult, VersionSpan

Decode = Callable[[Sequence[int]], str]
"""Text of tokens."""


def told(life: Life, decode: Decode | None = None) -> Iterator[str]:
    """The life, line by line."""
    yield f"trajectory {life.trajectory_id}"
    if life.prompt is not None:
        prompt = life.prompt
        yield (
            f"  prompt     {prompt.environment}, seed {prompt.seed}, one of {prompt.group_size}, "
            f"at most {prompt.max_turns} turns{f', arguments {prompt.arguments}' if prompt.arguments else ''}"
        )
    if not life.turns:
        yield "  no turn has been asked for yet"
    seen = 0
    for number, turn in life.turns.items():
        yield ""
        yield from _turn(number, turn, seen, decode)
        seen = _length_after(turn, seen)
    yield ""
    yield from _end(life)


def _turn(number: int, turn: LifeTurn, seen: int, decode: Decode | None) -> Iterator[str]:
    yield f"turn {number}"
    if turn.request is not None:
        yield from _request(turn.request, seen, decode)
    for attempt_number, attempt in sorted(turn.attempts.items()):
        yield from _attempt(attempt_number, attempt, turn, decode)
    if turn.applied is not None:
        applied = turn.applied
        wait = applied.times.applied_at - applied.times.finished_at
        yield (
            f"  applied    attempt {applied.attempt} of {applied.worker}, {_ms(wait)} after its last token; "
            f"the environment took {_ms(applied.environment_seconds)}"
        )


def _request(request: TurnRequest, seen: int, decode: Decode | None) -> Iterator[str]:
    new = unpack_tokens(request.context)[seen:]
    tokens = f"{count(request.context)} tokens, {len(new)} of them new"
    yield f"  asked      {_clock(request.requested_at)}, context of {tokens}"
    if decode is not None:
        yield f"  reads      {_quoted(decode(new))}"


def _attempt(number: int, attempt: Attempt, turn: LifeTurn, decode: Decode | None) -> Iterator[str]:
    if attempt.dispatch is not None:
        yield from _dispatch(attempt.dispatch, number)
    for position, result in enumerate(attempt.results):
        yield from _result(result, decode)
        if position or (turn.applied is not None and result.attempt != turn.applied.attempt):
            yield "             dropped: another result of this turn was applied"


def _dispatch(dispatch: TurnDispatch, number: int) -> Iterator[str]:
    cost = dispatch.cost
    waited = dispatch.dispatched_at - dispatch.queued_at
    where = f"{dispatch.worker} (slot {dispatch.slot})"
    yield f"  sent       attempt {number} to {where}, {_ms(waited)} after the router took it in"
    seconds = cost.wait_seconds + cost.prefill_seconds + cost.decode_seconds + cost.risk_seconds
    why = (
        f"wait {_ms(cost.wait_seconds)} + prefill {_ms(cost.prefill_seconds)} + decode {_ms(cost.decode_seconds)}"
        f" + risk {_ms(cost.risk_seconds)}, {cost.cached_tokens} tokens believed cached"
    )
    over = f"; {cost.passed_over} would have cost {_ms(cost.passed_over_seconds)}" if cost.passed_over else ""
    yield f"    because  {_ms(seconds)} = {why}{over}"


def _result(result: TurnResult, decode: Decode | None) -> Iterator[str]:
    times = result.times
    reason = f", {result.reason}" if result.reason else ""
    ended = f" by {result.finish_reason}" if result.finish_reason else ""
    who = result.worker or "the router"
    yield f"  {result.outcome.value:10} by {who}: {count(result.tokens)} tokens{ended}{reason}"
    if times.finished_at:
        yield (
            f"    times    inbox {_ms(times.received_at - times.dispatched_at)}, "
            f"queue {_ms(times.scheduled_at - times.received_at)}, "
            f"prefill {_ms(times.first_token_at - times.scheduled_at)}, "
            f"decode {_ms(times.finished_at - times.first_token_at)}; "
            f"{result.cached_tokens} of {result.context_tokens} context tokens from the cache"
        )
    if result.tokens:
        mean = float(unpack_logprobs(result.logprobs).mean())
        yield f"    policy   {_versions(result.spans)}, mean logprob {mean:.3f}"
        if decode is not None:
            yield f"  writes     {_quoted(decode(unpack_tokens(result.tokens)))}"


def _end(life: Life) -> Iterator[str]:
    sample = life.sample
    if sample is None:
        yield "sample       none yet: the trajectory goes on"
    elif sample.failure:
        yield f"sample       failed: {sample.failure}; no reward"
    else:
        yield (
            f"sample       reward {sample.reward:g}, {'solved' if sample.success else 'not solved'}, "
            f"{len(sample.turns)} turns, {count(sample.tokens)} tokens, {_versions(sample.spans)}"
            f"{f', {sample.info}' if sample.info else ''}"
        )
    if not life.outcomes:
        yield "outcome      none yet"
    for outcome in life.outcomes:
        reason = f": {outcome.reason}" if outcome.reason else ""
        when = f"step {outcome.step}, policy version {outcome.policy_version}"
        yield f"outcome      {outcome.outcome.value} at {when}{reason}"


def _length_after(turn: LifeTurn, seen: int) -> int:
    """Tokens of the context and of the result that was applied."""
    context = count(turn.request.context) if turn.request is not None else seen
    for _, attempt in sorted(turn.attempts.items()):
        for result in attempt.results:
            if result.finish_reason:
                return context + count(result.tokens)
    return context


def _versions(spans: Sequence[VersionSpan]) -> str:
    versions = sorted({span.version for span in spans})
    if not versions:
        return "no policy version"
    return f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}"


def _clock(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%H:%M:%S.%f")[:-3]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def _quoted(text: str) -> str:
    return repr(text)
