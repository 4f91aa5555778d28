"""Finished trajectories of a run, read back from its log for people and for other programs."""
