"""Settings of the trainer."""

from dataclasses import dataclass
from pathlib import Path

LARGEST = 1e12
"""Upper limit of bounds, for a bound that is meant to have no effect. Products and squares in a step overflow beyond
it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """The trainer: what a step is and how it learns. Raises ValueError for a value out of its range."""

    model_folder: Path
    """Hugging Face model folder with the policy that the run begins with; version 0."""
    run_folder: Path
    """Where the run keeps `metrics.jsonl`, its checkpoints and, at its end, the policy. Its name names the run."""
    checkpoint_folder: Path | None = None
    """Where checkpoints are kept; unset: `checkpoints` in the run's folder."""
    begin_from: Path | None = None
    """Checkpoints of another run, or of this one in another namespace, with whose newest policy and optimizer a run
    begins that has none of its own; unset: the model folder."""
    model_id: str = "policy"
    """Names the policy on the log."""
    groups_per_step: int = 16
    """Complete groups of one optimizer step."""
    total_groups: int = 0
    """The run ends after this many groups; 0 is never."""
    max_staleness: int = 4
    """Samples with tokens of a policy older than this many versions are not learned from."""
    truncated: str = "train"
    """What becomes of samples that were cut off by `max_turns` or by their context: `train` takes them as the others,
    with the reward that they had by then; `leave_out` settles them as filtered, and no advantage counts them."""
    learning_rate: float = 1e-4
    """Learning rate of AdamW."""
    clip_low: float = 0.8
    """Lowest ratio of the policy to that which sampled, at which a token of negative advantage is pulled down."""
    clip_high: float = 1.28
    """Highest such ratio at which a token of positive advantage is pushed up."""
    importance_cap: float = 2.0
    """Largest weight of a token for having been sampled by another policy (truncated importance sampling)."""
    scale_by_deviation: bool = True
    """Whether advantages are divided by the standard deviation of their group."""
    minibatches: int = 2
    """Optimizer updates in a step, each on its share of the groups."""
    gradient_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    microbatch_tokens: int = 4096
    """Padded tokens of one forward and backward pass: bounds memory."""
    seed: int = 0
    """Seeds torch."""
    threads: int = 1
    """Threads that torch computes with on the CPU."""
    hung_seconds: float = 900.0
    """A step is taken to hang (`rose health`) when no microbatch has ended for so long, nor the step itself; so is the
    run's end, when the last version is not on the log or the policy not exported."""

    def __post_init__(self) -> None:
        in_range = {
            "groups_per_step must be from 1 to 65536": 1 <= self.groups_per_step <= 65_536,
            "total_groups must be from 0 to 2^53": 0 <= self.total_groups <= 2**53,
            "max_staleness must be from 0 to 2^53": 0 <= self.max_staleness <= 2**53,
            "truncated must be train or leave_out": self.truncated in ("train", "leave_out"),
            "learning_rate must be above 0 and at most 1": 0 < self.learning_rate <= 1,
            "clip_low must be from 0 to 1": 0 <= self.clip_low <= 1,
            f"clip_high must be from 1 to {LARGEST:g}": 1 <= self.clip_high <= LARGEST,
            f"importance_cap must be above 0 and at most {LARGEST:g}": 0 < self.importance_cap <= LARGEST,
            "minibatches must be from 1 to 65536": 1 <= self.minibatches <= 65_536,
            f"gradient_norm must be above 0 and at most {LARGEST:g}": 0 < self.gradient_norm <= LARGEST,
            "microbatch_tokens must be from 1 to 2^31": 1 <= self.microbatch_tokens <= 2**31,
            "seed must be from 0 to 2^63 - 1": 0 <= self.seed < 2**63,
            "threads must be from 1 to 4096": 1 <= self.threads <= 4_096,
            "hung_seconds must be above 0 and at most 1e9": 0 < self.hung_seconds <= 1e9,
        }
        for sentence, holds in in_range.items():
            if not holds:
                raise ValueError(sentence)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.checkpoint_folder or self.run_folder / "checkpoints"

    @property
    def exported(self) -> Path:
        """The folder of the final policy, which is there once the run is complete."""
        return self.run_folder / "model"
