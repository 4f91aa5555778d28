"""The programs that do the work: environments, the rollout executor, the trainer, weight transfer."""
