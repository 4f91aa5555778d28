"""The history of one trajectory, read from the log."""
