"""Settings of evaluations during training, which the evaluator and the trainer share."""

import re
from dataclasses import dataclass
from pathlib import Path

from rose.schemas.evaluations import MAX_PASS_AT, Metric
from rose.schemas.limits import MAX_GROUP_SIZE

METRICS = tuple(metric.value for metric in Metric)

SET_CHARACTERS = 40
"""Most characters of the name of a set."""

NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{SET_CHARACTERS}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """Evaluations during training: a set of prompts, sampled by every n-th version (`rose evaluator`).

    Raises ValueError for a value out of its range.
    """

    every_versions: int = 0
    """Versions whose number is a multiple of this are evaluated, so also version 0, the policy that the run begins
    with. 0: no evaluations."""
    name: str = "held-out"
    """Name of the set in results, metrics and charts."""
    prompts: Path | None = None
    """JSONL file with the prompts of the set, as for `rose submit`; greedy sampling is allowed. Unset: the first
    `tasks` held-out tasks of the section `tasks`."""
    tasks: int = 64
    """Number of held-out tasks, where no file is given."""
    samples: int = 4
    """Samples of each prompt: the k of avg@k. The `group_size` of the prompts does not count."""
    pass_at: tuple[int, ...] = ()
    """Values of k for which pass@k is estimated; empty: 1, 2, 4 and so on up to `samples`."""
    metric: str = "success"
    """Figure that decides which version is the best: `success` (avg@k), `pass` (pass@k for the largest k) or
    `reward`."""
    stop_after: int = 0
    """Evaluations in a row without improvement after which the run ends (early stop); 0: never."""
    min_improvement: float = 0.0
    """Least increase of the metric over the best one that counts as an improvement; an increase has to be larger."""
    window_prompts: int = 64
    """Prompts of the set that are sampled at once."""
    hold_seconds: float = 3600.0
    """Longest time that the trainer holds the next version back for an evaluation. Then it goes on; the evaluation
    cannot be completed, and has no result."""
    model_id: str = "policy"
    """Name of the policy on the log."""

    def __post_init__(self) -> None:
        in_range = {
            "every_versions must be from 0 to 2^53": 0 <= self.every_versions <= 2**53,
            f"name must have 1 to {SET_CHARACTERS} characters, of A-Z a-z 0-9 . _ -": NAME.fullmatch(self.name)
            is not None,
            "tasks must be from 1 to 1000000": 1 <= self.tasks <= 1_000_000,
            f"samples must be from 1 to {MAX_GROUP_SIZE}": 1 <= self.samples <= MAX_GROUP_SIZE,
            f"pass_at must have at most {MAX_PASS_AT} different numbers from 1 to samples": _are_ks(
                self.pass_at, self.samples
            ),
            f"metric must be one of {', '.join(METRICS)}": self.metric in METRICS,
            "stop_after must be from 0 to 2^53": 0 <= self.stop_after <= 2**53,
            "min_improvement must be from 0 to 1e12": 0 <= self.min_improvement <= 1e12,
            "window_prompts must be from 1 to 1000000": 1 <= self.window_prompts <= 1_000_000,
            "hold_seconds must be from 1 to 1e9": 1 <= self.hold_seconds <= 1e9,
        }
        for sentence, holds in in_range.items():
            if not holds:
                raise ValueError(sentence)

    def is_due(self, version: int) -> bool:
        """Return whether this version is evaluated."""
        return self.every_versions > 0 and version >= 0 and version % self.every_versions == 0

    @property
    def ks(self) -> tuple[int, ...]:
        """The values of k of pass@k, in order."""
        if self.pass_at:
            return tuple(sorted(self.pass_at))
        return tuple(2**power for power in range(self.samples.bit_length()) if 2**power <= self.samples)


def _are_ks(ks: tuple[int, ...], samples: int) -> bool:
    return len(ks) == len(set(ks)) <= MAX_PASS_AT and all(1 <= k <= samples for k in ks)
