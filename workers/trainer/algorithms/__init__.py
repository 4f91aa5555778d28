"""Algorithms of the trainer: advantages of a group, and the loss of each sampled token."""
