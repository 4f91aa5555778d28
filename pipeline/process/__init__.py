"""Facilities of a process that all programs share: terminal, logs, health over HTTP, the lock on a run's folder."""
