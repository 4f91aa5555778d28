"""Does the policy learn: the demo's algorithm in one plain process, without a bus.

Run `python -m bench.learning --reference`, with `--seed` for another run and `--lag` for samples that are so many
policy versions old; `--json FILE` keeps the curve. All else is the demo's own configuration, or `--config FILE`.

Keeps true: the same prompts, held-out tasks, loss, step and settings as over the bus; only the engine is another, plain
transformers, and every sample of a step is `--lag` versions old, where over the bus that differs from sample to sample.
"""

import argparse
import copy
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from pipeline.command.config import Settings, load
from pipeline.command.demo import CONFIGURATION
from pipeline.command.options import Common
from pipeline.command.tasks import training_prompts
from schemas.errors import RoseError
from schemas.prompts import Prompt
from workers.environments.registry import load_environment
from workers.environments.turn_format import TurnFormat
from workers.trainer.loop import step_settings
from workers.trainer.policy import load_policy
from workers.trainer.sampler import Task, Trajectory, sample_trajectories
from workers.trainer.step import TrainingSample, make_optimizer, train_step

HELD_OUT_EVERY_STEPS = 10
"""How often the curve shows held-out success."""


@dataclass(slots=True, kw_only=True)
class Point:
    """One step of a curve."""

    step: int
    reward: float
    """Mean over the step's samples, as they were sampled."""
    held_out: float | None
    """Success on the held-out tasks after the step; None where it was not measured."""
    turns: float
    """Mean of a trajectory."""
    groups_with_signal: int
    gradient_norm: float
    kl_behaviour: float
    clipped_share: float
    sampling_seconds: float
    training_seconds: float


@dataclass(slots=True, kw_only=True)
class Curve:
    """One run."""

    seed: int
    lag: int
    before: float
    after: float = 0.0
    held_out_tasks: int
    points: list[Point] = field(default_factory=list)


class Reference:
    """The algorithm in one process."""

    def __init__(self, settings: Settings, *, lag: int) -> None:
        """Raises UsageError for a broken model folder or an unknown environment."""
        self._settings = settings
        self._turn_format = TurnFormat(settings.model.folder)
        self._model = load_policy(settings.model.folder)
        self._sampler = load_policy(settings.model.folder)
        self._optimizer = make_optimizer(self._model, learning_rate=settings.trainer.learning_rate)
        self._versions: deque[dict[str, Any]] = deque([self._version()], maxlen=lag + 1)
        self._generator = torch.Generator().manual_seed(settings.run.seed)
        self._environment = load_environment(settings.tasks.environment)

    def held_out(self) -> float:
        """Success of the present policy on the held-out tasks, with the same luck every time."""
        tasks = self._settings.tasks
        seeds = range(tasks.held_out_seed, tasks.held_out_seed + tasks.held_out)
        played = self._play(self._model, seeds, torch.Generator().manual_seed(0))
        return sum(one.last is not None and one.last.success for one in played) / len(played)

    def step(self, prompts: Sequence[Prompt], number: int) -> Point:
        """Sample the groups of a step with the oldest version kept, and learn from them."""
        self._sampler.load_state_dict(self._versions[0])
        began = time.perf_counter()
        seeds = [prompt.seed for prompt in prompts for _ in range(prompt.group_size)]
        played = self._play(self._sampler, seeds, self._generator)
        sampled = time.perf_counter()
        samples = [
            TrainingSample(
                tokens=one.tokens, loss_mask=one.loss_mask, behaviour_logprobs=one.logprobs, reward=one.reward
            )
            for one in played
        ]
        size = prompts[0].group_size
        groups = [samples[first : first + size] for first in range(0, len(samples), size)]
        done = train_step(self._model, self._optimizer, groups, settings=step_settings(self._settings.trainer))
        self._versions.append(self._version())
        return Point(
            step=number,
            reward=done.reward,
            held_out=self.held_out() if number % HELD_OUT_EVERY_STEPS == 0 else None,
            turns=sum(one.turns for one in played) / len(played),
            groups_with_signal=done.groups_with_signal,
            gradient_norm=done.gradient_norm,
            kl_behaviour=done.kl_behaviour,
            clipped_share=done.clipped_share,
            sampling_seconds=sampled - began,
            training_seconds=time.perf_counter() - sampled,
        )

    def _play(self, model: Any, seeds: Sequence[int], generator: torch.Generator) -> list[Trajectory]:
        arguments = self._settings.tasks.arguments
        return sample_trajectories(
            model,
            self._turn_format,
            [Task(environment=self._environment, seed=seed, arguments=arguments) for seed in seeds],
            generator=generator,
            max_tokens=self._settings.environment.max_turn_tokens,
        )

    def _version(self) -> dict[str, Any]:
        return copy.deepcopy(self._model.state_dict())


def run_reference(settings: Settings, *, lag: int, show: Callable[[Point], None]) -> Curve:
    """Train for the configured number of steps; `show` gets every point as it is made."""
    torch.set_num_threads(1)
    tasks, per_step, seed = settings.tasks, settings.trainer.groups_per_step, settings.run.seed
    prompts = training_prompts(tasks, run="reference", seed=seed, groups=tasks.steps * per_step)
    reference = Reference(settings, lag=lag)
    curve = Curve(seed=seed, lag=lag, before=reference.held_out(), held_out_tasks=tasks.held_out)
    for number in range(1, tasks.steps + 1):
        curve.points.append(reference.step(prompts[(number - 1) * per_step : number * per_step], number))
        show(curve.points[-1])
    curve.after = reference.held_out()
    return curve


def print_point(point: Point) -> None:
    """A line of the curve."""
    held_out = "" if point.held_out is None else f"  held out {point.held_out:.3f}"
    print(
        f"step {point.step:3d}  reward {point.reward:.3f}  turns {point.turns:.2f}"
        f"  signal {point.groups_with_signal:2d}  kl {point.kl_behaviour:.4f}  clipped {point.clipped_share:.3f}"
        f"  gradient {point.gradient_norm:.2f}"
        f"  {point.sampling_seconds:.2f} + {point.training_seconds:.2f} s{held_out}",
        flush=True,
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", action="store_true", required=True, help="the plain process")
    parser.add_argument("--config", type=Path, default=Path(str(files("pipeline.command") / CONFIGURATION)))
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="one setting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lag", type=int, default=0, help="age of every sample, in policy versions")
    parser.add_argument("--json", type=Path, help="write the curve to this file")
    flags = parser.parse_args()
    if flags.lag < 0:
        parser.error("--lag must be at least 0")
    try:
        common = Common(config=flags.config, settings=flags.set).saying(seed=("run.seed", flags.seed))
        curve = run_reference(load(common).settings, lag=flags.lag, show=print_point)
    except RoseError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_status)
    print(
        f"seed {curve.seed}, lag {curve.lag}: sampled success on {curve.held_out_tasks} held-out tasks "
        f"{curve.before:.3f} -> {curve.after:.3f}"
    )
    if flags.json:
        flags.json.write_text(json.dumps(asdict(curve), indent=1) + "\n")


if __name__ == "__main__":
    main()
