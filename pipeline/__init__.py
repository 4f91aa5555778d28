"""The `rose` command and the stream processors: routing, control, accounting, monitor, replay and report."""
