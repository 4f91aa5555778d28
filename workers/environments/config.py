"""Settings of an environment worker."""

import math
from dataclasses import dataclass
from pathlib import Path

from rose.schemas.limits import MAX_CONTEXT_TOKENS, MAX_DEFERRALS, MAX_GROUP_SIZE
from rose.schemas.prompts import MIN_TEMPERATURE

ISOLATIONS = ("auto", "process", "thread")

LEAST_MEMORY = 2**29
"""Least limit of a process's memory, in bytes: a process needs memory to start."""

LONGEST_SECONDS = 7 * 86_400.0
"""Upper bound of `step_timeout_seconds` and `turn_patience_seconds`."""


def members_to_open(group_size: int, ratio: float) -> int:
    """Return the number of trajectories with which a group is opened. `ratio`: see `members_ratio`."""
    exact = round(group_size * ratio, 6)  # 50 * 1.1 is 55.00000000000001
    return min(MAX_GROUP_SIZE, math.ceil(exact))


def deferred_versions(groups_ratio: float) -> int:
    """Return by how many versions a deferred group is old when its round comes: one for each short round before it."""
    return 0 if groups_ratio <= 1 else math.ceil(1 / (groups_ratio - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """One environment worker.

    Raises ValueError for a value out of its range.
    """

    model_folder: Path
    """Hugging Face model folder. Its tokenizer, stop tokens and `turn_format.json` convert text to tokens and back."""
    model_id: str = "policy"
    """Name of the policy that samples; every sample contains it."""
    temperature: float = 1.0
    """Sampling temperature of prompts that set none. Greedy sampling cannot be trained on."""
    top_p: float = 1.0
    """Nucleus sampling of prompts that set none. A value below 1 cannot be trained on."""
    max_turn_tokens: int = 256
    """Most tokens of one turn, for prompts that set no limit."""
    max_context_tokens: int = 1024
    """Longest context of a trajectory; a trajectory whose context has no room left ends. At most
    `executor.max_model_len`."""
    window_groups: int = 16
    """Groups that may be open and unsettled at once; at least `trainer.groups_per_step`. This limits staleness."""
    members_ratio: float = 1.0
    """Trajectories with which a group is opened, relative to the size that its prompt asks for. Once as many as asked
    for have ended with a reward, the others are ended, with the outcome `surplus`: a slow or failing environment then
    delays no group, but short trajectories are preferred."""
    groups_ratio: float = 1.0
    """Groups that a short round opens, relative to `window_groups`. Above 1, the groups that have not ended when a step
    of the trainer is done are deferred: their turns are on hold until a round that runs them together (tail
    batching)."""
    max_deferrals: int = 1
    """How often a group may be deferred."""
    trajectory_deadline_seconds: float = 0.0
    """Longest time from the opening of a group to the end of its trajectories; 0 for no limit. A trajectory that takes
    longer fails (no reward)."""
    max_live_environments: int = 256
    """Environments of one kind that are held at once. Above this number the longest unused are closed, and restored
    later."""
    step_timeout_seconds: float = 60.0
    """Longest time of a reset, step, snapshot or restore. A longer one fails its trajectory (no reward)."""
    turn_patience_seconds: float = 300.0
    """Longest time that a turn waits for an executor. A longer wait fails its trajectory (no reward); a running turn
    may take longer."""
    environments: tuple[str, ...] = ()
    """Your own environments (`package.module:Class`) that prompts may name, in addition to the built-in ones."""
    import_paths: tuple[Path, ...] = ()
    """Folders to import your own environments from, before the installed packages."""
    python: Path | None = None
    """Interpreter of the processes in which environments run, such as `.venv-verifiers/bin/python`; default: that of
    the worker. ROSE must be installed for it in the worker's version. Environments may need other packages than
    vLLM."""
    max_processes: int = 4
    """Most processes or threads for one kind of environments. One runs all of them; further ones are started while it
    is blocked, or to find the environment that ends it."""
    process_memory_bytes: int = 0
    """Most private memory (RLIMIT_DATA) of a process of environments, and of each child process; 0 for no limit. Set it
    in containers with `memory.oom.group`: if memory runs out there, the kernel ends all processes of the container."""
    sandbox_store: Path | None = None
    """Folder that all environment workers share, with the checkpoints of sandboxes that are too large for the log.
    Without it, a sandbox whose files take more than 700,000 bytes, compressed, may not be restored."""
    sandbox_store_seconds: float = 3600.0
    """Time that the checkpoints of a sandbox without a worker are kept; more than a worker takes to recover."""
    sandbox_bytes_per_second: int = 67_108_864
    """Most bytes that the workers of one host write together to `sandbox_store`, per second."""
    isolation: str = "auto"
    """Where environments run. `process`: each kind in a process of its own, whose end does not end the worker.
    `thread`: in the worker, which is cheaper. `auto`: your own environments in processes, built-in ones in threads."""

    def __post_init__(self) -> None:
        in_range = {
            f"temperature must be from {MIN_TEMPERATURE} to 2": MIN_TEMPERATURE <= self.temperature <= 2,
            "top_p must be 1: the loss cannot weigh what is cut off": self.top_p == 1,
            "max_turn_tokens must be from 1 to 65536": 1 <= self.max_turn_tokens <= 65_536,
            f"max_context_tokens must be from 2 to {MAX_CONTEXT_TOKENS}": 2
            <= self.max_context_tokens
            <= MAX_CONTEXT_TOKENS,
            "window_groups must be from 1 to 1000000": 1 <= self.window_groups <= 1_000_000,
            "members_ratio must be from 1 to 4": 1 <= self.members_ratio <= 4,
            "groups_ratio must be from 1 to 4": 1 <= self.groups_ratio <= 4,
            f"max_deferrals must be from 1 to {MAX_DEFERRALS}": 1 <= self.max_deferrals <= MAX_DEFERRALS,
            "trajectory_deadline_seconds must be 0 with a groups_ratio above 1: a deferred group waits": (
                self.groups_ratio == 1 or self.trajectory_deadline_seconds == 0
            ),
            "trajectory_deadline_seconds must be 0, or from 0.01 to 604800": self.trajectory_deadline_seconds == 0
            or 0.01 <= self.trajectory_deadline_seconds <= LONGEST_SECONDS,
            "max_live_environments must be from 1 to 1000000": 1 <= self.max_live_environments <= 1_000_000,
            "step_timeout_seconds must be from 0.01 to 604800": 0.01 <= self.step_timeout_seconds <= LONGEST_SECONDS,
            "turn_patience_seconds must be from 0.01 to 604800": 0.01 <= self.turn_patience_seconds <= LONGEST_SECONDS,
            "max_processes must be from 1 to 256": 1 <= self.max_processes <= 256,
            f"process_memory_bytes must be 0, or from {LEAST_MEMORY} to 2^50": self.process_memory_bytes == 0
            or LEAST_MEMORY <= self.process_memory_bytes <= 2**50,
            "sandbox_store_seconds must be from 1 to 604800": 1 <= self.sandbox_store_seconds <= LONGEST_SECONDS,
            "sandbox_bytes_per_second must be from 2^16 to 2^40": 2**16 <= self.sandbox_bytes_per_second <= 2**40,
            "isolation must be auto, process or thread": self.isolation in ISOLATIONS,
            "isolation must be auto or process where python is set": self.python is None or self.isolation != "thread",
        }
        for sentence, holds in in_range.items():
            if not holds:
                raise ValueError(sentence)
