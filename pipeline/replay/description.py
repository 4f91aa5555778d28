"""Text of a trajectory's history, with the latency of each turn by stage.

Keeps true
- Without a tokenizer the text gives the numbers of tokens and nothing else of them.
- The stages of a turn add up to the time from the first station to the last. A station that the turn did not pass has
  no stage: a turn that was given up has no prefill and no decode.

A worker learns of its commit at about the time when others can read its records, so the stage after the commit can be
slightly negative.

Example: requested at 1.0, queued at 1.2, finished at 9.2 without a token -> to the router 0.2 s, to its end 8.0 s
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rose.pipeline.clock import format_utc as moment
from rose.pipeline.replay.records import ENDED, Attempt, Episode, EpisodeTurn, TrajectoryHistory
from rose.schemas.arrays import ITEM_BYTES, count, unpack_logprobs, unpack_tokens
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.samples import Sample, SampleTurn
from rose.schemas.turns import TurnDispatch, TurnOutcome, TurnResult, TurnTimes


class LatencyStage(NamedTuple):
    """The way to one station, and its duration in seconds."""

    name: str
    seconds: float


_STATIONS = (
    ("", "requested_at"),
    ("its transaction", "committed_at"),
    ("to the router", "queued_at"),
    ("wait for room", "dispatched_at"),
    ("to the inbox", "received_at"),
    ("engine's queue", "scheduled_at"),
    ("prefill", "first_token_at"),
    ("decode", "finished_at"),
    ("back", "applied_at"),
)
"""Names of the stages with the station at which each one ends, in the order in which a turn passes them."""

_CUT_SHORT = "to its end"
"""Name of the stage to the end of a turn that has sampled no token."""


def latency_stages(times: TurnTimes) -> list[LatencyStage]:
    """Return the stages of one execution. Each station's time is by the clock of its own machine."""
    legs: list[LatencyStage] = []
    before = 0.0
    for name, station in _STATIONS:
        at = float(getattr(times, station))
        if not at:
            continue
        if before:
            cut_short = station == "finished_at" and not times.first_token_at
            legs.append(LatencyStage(_CUT_SHORT if cut_short else name, at - before))
        before = at
    return legs


Decode = Callable[[Sequence[int]], str]
"""Decodes token ids to text."""

SOLVED = {True: "solved, ", False: "not solved, ", None: ""}
"""Text for the success that the environment reports."""


def describe_trajectory(history: TrajectoryHistory, decode: Decode | None = None) -> Iterator[str]:
    """Yield the history of a trajectory, line by line. `decode` adds the text of observations and actions."""
    yield f"trajectory {history.trajectory_id}"
    yield from describe_prompt(history)
    for number, life in enumerate(history.episodes, 1):
        if len(history.episodes) > 1:
            yield ""
            yield f"life {number} of {len(history.episodes)}"
        yield from _episode(life, decode)
    yield ""
    yield from describe_outcomes(history)


def describe_prompt(history: TrajectoryHistory) -> Iterator[str]:
    """Yield the lines of a trajectory's prompt, and of what the log has of the trajectory."""
    if history.prompt is not None:
        prompt = history.prompt
        yield (
            f"  prompt     {prompt.environment}, seed {prompt.task_seed}, one of {prompt.group_size}, "
            f"at most {prompt.max_turns} turns{f', arguments {prompt.arguments}' if prompt.arguments else ''}"
        )
    if history.since is not None:
        yield f"  looked     at the log from {moment(history.since)} on"
    if not history.episodes:
        yield "  no turn has been asked for yet"


def _episode(episode: Episode, decode: Decode | None) -> Iterator[str]:
    seen = 0
    for number, turn in episode.turns.items():
        yield ""
        yield from _turn(number, turn, seen, decode)
        seen = length_after(turn, seen)
    yield ""
    if not episode.samples:
        yield "sample       none yet: the trajectory goes on"
    for sample in episode.samples:
        yield describe_sample(sample)


def _turn(number: int, turn: EpisodeTurn, seen: int, decode: Decode | None) -> Iterator[str]:
    yield f"turn {number}"
    yield from describe_request(turn, seen, decode)
    for attempt_number, attempt in sorted(turn.attempts.items()):
        yield from describe_attempt(attempt_number, attempt, turn, decode)
    if turn.applied is not None:
        yield from describe_applied(turn.applied)


def describe_applied(applied: SampleTurn) -> Iterator[str]:
    """Yield the lines of the result that the environment applied."""
    times = applied.times
    yield (
        f"  applied    attempt {applied.attempt} of {applied.worker}; "
        f"the environment took {_ms(applied.environment_seconds)}"
    )
    if times.requested_at and times.applied_at:
        yield f"    turn     {_ms(times.applied_at - times.requested_at)} = {_legs(times)}"


def describe_request(turn: EpisodeTurn, seen: int, decode: Decode | None) -> Iterator[str]:
    """Yield the lines of a turn's request and of the later requests that stop the turn or ask for it again.

    `seen`: number of tokens of the context that earlier turns have shown.
    """
    request = turn.request
    if request is not None:
        unseen = max(0, request.context_tokens - seen)
        new = unpack_tokens(_whole(request.appended))[-unseen:] if unseen else []
        behind = f", behind {len(request.chain)} requests" if request.chain else ", carried whole"
        tokens = f"{request.context_tokens} tokens, {len(new)} of them new{behind}"
        yield f"  asked      {_clock(request.requested_at)}, context of {tokens}"
        if decode is not None:
            yield f"  reads      {_quoted(decode(new))}"
    for later in turn.later:
        at = _clock(later.requested_at)
        if later.withdrawn:
            yield f"  withdrawn  {at}: the trajectory has ended"
        else:
            yield f"  on hold    {at}: its group is deferred" if later.hold else f"  asked      {at} again"


def describe_attempt(number: int, attempt: Attempt, turn: EpisodeTurn, decode: Decode | None) -> Iterator[str]:
    """Yield the lines of one attempt at `turn`."""
    for dispatch in attempt.dispatches:
        yield from _dispatch(dispatch, number)
    for result in attempt.results:
        applied = turn.was_applied(result)
        yield from _result(result, decode, timed=not applied)  # the stages of the applied result follow in `_applied`
        if turn.applied is not None and result.outcome is TurnOutcome.COMPLETED and not applied:
            yield "             dropped: another result of this turn was applied"


def _dispatch(dispatch: TurnDispatch, number: int) -> Iterator[str]:
    if dispatch.withdrawn:
        yield f"  stop       of attempt {number}, sent to {dispatch.worker} (slot {dispatch.slot})"
        return
    cost = dispatch.cost
    waited = f"{_ms(dispatch.dispatched_at - dispatch.queued_at)} after " if dispatch.queued_at else "at a time after "
    where = f"{dispatch.worker} (slot {dispatch.slot})"
    yield f"  sent       attempt {number} to {where}, {waited}the router took it in"
    seconds = cost.wait_seconds + cost.prefill_seconds + cost.decode_seconds + cost.risk_seconds
    why = (
        f"wait {_ms(cost.wait_seconds)} + prefill {_ms(cost.prefill_seconds)} + decode {_ms(cost.decode_seconds)}"
        f" + risk {_ms(cost.risk_seconds)}, {cost.cached_tokens} tokens believed cached"
    )
    over = f"; {cost.passed_over} would have cost {_ms(cost.passed_over_seconds)}" if cost.passed_over else ""
    yield f"    because  {_ms(seconds)} = {why}{over}"
    if dispatch.partial is not None:
        yield f"    goes on  behind {count(dispatch.partial.tokens)} tokens that an attempt before it sampled"


def _result(result: TurnResult, decode: Decode | None, *, timed: bool) -> Iterator[str]:
    times = result.times
    reason = f", {result.reason}" if result.reason else ""
    ended = f" by {result.finish_reason}" if result.finish_reason else ""
    who = result.worker or "the router"
    yield f"  {result.outcome.value:10} by {who}: {count(result.tokens)} tokens{ended}{reason}"
    if timed and (legs := _legs(times)):
        yield f"    times    {legs}"
    if result.context_tokens:
        yield f"    cache    {result.cached_tokens} of {result.context_tokens} context tokens"
    if result.tokens:
        logprobs = unpack_logprobs(_whole(result.logprobs))
        mean = f", mean logprob {float(logprobs.mean()):.3f}" if len(logprobs) else ""
        yield f"    policy   {_versions(result.spans)}{mean}"
        if decode is not None:
            yield f"  writes     {_quoted(decode(unpack_tokens(_whole(result.tokens))))}"


def describe_sample(sample: Sample) -> str:
    """Return the line of a sample."""
    if sample.failure:
        return f"sample       failed: {sample.failure}; no reward"
    ended = f"{ENDED[sample.ended]}, " if sample.ended in ENDED else ""
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:g}"
    return (
        f"sample       {reward}, {SOLVED[sample.success]}{ended}"
        f"{len(sample.turns)} turns, {count(sample.tokens)} tokens, {_versions(sample.spans)}"
        f"{f', {sample.info}' if sample.info else ''}"
    )


def describe_outcomes(history: TrajectoryHistory) -> Iterator[str]:
    """Yield the lines of the trajectory's outcomes."""
    if not history.outcomes:
        yield "outcome      none yet"
    for outcome in history.outcomes:
        reason = f": {outcome.reason}" if outcome.reason else ""
        when = f"step {outcome.step}, policy version {outcome.policy_version}"
        yield f"outcome      {outcome.outcome.value} at {when}{reason}"


def _legs(times: TurnTimes) -> str:
    return ", ".join(f"{name} {_ms(seconds)}" for name, seconds in latency_stages(times))


def length_after(turn: EpisodeTurn, seen: int) -> int:
    """Return the number of tokens of the context with the result that finished; `seen` if nothing is known."""
    context = turn.request.context_tokens if turn.request is not None else seen
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


def _whole(packed: bytes) -> bytes:
    """Return the array without an incomplete element at its end: invalid records are printed too."""
    return packed[: ITEM_BYTES * count(packed)]


def _clock(unix_seconds: float) -> str:
    return moment(unix_seconds, "%H:%M:%S.%f")[:-3]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def _quoted(text: str) -> str:
    return repr(text)
