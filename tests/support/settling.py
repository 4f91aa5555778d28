"""Outcomes of a trainer that trains nothing, so that groups end.

Keeps true: a sample with a reward is settled as trained, and a sample without a reward by its ending.
"""

import time

from rose.schemas.samples import Ending, Outcome, Sample, SampleOutcome
from rose.topics.catalog import OUTCOMES
from rose.topics.writer import Writer

WITHOUT_REWARD = {Ending.SURPLUS: Outcome.SURPLUS, Ending.STALE: Outcome.STALE}


def settle(writer: Writer, sample: Sample, *, step: int = 0) -> None:
    """Write the outcome of the sample at this step; a flush of the writer stores it."""
    outcome = SampleOutcome(
        trajectory_id=sample.trajectory_id,
        group_id=sample.group_id,
        outcome=Outcome.TRAINED
        if sample.reward is not None
        else WITHOUT_REWARD.get(sample.ended, Outcome.INFRA_FAILED),
        step=step,
        policy_version=0,
        recorded_at=time.time(),
    )
    writer.write(OUTCOMES, outcome, key=sample.trajectory_id, partition=0)
