"""What every program has as a process: terminal, logs, health over HTTP, the lock on a run's folder."""
