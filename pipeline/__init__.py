"""The stream processors and the `rose` command: routing, accounting, replay, report, command."""
