"""Outcomes of a trainer that trains nothing, so that groups end.

Keeps true: a sample with a reward is settled as trained, and a sample without a reward as failed.
"""

import time

from rose.schemas.samples import Outcome, Sample, SampleOutcome
from rose.topics.catalog import OUTCOMES
from rose.topics.writer import Writer


def settle(writer: Writer, sample: Sample) -> None:
    """Write the outcome of the sample; a flush of the writer stores it."""
    outcome = SampleOutcome(
        trajectory_id=sample.trajectory_id,
        group_id=sample.group_id,
        outcome=Outcome.INFRA_FAILED if sample.reward is None else Outcome.TRAINED,
        step=0,
        policy_version=0,
        recorded_at=time.time(),
    )
    writer.write(OUTCOMES, outcome, key=sample.trajectory_id, partition=0)
