"""Latency of serving's users: a line of `serving.jsonl` in a run's folder. The record is on no topic."""

import msgspec


class UserRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to a serving engine, by the clock of its sender."""

    at: float
    """Unix seconds at which the request was due."""
    seconds: float
    """Time from `at` until its last token or its failure."""
    prompt_tokens: int
    tokens: int = 0
    """Tokens that came."""
    first_token_seconds: float | None = None
    """TTFT: from `at` to its first token; None if it got none."""
    token_seconds: float | None = None
    """TPOT: the mean time between its tokens; None where there were fewer than two."""
    error: str = ""
    """Why it failed; empty if it did not."""
