"""The records that an event of a trajectory produces: the next request, or the sample that ends the trajectory. Pure.

Keeps true
- An infrastructure failure is a sample without a reward and with the reason, never a reward of 0.
- A trajectory that has ended without a reward takes no further event: it gets one sample.
- No record is written that its readers would refuse. A value of the environment that no record can hold fails the
  trajectory; a sample that cannot be encoded is replaced by one with only the reason.
"""

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from rose.schemas.arrays import count
from rose.schemas.errors import RecordError
from rose.schemas.limits import MAX_INFO_BYTES, MAX_REWARD
from rose.schemas.progress import Applied, EnvSnapshot
from rose.schemas.prompts import Prompt, trajectory_id
from rose.schemas.samples import Ending, Sample
from rose.schemas.turns import ContextFields, TurnRequest, TurnResult, context_fields
from rose.schemas.wire import EncodedRecord, encoded
from rose.workers.environments.trajectory import Trajectory, TrajectoryRules, digest_of

FAILURE_CHARACTERS = 1_000
"""Longest failure text of a sample; a longer exception message is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one environment step."""

    observation: bytes
    """Tokens of the observation, framed and packed."""
    reward: float
    done: bool
    success: bool | None
    info: dict[str, Any]
    state: bytes
    """Snapshot of the environment after the step."""
    environment_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingRecords:
    """Records of one event of a trajectory.

    Either a request, with a snapshot if the state has changed, or the sample that ends the trajectory. Both may come
    with a request that stops the turn which was requested.
    """

    request: EncodedRecord[TurnRequest] | None = None
    snapshot: EncodedRecord[EnvSnapshot] | None = None
    sample: EncodedRecord[Sample] | None = None
    stop: EncodedRecord[TurnRequest] | None = None
    """Withdraws the turn, or puts the turn on hold."""


NOTHING = OutgoingRecords()


def first_request(trajectory: Trajectory, rules: TrajectoryRules, now: float) -> OutgoingRecords:
    """The snapshot and request that open a trajectory, or the sample of a failure if they cannot be written."""
    tokens = count(trajectory.tokens)
    if tokens >= rules.max_context_tokens:
        room = f"leave no room in max_context_tokens {rules.max_context_tokens}"
        return fail_trajectory(trajectory, f"the first observation's {tokens} tokens {room}", rules, now)
    return _next_turn(trajectory, rules, now, changed=True)


def advance(
    trajectory: Trajectory,
    result: TurnResult,
    stepped: StepResult,
    *,
    offset: int,
    rules: TrajectoryRules,
    applied_at: float,
    now: float,
) -> OutgoingRecords:
    """Apply the result at `offset` and its environment step; the next request, or the sample at the end.

    `applied_at`, `now`: Unix seconds.
    """
    ending = _ending(trajectory, result, stepped, rules)
    applied = Applied(
        offset=offset,
        observed=0 if ending else count(stepped.observation),
        applied_at=applied_at,
        environment_seconds=stepped.environment_seconds,
        reward=trajectory.reward + stepped.reward,
        committed_at=trajectory.committed_at,
    )
    trajectory.apply_result(result, applied)
    if not abs(applied.reward) <= MAX_REWARD:
        reason = f"the environment's reward is {stepped.reward:g}: scale it down to {MAX_REWARD:g} in all"
        return fail_trajectory(trajectory, reason, rules, now)
    if ending is not None:
        return _ended(trajectory, stepped, ending, rules, now)
    trajectory.observe(stepped.observation)
    digest = digest_of(stepped.state)
    changed = digest != trajectory.digest
    if changed:
        trajectory.state, trajectory.digest = stepped.state, digest
    return _next_turn(trajectory, rules, now, changed=changed)


def request_again(trajectory: Trajectory, rules: TrajectoryRules, now: float) -> OutgoingRecords:
    """Request the current turn again with the whole context: its chain could not be read back, or it was on hold."""
    trajectory.anchor()
    return _next_turn(trajectory, rules, now, changed=False)


def end_at_result(
    trajectory: Trajectory,
    result: TurnResult,
    ending: Ending,
    failure: str = "",
    *,
    offset: int,
    rules: TrajectoryRules,
    applied_at: float,
    now: float,
) -> OutgoingRecords:
    """End the trajectory at this result without a reward, for example because the environment failed.

    The sampled tokens and device seconds are kept. `failure`: why the infrastructure failed; empty if it did not.
    """
    applied = Applied(
        offset=offset,
        observed=0,
        applied_at=applied_at,
        environment_seconds=0.0,
        reward=trajectory.reward,
        committed_at=trajectory.committed_at,
    )
    trajectory.apply_result(result, applied)
    return _without_reward(trajectory, ending, failure, rules, now)


def fail_trajectory(trajectory: Trajectory, failure: str, rules: TrajectoryRules, now: float) -> OutgoingRecords:
    """End the trajectory with an infrastructure failure: a sample with the tokens so far and no reward."""
    return _without_reward(trajectory, Ending.FAILED, failure, rules, now)


def end_early(
    trajectory: Trajectory, ending: Ending, rules: TrajectoryRules, now: float, *, failure: str = ""
) -> OutgoingRecords:
    """End the trajectory while its turn is under way: a sample without a reward, and the withdrawal of the turn.

    `failure`: why the infrastructure failed; empty if it did not.
    """
    stop = _stop(trajectory, rules, now, withdrawn=True)
    return replace(_without_reward(trajectory, ending, failure, rules, now), stop=stop)


def fail_unrecovered(
    prompt: Prompt, index: int, failure: str, rules: TrajectoryRules, now: float, *, home: int, turn: int
) -> OutgoingRecords:
    """End a trajectory that could not be rebuilt: a sample without tokens, and the withdrawal of its turn.

    A turn on hold would stay in the router for ever.
    """
    own_id = trajectory_id(prompt.group_id, index)
    lost = Trajectory(trajectory_id=own_id, index=index, prompt=prompt, home=home, state=b"", digest=b"", turn=turn)
    return replace(fail_at_opening(prompt, index, failure, rules, now), stop=_stop(lost, rules, now, withdrawn=True))


def put_on_hold(
    trajectory: Trajectory, rules: TrajectoryRules, now: float, written: OutgoingRecords = NOTHING
) -> OutgoingRecords:
    """Put the turn that is requested on hold. `written`: records with the request of this turn, if it is new."""
    return replace(written, stop=_stop(trajectory, rules, now, hold=True))


def _stop(
    trajectory: Trajectory, rules: TrajectoryRules, now: float, *, withdrawn: bool = False, hold: bool = False
) -> EncodedRecord[TurnRequest]:
    request = _turn_request(trajectory, context_fields(b""), rules, now)
    return encoded(msgspec.structs.replace(request, withdrawn=withdrawn, hold=hold))


def _turn_request(trajectory: Trajectory, context: ContextFields, rules: TrajectoryRules, now: float) -> TurnRequest:
    return TurnRequest(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.prompt.group_id,
        home=trajectory.home,
        environment=trajectory.prompt.environment,
        turn=trajectory.turn,
        **context,
        sampling=trajectory.sampling,
        requested_at=now,
        patience_seconds=rules.turn_patience_seconds,
        pinned_version=trajectory.prompt.pinned_version,
    )


def _without_reward(
    trajectory: Trajectory, ending: Ending, failure: str, rules: TrajectoryRules, now: float
) -> OutgoingRecords:
    trajectory.applying = True  # also behind a step that was applied: nothing may end it again before the commit
    try:
        return OutgoingRecords(sample=encoded(_sample(trajectory, rules, now, ending, failure=failure)))
    except RecordError as error:
        return fail_at_opening(trajectory.prompt, trajectory.index, failure or str(error), rules, now)


def fail_at_opening(prompt: Prompt, index: int, failure: str, rules: TrajectoryRules, now: float) -> OutgoingRecords:
    """The sample of a trajectory that failed before it had any tokens, or whose tokens cannot be encoded."""
    nothing = Trajectory(
        trajectory_id=trajectory_id(prompt.group_id, index), index=index, prompt=prompt, home=0, state=b"", digest=b""
    )
    return OutgoingRecords(sample=encoded(_sample(nothing, rules, now, Ending.FAILED, failure=failure)))


def _next_turn(trajectory: Trajectory, rules: TrajectoryRules, now: float, *, changed: bool) -> OutgoingRecords:
    """The request of the current turn, with a snapshot if the state has changed."""
    trajectory.begin_turn(rules.max_context_tokens)
    context = context_fields(trajectory.tokens, trajectory.chain, known_tokens=trajectory.requested)
    request = _turn_request(trajectory, context, rules, now)
    try:
        ready = encoded(request)
    except RecordError as error:
        return fail_trajectory(trajectory, f"the turn cannot be asked for: {error}", rules, now)
    if not changed:
        return OutgoingRecords(request=ready)
    snapshot = EnvSnapshot(trajectory_id=trajectory.trajectory_id, digest=trajectory.digest, state=trajectory.state)
    try:
        return OutgoingRecords(request=ready, snapshot=encoded(snapshot))
    except RecordError as error:
        return fail_trajectory(trajectory, f"the environment's state cannot be saved: {error}", rules, now)


def _ending(trajectory: Trajectory, result: TurnResult, stepped: StepResult, rules: TrajectoryRules) -> Ending | None:
    if stepped.done:
        return Ending.DONE
    if trajectory.turn + 1 >= trajectory.prompt.max_turns:
        return Ending.MAX_TURNS
    seen = count(trajectory.tokens) + count(result.tokens) + count(stepped.observation)
    return Ending.CONTEXT if seen >= rules.max_context_tokens else None


def _ended(
    trajectory: Trajectory, stepped: StepResult, ending: Ending, rules: TrajectoryRules, now: float
) -> OutgoingRecords:
    sample = _sample(
        trajectory,
        rules,
        now,
        ending,
        reward=trajectory.reward,
        success=None if stepped.success is None else stepped.success and stepped.done,
        info=stepped.info,
    )
    try:
        ready = encoded(sample)
        _check_info_size(stepped.info)
    except RecordError as error:
        return fail_trajectory(trajectory, f"the sample cannot be written: {error}", rules, now)
    return OutgoingRecords(sample=ready)


def _check_info_size(info: dict[str, Any]) -> None:
    """Raises RecordError."""
    size = len(msgspec.msgpack.encode(info))
    if size > MAX_INFO_BYTES:
        raise RecordError(f"the environment's info has {size} bytes, {MAX_INFO_BYTES} are allowed")


def _sample(
    trajectory: Trajectory,
    rules: TrajectoryRules,
    now: float,
    ended: Ending,
    *,
    reward: float | None = None,
    success: bool | None = None,
    failure: str = "",
    info: dict[str, Any] | None = None,
) -> Sample:
    return Sample(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.prompt.group_id,
        group_size=trajectory.prompt.group_size,
        model_id=rules.model_id,
        environment=trajectory.prompt.environment,
        seed=trajectory.prompt.task_seed,
        **trajectory.context.record_fields(),
        loss_mask=trajectory.context.loss_mask,
        turns=tuple(trajectory.turns),
        reward=reward,
        success=success,
        failure=failure[:FAILURE_CHARACTERS].encode(errors="replace").decode(),  # UTF-8 cannot encode some characters
        info=info or {},
        device_seconds=trajectory.device_seconds,
        completed_at=now,
        ended=ended,
    )
