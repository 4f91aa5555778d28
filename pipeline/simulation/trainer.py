"""A simulated trainer: it waits for groups, trains, and publishes versions.

Keeps true
- Which samples are trained on is decided by the production rules (`select_samples`), staleness included. Every
  trajectory gets exactly one outcome.
- A synchronous trainer opens the groups of one step, trains when all are complete, and opens the next ones when the
  engines serve the new version. An asynchronous trainer keeps groups open for `max_staleness` further steps.
- With `dapo`, a group without a signal is replaced by another one.
- The steps of a recorded run have as many groups as they had: their numbers differ if groups were left out.

Training takes `FLOPS_PER_TOKEN_AND_PARAMETER * parameters` floating-point operations a token, at a stated share of the
peak of its GPUs.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rose.pipeline.simulation.events import EventQueue
from rose.pipeline.simulation.rollout import Rollout
from rose.pipeline.simulation.scenario import Scenario
from rose.schemas.samples import Outcome, Sample
from rose.workers.trainer.groups import CompleteGroup
from rose.workers.trainer.selection import SelectedGroup, SelectionRules, select_samples

VOCABULARY = 1
"""Simulated samples hold token 0 only."""

FLOPS_PER_TOKEN_AND_PARAMETER = 8.0
"""Forward and backward pass (6), and the forward pass that computes the logprobs of the policy to be trained (2)."""


@dataclass(slots=True)
class StepFigures:
    """One training step."""

    began_at: float
    """When the groups of the step could first be opened: the end of the step before."""
    collected_at: float = 0.0
    """When its batch was complete."""
    ended_at: float = 0.0
    """When the new version served."""
    tokens: int = 0
    """Tokens of its samples, observations included."""
    trained: int = 0
    correct: int = 0


@dataclass(slots=True)
class TrainerFigures:
    """All steps, and what became of the trajectories."""

    steps: list[StepFigures] = field(default_factory=list)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    settled: list[tuple[Sample, Outcome, int]] = field(default_factory=list)
    """Samples with their outcome and the step that settled them."""


class Trainer:
    """The training loop of one run."""

    def __init__(
        self,
        scenario: Scenario,
        events: EventQueue,
        rollout: Rollout,
        publish: Callable[[int], float],
        groups: float = math.inf,
        step_groups: Sequence[int] = (),
    ) -> None:
        """`publish`: sends a version to the engines; returns the seconds until the dedicated ones serve it.

        `groups`: number of groups that there are. `step_groups`: groups of each training step, if steps differ.
        """
        self.version = 0
        self.training = False
        self.figures = TrainerFigures()
        self._scenario = scenario
        self._events = events
        self._rollout = rollout
        self._publish = publish
        self._groups = groups
        self._step_groups = step_groups
        training = scenario.training
        self._synchronous = training.mode == "synchronous"
        self._rules = SelectionRules(
            max_staleness=0 if self._synchronous else training.max_staleness, vocabulary=VOCABULARY, context_tokens=2
        )
        self._samples: dict[str, dict[str, Sample]] = {}
        self._complete: list[CompleteGroup] = []
        self._batch: list[SelectedGroup] = []
        self._replaced = 0
        """Groups that were replaced by others, because they had no signal."""
        self._step = StepFigures(0.0)
        self.on_waiting: Callable[[bool], None] | None = None
        """Called with whether the trainer waits, whenever that changes."""

    @property
    def done(self) -> bool:
        """Whether all steps of the scenario are trained."""
        return len(self.figures.steps) >= self._scenario.training.steps

    def start(self) -> None:
        """Open the first groups."""
        self._open_groups()

    def on_sample(self, sample: Sample) -> None:
        """Take a finished trajectory."""
        members = self._samples.setdefault(sample.group_id, {})
        members[sample.trajectory_id] = sample
        if len(members) == sample.group_size:
            del self._samples[sample.group_id]
            in_order = sorted(members.values(), key=lambda each: int(each.trajectory_id.rpartition(":")[2]))
            self._complete.append(CompleteGroup(sample.group_id, tuple(in_order)))
            self._go_on()

    def _open_groups(self) -> None:
        trained = sum(self._groups_of(step) for step in range(self.version))
        wanted = trained + self._replaced + self._scenario.window_groups
        while self._rollout.opened < min(wanted, self._groups):
            self._rollout.open_group()

    def _groups_of(self, step: int) -> int:
        """Return how many groups a training step takes."""
        return self._step_groups[step] if step < len(self._step_groups) else self._scenario.tasks.groups

    @property
    def _dapo(self) -> bool:
        return self._scenario.training.algorithm == "dapo"

    def _go_on(self) -> None:
        if self.training or self.done:
            return
        needed = self._groups_of(self.version)
        while self._complete and len(self._batch) < needed:
            group = select_samples(self._complete.pop(0), self.version, rules=self._rules)
            if self._dapo and not group.trained:
                self._settle(group)
                self._replaced += 1
                self._rollout.open_group()
            else:
                self._batch.append(group)
        if len(self._batch) == needed:
            self._train()

    def _train(self) -> None:
        self.training = True
        step, training = self._step, self._scenario.training
        step.collected_at = self._events.now
        step.tokens = sum(int(sample.info["tokens"]) for group in self._batch for sample in group.trained)
        flops = FLOPS_PER_TOKEN_AND_PARAMETER * training.parameters * step.tokens
        seconds = training.fixed_seconds + flops / (training.gpus * training.flops_per_gpu * training.flops_share)
        if self.on_waiting is not None:
            self.on_waiting(False)
        self._events.after(seconds, self._trained)

    def _trained(self) -> None:
        step = self._step
        for group in self._batch:
            step.trained += len(group.trained)
            step.correct += sum(bool(sample.success) for sample in group.trained)
            self._settle(group)
        self._batch.clear()
        self.version += 1
        seconds = self._publish(self.version)
        if self._synchronous:
            self._events.after(seconds, self._next_step)
        else:
            self._next_step()

    def _next_step(self) -> None:
        self._step.ended_at = self._events.now
        self.figures.steps.append(self._step)
        self._step = StepFigures(self._events.now)
        self.training = False
        if self.on_waiting is not None:
            self.on_waiting(True)
        if not self.done:
            self._open_groups()
            self._go_on()

    def _settle(self, group: SelectedGroup) -> None:
        for sample, decision in zip(group.samples, group.decisions, strict=True):
            self.figures.outcomes[decision.outcome] += 1
            self.figures.settled.append((sample, decision.outcome, len(self.figures.steps)))
