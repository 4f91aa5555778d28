"""Short constructors of samples as the trainer reads them."""

from collections.abc import Sequence

from rose.schemas.arrays import pack_logprobs, pack_tokens
from rose.schemas.prompts import Sampling, trajectory_id
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.samples import Ending, Sample, SampleTurn
from rose.schemas.turns import TurnTimes


def turns_of(mask: Sequence[int], sampling: Sampling | None = None) -> tuple[SampleTurn, ...]:
    """Return the turns of a loss mask: each run of ones is a turn."""
    edges = [i for i, (a, b) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if a != b]
    return tuple(
        SampleTurn(
            turn=number,
            attempt=0,
            worker="w",
            start=start,
            end=end,
            cached_tokens=0,
            sampling=sampling or Sampling(),
            times=TurnTimes(),
            environment_seconds=0.0,
        )
        for number, (start, end) in enumerate(zip(edges[::2], edges[1::2], strict=True))
    )


def sample(
    group: str = "g",
    index: int = 0,
    *,
    size: int = 4,
    reward: float | None = 0.0,
    version: int = 0,
    tokens: Sequence[int] = (1, 2, 3),
    mask: Sequence[int] | None = None,
    sampling: Sampling | None = None,
    failure: str = "",
    model_id: str = "policy",
    ended: Ending = Ending.DONE,
) -> Sample:
    """Return a sample. By default the first token is observed and the others are sampled; `mask` overrides that."""
    drawn = [int(at > 0) for at in range(len(tokens))] if mask is None else list(mask)
    return Sample(
        trajectory_id=trajectory_id(group, index),
        group_id=group,
        group_size=size,
        model_id=model_id,
        environment="calculator",
        seed=1,
        tokens=pack_tokens(tokens),
        loss_mask=bytes(drawn),
        logprobs=pack_logprobs([-0.5 * on for on in drawn]),
        spans=(VersionSpan(1, len(tokens), version),) if any(drawn) else (),
        turns=turns_of(drawn, sampling),
        reward=reward,
        success=reward == 1.0,
        failure=failure,
        completed_at=0.0,
        ended=ended,
    )
