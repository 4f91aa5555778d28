"""A consumer of the log that gives the figures of each training step to experiment trackers."""
