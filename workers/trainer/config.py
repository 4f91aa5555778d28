"""Settings of the trainer."""

from dataclasses import dataclass
from pathlib import Path

PROGRESS_FILES = "step-*.msgpack"
"""Pattern of the last file of each checkpoint in the folder of checkpoints."""

LARGEST = 1e12
"""Upper limit of bounds, for a bound that is meant to have no effect. Products and squares in a step overflow beyond
it."""

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """The trainer: its steps, the loss and the optimizer.

    Raises ValueError for a value out of its range.
    """

    model_folder: Path
    """Hugging Face model folder with the policy that the run begins with (version 0)."""
    run_folder: Path
    """Folder of the run: `metrics.jsonl`, checkpoints and, at the end, the policy. Its name is the run's name."""
    checkpoint_folder: Path | None = None
    """Folder of the checkpoints; unset: `checkpoints` in the run's folder."""
    begin_from: Path | None = None
    """Checkpoints of another run, or of this one in another namespace, with whose newest policy, optimizer and position
    in the learning-rate schedule a run begins that has none of its own; unset: the model folder."""
    model_id: str = "policy"
    """Name of the policy on the log."""
    groups_per_step: int = 16
    """Complete groups of one optimizer step."""
    total_groups: int = 0
    """Number of groups after which the run ends; 0: never."""
    max_staleness: int = 4
    """Largest lag, in versions. Samples with tokens of an older policy are not trained on. The least useful value is 1:
    groups open as a version is published, before executors have the version, so 0 loses their first turns."""
    truncated: str = "train"
    """Treatment of samples that were cut off by `max_turns` or by their context: `train` trains on them with the reward
    that they had by then; `leave_out` settles them as filtered, and no advantage counts them."""
    algorithm: str = "grpo"
    """Algorithm, which turns rewards into advantages and a loss: `grpo`, `rloo` (leave-one-out baseline), or a class of
    your own as `package.module:Class` (`workers/trainer/algorithms/__init__.py` has the interface)."""
    import_paths: tuple[Path, ...] = ()
    """Folders to import your own algorithm from, before the installed packages."""
    learning_rate: float = 1e-4
    """Learning rate of AdamW, where neither warm-up nor decay lowers it."""
    learning_rate_warmup_steps: int = 0
    """Number of first steps in which the learning rate rises linearly. Here and in the decay, steps that apply
    no gradient are not counted."""
    learning_rate_schedule: str = "constant"
    """Learning rate after the warm-up: `constant`, or a decay in a straight line (`linear`) or half a cosine wave
    (`cosine`) to `learning_rate_floor_ratio`, where the learning rate stays. A resumed run follows its present
    settings, from the step that its checkpoint has."""
    learning_rate_decay_steps: int = 0
    """Steps that the decay takes after the warm-up; for `linear` and `cosine` only."""
    learning_rate_floor_ratio: float = 0.0
    """Learning rate at the end of the decay, as a ratio of `learning_rate`. With 0 nothing is learned after the
    decay."""
    clip_low: float = 0.8
    """Lower clip bound of the policy ratio: below it, tokens of negative advantage have no gradient."""
    clip_high: float = 1.28
    """Upper clip bound of the policy ratio: above it, tokens of positive advantage have no gradient."""
    importance_cap: float = 2.0
    """Largest weight of a token for having been sampled by another policy (truncated importance sampling)."""
    max_logprob_difference: float = 0.05
    """Largest mean difference, in nats, between the logprobs of on-policy tokens that the trainer computes and the
    logprobs that one worker's engine, or all engines, recorded. If the difference is larger, an engine computes another
    policy, and the trainer ends before it learns. Raise this for engines of low precision."""
    scale_by_deviation: bool = True
    """Whether `grpo` divides advantages by the standard deviation of their group."""
    minibatches: int = 2
    """Optimizer updates in one step, each on its share of the groups."""
    gradient_norm: float = 1.0
    """Norm above which gradients are scaled down."""
    microbatch_tokens: int = 4096
    """Tokens of one forward and backward pass; this limits memory. Sequences are packed without padding if the model
    allows; otherwise the tokens include padding."""
    recompute_activations: bool = False
    """Whether the backward pass computes each layer again instead of keeping its activations: less memory for about a
    third more time."""
    device: str = "cpu"
    """Where the policy is trained: `cpu`, or `cuda` with one GPU for each rank."""
    compute_dtype: str = "float32"
    """Element type of forward and backward passes, `float32` or `bfloat16`. Master weights, gradients and the optimizer
    are float32. `bfloat16` changes logprobs: `max_logprob_difference` must allow the difference."""
    seed: int = 0
    """Seed of torch."""
    threads: int = 1
    """Threads of torch on the CPU, of each rank."""
    hung_seconds: float = 900.0
    """Time without a finished pass or step after which the trainer counts as hung (`rose health`). The same time
    holds at the end of the run for publishing the last version and exporting the policy."""

    def __post_init__(self) -> None:
        decays = self.learning_rate_schedule != "constant"
        in_range = {
            "groups_per_step must be from 1 to 65536": 1 <= self.groups_per_step <= 65_536,
            "total_groups must be from 0 to 2^53": 0 <= self.total_groups <= 2**53,
            "max_staleness must be from 0 to 2^53": 0 <= self.max_staleness <= 2**53,
            "truncated must be train or leave_out": self.truncated in ("train", "leave_out"),
            "algorithm must be a name": bool(self.algorithm),
            "learning_rate must be above 0 and at most 1": 0 < self.learning_rate <= 1,
            "learning_rate_warmup_steps must be from 0 to 2^53": 0 <= self.learning_rate_warmup_steps <= 2**53,
            "learning_rate_schedule must be constant, linear or cosine": self.learning_rate_schedule in SCHEDULES,
            "learning_rate_decay_steps must be from 0 to 2^53": 0 <= self.learning_rate_decay_steps <= 2**53,
            "learning_rate_decay_steps must be above 0 if learning_rate_schedule is linear or cosine": not decays
            or self.learning_rate_decay_steps > 0,
            "learning_rate_decay_steps must be 0 if learning_rate_schedule is constant": decays
            or not self.learning_rate_decay_steps,
            "learning_rate_floor_ratio must be from 0 to 1": 0 <= self.learning_rate_floor_ratio <= 1,
            "clip_low must be from 0 to 1": 0 <= self.clip_low <= 1,
            f"clip_high must be from 1 to {LARGEST:g}: it is a ratio, 1 + epsilon": 1 <= self.clip_high <= LARGEST,
            f"importance_cap must be above 0 and at most {LARGEST:g}": 0 < self.importance_cap <= LARGEST,
            f"max_logprob_difference must be above 0 and at most {LARGEST:g}": 0
            < self.max_logprob_difference
            <= LARGEST,
            "minibatches must be from 1 to 65536": 1 <= self.minibatches <= 65_536,
            f"gradient_norm must be above 0 and at most {LARGEST:g}": 0 < self.gradient_norm <= LARGEST,
            "microbatch_tokens must be from 1 to 2^31": 1 <= self.microbatch_tokens <= 2**31,
            "device must be cpu or cuda": self.device in ("cpu", "cuda"),
            "compute_dtype must be float32 or bfloat16": self.compute_dtype in ("float32", "bfloat16"),
            "seed must be from 0 to 2^63 - 1": 0 <= self.seed < 2**63,
            "threads must be from 1 to 4096": 1 <= self.threads <= 4_096,
            "hung_seconds must be above 0 and at most 1e9": 0 < self.hung_seconds <= 1e9,
        }
        for sentence, holds in in_range.items():
            if not holds:
                raise ValueError(sentence)

    @property
    def has_checkpoint(self) -> bool:
        """Whether a whole checkpoint is there."""
        return any(self.checkpoints.glob(PROGRESS_FILES))

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.checkpoint_folder or self.run_folder / "checkpoints"

    @property
    def exported(self) -> Path:
        """The folder of the final policy, which is there once the run is complete."""
        return self.run_folder / "model"
