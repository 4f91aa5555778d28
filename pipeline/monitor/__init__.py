"""What a run is doing: its state from the log, the broker's answers, a diagnosis, a live view."""
