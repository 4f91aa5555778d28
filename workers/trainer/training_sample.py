"""A trajectory as a training step and an algorithm see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from rose.schemas.arrays import unpack_logprobs, unpack_tokens
from rose.schemas.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One trajectory. All lists have one entry per token."""

    tokens: Sequence[int]
    loss_mask: Sequence[int]
    """1 where the policy sampled the token."""
    behaviour_logprobs: Sequence[float]
    """Logprobs that the engine recorded; ignored where the mask is 0."""
    temperatures: Sequence[float]
    """Sampling temperature of each token, above 0; ignored where the mask is 0."""
    reward: float
    oldest_version: int = -1
    """The oldest policy version that sampled one of the tokens; -1 if that is not known."""
    workers: Sequence[str] = ()
    """The worker that ended the turn of each token; empty if that is not known."""

    @property
    def sampled_by(self) -> list[str]:
        """The worker of each sampled token, in order; empty names if the workers are not known."""
        workers = self.workers or [""] * len(self.tokens)
        return [worker for worker, sampled in zip(workers, self.loss_mask, strict=True) if sampled]

    @classmethod
    def of(cls, sample: Sample) -> Self:
        """Convert a Sample record that `selection.select_samples` marked as trained."""
        assert sample.reward is not None
        tokens = unpack_tokens(sample.tokens)
        temperatures, workers = [1.0] * len(tokens), [""] * len(tokens)
        for turn in sample.turns:
            workers[turn.start : turn.end] = [turn.worker] * (turn.end - turn.start)
            temperatures[turn.start : turn.end] = [turn.sampling.temperature] * (turn.end - turn.start)
        return cls(
            tokens=tokens,
            loss_mask=list(sample.loss_mask),
            behaviour_logprobs=unpack_logprobs(sample.logprobs).tolist(),
            temperatures=temperatures,
            reward=sample.reward,
            oldest_version=sample.oldest_version,
            workers=workers,
        )
