"""Outcomes from somebody who trains on nothing: the smallest thing that lets groups end.

Keeps true: whatever has a reward is trained on, and what has none failed for the infrastructure's fault.
"""

import time

from rose.schemas.samples import Outcome, Sample, SampleOutcome
from rose.topics.catalog import OUTCOMES
from rose.topics.writer import Writer


def settle(writer: Writer, sample: Sample) -> None:
    """Write the sample's outcome; it is stored once the writer is flushed."""
    outcome = SampleOutcome(
        trajectory_id=sample.trajectory_id,
        group_id=sample.group_id,
        outcome=Outcome.INFRA_FAILED if sample.reward is None else Outcome.TRAINED,
        step=0,
        policy_version=0,
        recorded_at=time.time(),
    )
    writer.write(OUTCOMES, outcome, key=sample.trajectory_id, partition=0)
