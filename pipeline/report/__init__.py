"""What a run was: its history from the log, `summary.json`, and a report that a person wants to look at."""
