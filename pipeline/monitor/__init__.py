"""The monitor of a run: its state from the log, the broker's answers, the diagnosis, and the live view."""
