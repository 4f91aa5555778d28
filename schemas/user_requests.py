"""What serving's users waited: a line of `serving.jsonl` in a run's folder. It is on no topic: users are not ROSE's."""

import msgspec


class UserRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to a serving engine, by the clock of who sent it."""

    at: float
    """Unix seconds at which it was due."""
    seconds: float
    """From there until its last token came, or it failed."""
    prompt_tokens: int
    tokens: int = 0
    """Tokens that came."""
    first_token_seconds: float | None = None
    """TTFT: from `at` to its first token; None if it got none."""
    token_seconds: float | None = None
    """TPOT: the mean time between its tokens; None where there were fewer than two."""
    error: str = ""
    """Why it failed; empty if it did not."""
