"""The demo's algorithm in one plain process without a bus, with which a run over the bus is compared.

Keeps true: prompts, held-out tasks, loss, step and settings are the same as over the bus. Only the engine differs
(plain transformers), and the age of samples: every sample of a step is `--lag` versions old, but over the bus the age
differs from sample to sample.
"""

import copy
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.plain_engine import SampledTrajectory, Task, sample_trajectories
from rose.pipeline.config.settings import Settings
from rose.pipeline.local.demo import training_prompts
from rose.schemas.prompts import Prompt
from rose.workers.environments.registry import load_environment
from rose.workers.environments.turn_format import TurnFormat
from rose.workers.trainer.algorithms import TrainingSample, make_algorithm
from rose.workers.trainer.optimizer import make_optimizer, make_schedule
from rose.workers.trainer.packing import pack_passes
from rose.workers.trainer.policy import load_policy
from rose.workers.trainer.step import train_step

HELD_OUT_EVERY_STEPS = 10
"""Number of steps between two measurements of held-out success."""


@dataclass(slots=True, kw_only=True)
class Point:
    """One step of a curve."""

    step: int
    reward: float
    """Mean reward of the step's samples, as they were sampled."""
    held_out: float | None
    """Success on the held-out tasks after the step; None if it was not measured."""
    turns: float
    """Mean number of turns of a trajectory."""
    groups_with_signal: int
    gradient_norm: float
    kl_behaviour: float
    clipped_share: float
    sampling_seconds: float
    training_seconds: float


@dataclass(slots=True, kw_only=True)
class Curve:
    """The curve of one run."""

    seed: int
    lag: int
    before: float
    after: float = 0.0
    held_out_tasks: int
    points: list[Point] = field(default_factory=list)


class Reference:
    """The algorithm in one process."""

    def __init__(self, settings: Settings, *, lag: int) -> None:
        """Prepare the run. Raises UsageError for a broken model folder or an unknown environment."""
        self._settings = settings
        self._turn_format = TurnFormat(settings.model.folder)
        self._model = load_policy(settings.model.folder)
        pack_passes(self._model)
        self._sampler = load_policy(settings.model.folder)
        self._algorithm = make_algorithm(settings.trainer)
        self._kept = load_policy(settings.model.folder) if settings.trainer.kl_coefficient else None
        """The reference policy."""
        self._optimizer = make_optimizer(self._model, learning_rate=settings.trainer.learning_rate)
        self._schedule = make_schedule(self._optimizer, settings.trainer)
        self._versions: deque[dict[str, Any]] = deque([self._version()], maxlen=lag + 1)
        self._generator = torch.Generator().manual_seed(settings.run.seed)
        self._environment = load_environment(settings.tasks.environment)

    def held_out(self) -> float:
        """Return the success of the present policy on the held-out tasks, always with the same random numbers."""
        tasks = self._settings.tasks
        seeds = range(tasks.held_out_seed, tasks.held_out_seed + tasks.held_out)
        self._sampler.load_state_dict(self._model.state_dict())  # the model itself computes packed passes only
        played = self._play(self._sampler, seeds, torch.Generator().manual_seed(0))
        return sum(one.last is not None and bool(one.last.success) for one in played) / len(played)

    def step(self, prompts: Sequence[Prompt], number: int) -> Point:
        """Sample the groups of a step with the oldest kept version, and learn from them."""
        self._sampler.load_state_dict(self._versions[0])
        began = time.perf_counter()
        seeds = [prompt.task_seed for prompt in prompts for _ in range(prompt.group_size)]
        played = self._play(self._sampler, seeds, self._generator)
        sampled = time.perf_counter()
        samples = [
            TrainingSample(
                tokens=one.tokens,
                loss_mask=one.loss_mask,
                behaviour_logprobs=one.logprobs,
                temperatures=[1.0] * len(one.tokens),
                reward=one.reward,
                truncated=one.last is None or not one.last.done,
            )
            for one in played
        ]
        size = prompts[0].group_size
        groups = [samples[first : first + size] for first in range(0, len(samples), size)]
        config = self._settings.trainer
        done = train_step(
            self._model, self._optimizer, groups, algorithm=self._algorithm, config=config, reference=self._kept
        )
        if done.tokens:
            self._schedule.step()
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

    def _play(self, model: Any, seeds: Sequence[int], generator: torch.Generator) -> list[SampledTrajectory]:
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
    """Train for the configured number of steps; `show` gets every point at once."""
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
