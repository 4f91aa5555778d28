"""Short constructors of prompts, results and steps of one trajectory."""

from rose.schemas.arrays import pack_logprobs, pack_tokens
from rose.schemas.prompts import Prompt, Sampling
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.samples import Sample
from rose.schemas.turns import Refusal, TurnOutcome, TurnRequest, TurnResult, TurnTimes
from rose.schemas.wire import decode
from rose.workers.environments.trajectory import Trajectory, TrajectoryRules, begin, with_full_sampling
from rose.workers.environments.transitions import OutgoingRecords, StepResult, advance

RULES = TrajectoryRules(
    model_id="policy",
    sampling=Sampling(stop_token_ids=(2,)),
    turn_patience_seconds=60.0,
    max_context_tokens=400,
)


def prompt_of(**fields: object) -> Prompt:
    known = {"group_id": "g", "group_size": 3, "environment": "calculator", "seed": 1, "max_turns": 6}
    return Prompt(**{**known, **fields})  # type: ignore[arg-type]


def opened(prompt: Prompt, index: int = 0, *, observation: tuple[int, ...] = (5, 6)) -> Trajectory:
    whole = with_full_sampling(prompt, RULES.sampling)
    return begin(whole, index, home=0, observation=pack_tokens(observation), state=b"start")


def result_of(
    trajectory: Trajectory,
    *,
    turn: int | None = None,
    attempt: int = 0,
    outcome: TurnOutcome = TurnOutcome.COMPLETED,
    tokens: tuple[int, ...] = (7, 8, 2),
    refusal: Refusal | None = None,
) -> TurnResult:
    return TurnResult(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.prompt.group_id,
        home=0,
        turn=trajectory.turn if turn is None else turn,
        attempt=attempt,
        outcome=outcome,
        refusal=refusal,
        worker=f"w{attempt}",
        tokens=pack_tokens(tokens),
        logprobs=pack_logprobs([-token / 8 for token in tokens]),
        spans=(VersionSpan(0, 1, attempt), VersionSpan(1, len(tokens), attempt + 1)),
        cached_tokens=attempt,
        times=TurnTimes(requested_at=1.0, finished_at=2.0),
        device_seconds={"dedicated": 0.25 * attempt},
    )


def stepped(
    *, observation: tuple[int, ...] = (9,), reward: float = 0.0, done: bool = False, state: bytes = b"start"
) -> StepResult:
    return StepResult(
        observation=pack_tokens(observation),
        reward=reward,
        done=done,
        success=done,
        info={"done": done},
        state=state,
        environment_seconds=0.125,
    )


def live(
    trajectory: Trajectory, result: TurnResult, step: StepResult, *, rules: TrajectoryRules = RULES
) -> OutgoingRecords:
    return advance(trajectory, result, step, offset=0, rules=rules, applied_at=3.0, now=4.0)


def request_of(written: OutgoingRecords) -> TurnRequest:
    """Return the written request as its readers decode it."""
    assert written.request is not None
    return decode(TurnRequest, written.request.wire)


def sample_of(written: OutgoingRecords) -> Sample:
    """Return the written sample as its readers decode it."""
    assert written.sample is not None
    return decode(Sample, written.sample.wire)
