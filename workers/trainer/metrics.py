"""The trainer's Prometheus metrics."""

from prometheus_client import Counter, Gauge, Histogram

from workers.trainer.step_log import StepLine

SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)

SAMPLES = Counter("rose_trainer_samples_total", "Samples read, by what was done with them.", ["taken"])
OUTCOMES = Counter("rose_trainer_outcomes_total", "Trajectories settled, by outcome.", ["outcome"])
HELD_SAMPLES = Gauge("rose_trainer_held_samples", "Samples that wait for their group or for a step.")
POLICY_VERSION = Gauge("rose_trainer_policy_version", "The newest version of the policy.")
REWARD = Gauge("rose_trainer_reward_mean", "Mean reward of the samples of the latest step.")
SUCCESS = Gauge("rose_trainer_success_ratio", "Share of successful samples of the latest step.")
STALENESS = Gauge("rose_trainer_staleness_versions", "Mean staleness of the samples of the latest step.")
WAITING_SECONDS = Histogram("rose_trainer_waiting_seconds", "Waiting for the groups of a step.", buckets=SECONDS)
TRAINING_SECONDS = Histogram("rose_trainer_training_seconds", "Training on the groups of a step.", buckets=SECONDS)
CHECKPOINT_SECONDS = Histogram("rose_trainer_checkpoint_seconds", "Writing the checkpoint of a step.", buckets=SECONDS)
PUBLISHING_SECONDS = Histogram(
    "rose_trainer_publishing_seconds", "Publishing chunks, manifest and outcomes of a step.", buckets=SECONDS
)


def observe(line: StepLine) -> None:
    """Take a finished step in."""
    for outcome, count in line.outcomes.items():
        OUTCOMES.labels(outcome).inc(count)
    for gauge, value in ((REWARD, line.reward_mean), (SUCCESS, line.success_rate), (STALENESS, line.staleness_mean)):
        if value is not None:
            gauge.set(value)
    WAITING_SECONDS.observe(line.waiting_seconds)
    TRAINING_SECONDS.observe(line.training_seconds)
    CHECKPOINT_SECONDS.observe(line.checkpoint_seconds or 0.0)
