"""The `rose` command and the stream processors: routing, control, audit, monitor, replay and report."""
