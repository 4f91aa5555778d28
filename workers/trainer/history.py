"""What the log remembers of a trainer that was killed: which steps it has settled, and with which groups.

Keeps true: what is on the log is not written again; a step whose records are there is made again from the same groups.
"""

from schemas.samples import SampleOutcome
from topics.catalog import OUTCOMES
from topics.log import read_topics
from topics.settings import BusSettings


class History:
    """The outcomes on the log. Raises TopicMissing or BusError."""

    def __init__(self, settings: BusSettings) -> None:
        self.settled_groups: dict[str, None] = {}
        """Every group with an outcome, in the order of settling."""
        self._trajectories: set[str] = set()
        self._steps: dict[int, dict[str, None]] = {}
        for envelope in read_topics(settings, [OUTCOMES], client_id="trainer-history"):
            outcome = envelope.record
            assert isinstance(outcome, SampleOutcome)
            self.settled_groups[outcome.group_id] = None
            self._trajectories.add(outcome.trajectory_id)
            self._steps.setdefault(outcome.step, {})[outcome.group_id] = None

    def has(self, outcome: SampleOutcome) -> bool:
        return outcome.trajectory_id in self._trajectories

    def groups_of(self, step: int) -> list[str]:
        """The groups that a step settled, in its order; empty if the log knows no such step."""
        return list(self._steps.get(step, ()))
