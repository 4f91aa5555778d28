"""Settings of the trainer."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from rose.workers.trainer.menu import (
    ADVANTAGES,
    AGGREGATIONS,
    ALWAYS_ALLOWED,
    LOSSES,
    PART_SETTINGS,
    WHOLE_STEP_ADVANTAGES,
    Parts,
    chosen_parts,
    read_settings,
)

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
    """Algorithm, which turns rewards into advantages and a loss: a name of the menu, such as `grpo`, `rloo`, `dapo`,
    `cispo` or `gspo`, or a class of your own as `package.module:Class` (`workers/trainer/algorithms/__init__.py` has
    the interface). A name of the menu stands for `advantages`, `loss` and `aggregation`."""
    advantages: str = ""
    """Advantages in place of those of `algorithm`: `grpo`, `mean`, `rloo`, `maxrl`, `batch`, `reinforce_plus_plus`,
    `reinforce_plus_plus_baseline` or `pass_at_k`."""
    loss: str = ""
    """Loss in place of that of `algorithm`: `truncated`, `ppo`, `dual_clip`, `cispo`, `gspo`, `sapo`, `dppo` or
    `decoupled`."""
    aggregation: str = ""
    """Mean over the losses of tokens in place of that of `algorithm`: over the minibatch's tokens (`token`), over its
    sequences of each one's mean (`sequence`), or the sum over sequences times `aggregation_tokens` (`constant`)."""
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
    dual_clip: float = 3.0
    """Policy ratio above which tokens of negative advantage have no gradient, with the loss `dual_clip`."""
    gspo_clip_low: float = 0.9997
    """Lower clip bound of the ratio of a sequence, with the loss `gspo`."""
    gspo_clip_high: float = 1.0004
    """Upper clip bound of the ratio of a sequence, with the loss `gspo`."""
    sapo_temperature_positive: float = 1.0
    """Temperature of the gate of tokens with positive advantage, with the loss `sapo`."""
    sapo_temperature_negative: float = 1.05
    """Temperature of the gate of the other tokens, with the loss `sapo`; a higher one closes sooner."""
    dppo_threshold: float = 0.2
    """Change of a token's probability, in the direction of its advantage, above which the token has no gradient, with
    the loss `dppo`."""
    aggregation_tokens: int = 1024
    """Tokens by which a sequence's summed loss is divided, with the aggregation `constant`."""
    pass_at_k: int = 4
    """The k of the advantages `pass_at_k`, below the size of the groups. Groups of k samples or fewer have no
    advantages."""
    kl_coefficient: float = 0.0
    """Weight of the KL divergence from the policy of the model folder in the loss; above 0 the trainer keeps that
    policy as a second model."""
    reject_tokens_below: float | None = None
    """Ratio of trainer to engine below which a token is left out of the loss; unset: none."""
    reject_tokens_above: float | None = None
    """Ratio of trainer to engine above which a token is left out of the loss; unset: none."""
    reject_sequences_below: float | None = None
    """Geometric mean of the ratios of a sequence's tokens below which the sequence is left out; unset: none."""
    reject_sequences_above: float | None = None
    """Geometric mean of the ratios of a sequence's tokens above which the sequence is left out; unset: none."""
    overlong_penalty: float = 0.0
    """Taken from the reward of truncated samples, and of samples with more than `overlong_tokens` sampled tokens; 0:
    none. Whether the rewards of a group are equal is judged without it."""
    overlong_tokens: int = 0
    """Sampled tokens above which the whole `overlong_penalty` is taken; 0: only from truncated samples."""
    overlong_buffer_tokens: int = 0
    """Tokens below `overlong_tokens` over which the penalty grows from 0 in a straight line."""
    max_logprob_difference: float = 0.05
    """Largest mean difference, in nats, between the logprobs of on-policy tokens that the trainer computes and the
    logprobs that one worker's engine, or all engines, recorded. If the difference is larger, an engine computes another
    policy, and the trainer ends before it learns. Raise this for engines of low precision."""
    scale_by_deviation: bool = True
    """Whether `grpo` divides advantages by the standard deviation of their group."""
    stream_gradients: bool = False
    """Whether gradients are computed while a step still waits for groups, instead of after its last one. The step is
    the same, but for the rounding of sums. Only the first of `minibatches` is computed so: the others need its update.
    Advantages over a whole step are refused."""
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
            f"advantages must be one of {', '.join(ADVANTAGES)}": self.advantages in ("", *ADVANTAGES),
            f"loss must be one of {', '.join(LOSSES)}": self.loss in ("", *LOSSES),
            f"aggregation must be one of {', '.join(AGGREGATIONS)}": self.aggregation in ("", *AGGREGATIONS),
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
        _require(in_range)
        self._check_algorithm()

    def _check_algorithm(self) -> None:
        """Check the settings of the menu of algorithms. Raises ValueError."""
        most, longest = self.overlong_tokens, 2**31
        below, above = (
            (self.reject_tokens_below, self.reject_sequences_below),
            (
                self.reject_tokens_above,
                self.reject_sequences_above,
            ),
        )
        in_range = {
            f"dual_clip must be above 1 and at most {LARGEST:g}": 1 < self.dual_clip <= LARGEST,
            "gspo_clip_low must be from 0 to 1": 0 <= self.gspo_clip_low <= 1,
            f"gspo_clip_high must be from 1 to {LARGEST:g}: it is a ratio, 1 + epsilon": 1
            <= self.gspo_clip_high
            <= LARGEST,
            "sapo_temperature_positive must be from 0.001 to 1000": 1e-3 <= self.sapo_temperature_positive <= 1e3,
            "sapo_temperature_negative must be from 0.001 to 1000": 1e-3 <= self.sapo_temperature_negative <= 1e3,
            "dppo_threshold must be above 0 and at most 1": 0 < self.dppo_threshold <= 1,
            "aggregation_tokens must be from 1 to 2^31": 1 <= self.aggregation_tokens <= longest,
            "pass_at_k must be from 1 to 65536": 1 <= self.pass_at_k <= 65_536,
            "kl_coefficient must be from 0 to 1000": 0 <= self.kl_coefficient <= 1e3,
            "reject_tokens_below must be above 0 and at most 1": below[0] is None or 0 < below[0] <= 1,
            f"reject_tokens_above must be from 1 to {LARGEST:g}": above[0] is None or 1 <= above[0] <= LARGEST,
            "reject_sequences_below must be above 0 and at most 1": below[1] is None or 0 < below[1] <= 1,
            f"reject_sequences_above must be from 1 to {LARGEST:g}": above[1] is None or 1 <= above[1] <= LARGEST,
            "overlong_penalty must be from 0 to 1000000": 0 <= self.overlong_penalty <= 1e6,
            "overlong_tokens must be from 0 to 2^31": 0 <= most <= longest,
            "overlong_buffer_tokens must be from 0 to overlong_tokens": 0 <= self.overlong_buffer_tokens <= most,
            "overlong_tokens has no effect without an overlong_penalty: set both, or none": (
                not most or self.overlong_penalty > 0
            ),
            "overlong_penalty has no effect if truncated is leave_out and overlong_tokens is 0: set overlong_tokens": (
                not self.overlong_penalty or most > 0 or self.truncated == "train"
            ),
        }
        _require(in_range)
        self._check_parts()

    def _check_parts(self) -> None:
        """Check that every setting of the menu has an effect. Raises ValueError."""
        parts, chosen = self.parts, {name: getattr(self, name) for name in Parts._fields}
        if parts is None:
            if replaced := [name for name, value in chosen.items() if value]:
                raise ValueError(
                    f"{replaced[0]} ({chosen[replaced[0]]}) replaces a part of an algorithm of the menu, and "
                    f"algorithm ({self.algorithm}) is not in the menu: leave {replaced[0]} out"
                )
            return
        if self.stream_gradients and parts.advantages in WHOLE_STEP_ADVANTAGES:
            raise ValueError(
                f"the advantages {parts.advantages} compare all samples of a step, so no gradient can be computed "
                "before the step's last group: set stream_gradients to false, or choose advantages within a group"
            )
        read = read_settings(parts) | ALWAYS_ALLOWED
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in PART_SETTINGS - read and value != field.default:
                raise ValueError(
                    f"{field.name} ({value:g}) has no effect with advantages {parts.advantages}, loss {parts.loss} and "
                    f"aggregation {parts.aggregation}: leave it out, or choose a part that reads it"
                )

    @property
    def parts(self) -> Parts | None:
        """The parts of a named algorithm; None for a class of the user's own."""
        return chosen_parts(self.algorithm, advantages=self.advantages, loss=self.loss, aggregation=self.aggregation)

    @property
    def rejects(self) -> bool:
        """Whether tokens or sequences are left out by the ratio of trainer to engine."""
        bounds = (
            self.reject_tokens_below,
            self.reject_tokens_above,
            self.reject_sequences_below,
            self.reject_sequences_above,
        )
        return any(bound is not None for bound in bounds)

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

    @property
    def best(self) -> Path:
        """The folder of the policy with the best evaluation."""
        return self.run_folder / "best"


def _require(sentences: Mapping[str, bool]) -> None:
    """Raise ValueError with the first sentence that does not hold."""
    for sentence, holds in sentences.items():
        if not holds:
            raise ValueError(sentence)
