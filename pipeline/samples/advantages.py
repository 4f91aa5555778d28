"""Advantages of the trajectories of a group, computed again by the algorithm of the configuration.

Keeps true
- An advantage is given only if all that the trainer had of the group is known: every member with its outcome. The
  trainer computes advantages over the members that it trained on, so the others have none.
- A number that is not known has a reason in words, such as an algorithm that compares with all groups of a step.
- Torch is loaded only when the first advantage is computed.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rose.pipeline.samples.log import FinishedGroup
from rose.schemas.errors import RoseError, describe_error
from rose.schemas.samples import Outcome
from rose.workers.import_path import with_import_paths
from rose.workers.trainer.config import TrainerConfig

if TYPE_CHECKING:
    from rose.workers.trainer.algorithms import Algorithm

NOT_SETTLED = "not settled yet"
NOT_TRAINED = "not trained on"
"""Reasons why a trajectory has no advantage."""

WITHOUT_TORCH = "the trainer's packages are not installed: pip install 'rose-rollouts[trainer]'"


@dataclass(frozen=True, slots=True)
class Advantage:
    """The advantage of one trajectory, or why there is none."""

    value: float | None
    reason: str = ""
    """Why the value is None; empty if it is a number."""


class GroupAdvantages:
    """Computes advantages by the algorithm of a trainer's settings."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._algorithm: Algorithm | None = None
        self._broken = ""
        """Why the algorithm cannot be made; empty if it was not tried or was made."""

    def of(self, group: FinishedGroup) -> Mapping[str, Advantage]:
        """Return the advantage of each member that the log has, by trajectory."""
        found = {each.sample.trajectory_id: Advantage(None, NOT_TRAINED) for each in group.members}
        for each in group.members:
            if each.outcome is None:
                found[each.sample.trajectory_id] = Advantage(None, NOT_SETTLED)
        trained = [
            each.sample
            for each in group.members
            if each.outcome is not None and each.outcome.outcome is Outcome.TRAINED and each.sample.reward is not None
        ]
        if not trained:
            return found
        values: list[float] = []
        reason = self._gap(group)
        if not reason:
            reason = self._make()
        if not reason:
            from rose.workers.trainer.algorithms import TrainingSample, checked_advantages

            assert self._algorithm is not None
            try:
                values = checked_advantages(self._algorithm, [TrainingSample.of(sample) for sample in trained])
            except Exception as error:  # noqa: BLE001  a user's class may raise anything
                reason = f"unknown: algorithm {self._config.algorithm} raised {describe_error(error)}"
        for place, sample in enumerate(trained):
            found[sample.trajectory_id] = Advantage(None, reason) if reason else Advantage(values[place])
        return found

    @staticmethod
    def _gap(group: FinishedGroup) -> str:
        """Return what of the group is not on the log; empty if it is whole."""
        if len(group.members) < group.size:
            return f"unknown: {group.size - len(group.members)} of its {group.size} samples are not on the log"
        unsettled = sum(each.outcome is None for each in group.members)
        return f"unknown: {unsettled} of its {group.size} outcomes are not on the log" if unsettled else ""

    def _make(self) -> str:
        """Make the algorithm, unless that was tried before. Return why there is none; empty if there is one."""
        if self._algorithm is None and not self._broken:
            try:
                from rose.workers.trainer.algorithms import make_algorithm

                sys.path[:] = with_import_paths(self._config.import_paths)
                algorithm = make_algorithm(self._config)
                if _compares_with_step(algorithm, self._config):
                    self._broken = f"unknown: {self._config.algorithm} compares with all samples of the step"
                else:
                    self._algorithm = algorithm
            except ImportError:
                self._broken = f"unknown: {WITHOUT_TORCH}"
            except RoseError as error:
                self._broken = f"unknown: {error}"
        return self._broken


def _compares_with_step(algorithm: "Algorithm", config: TrainerConfig) -> bool:
    """Whether the advantages of a group depend on the other groups of its step."""
    from rose.workers.trainer.algorithms import StepAlgorithm
    from rose.workers.trainer.algorithms.advantages import STEP_ADVANTAGES
    from rose.workers.trainer.algorithms.combined import Combined

    if config.parts is not None:
        return config.parts.advantages in STEP_ADVANTAGES
    method = getattr(type(algorithm), "step_advantages", StepAlgorithm.step_advantages)
    return method not in (StepAlgorithm.step_advantages, Combined.step_advantages)
