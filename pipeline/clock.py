"""Moments for people. Keeps true: whatever number somebody stamped on a message, it can be told."""

from datetime import UTC, datetime


def told(unix_seconds: float, pattern: str = "%Y-%m-%d %H:%M:%S UTC") -> str:
    """The moment in UTC as `strftime` writes it; the number itself where no calendar has it."""
    try:
        return datetime.fromtimestamp(unix_seconds, UTC).strftime(pattern)
    except (ValueError, OverflowError, OSError):
        return f"{unix_seconds:.0f} s after 1970"
