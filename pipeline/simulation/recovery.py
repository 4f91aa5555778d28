"""How long after a failure the rollouts are as fast as before it.

Pure. A run has recovered when the rate of applied turns over `WINDOW_SECONDS` reaches `RECOVERED` of the rate over the
`BEFORE_SECONDS` before the failure. That needs a steady load: an asynchronous trainer.
"""

from bisect import bisect_left
from collections.abc import Sequence

BEFORE_SECONDS = 120.0

WINDOW_SECONDS = 10.0

RECOVERED = 0.8


def recovered_after(applied: Sequence[float], failed_at: float, back_at: float) -> float | None:
    """Return the seconds from `back_at` until the run has recovered; None if it never has.

    `applied`: times at which turns were applied, in order. `back_at`: when what had failed came back.
    """
    first = max(0.0, failed_at - BEFORE_SECONDS)
    before = bisect_left(applied, failed_at) - bisect_left(applied, first)
    wanted = RECOVERED * before / (failed_at - first) * WINDOW_SECONDS
    for place in range(bisect_left(applied, back_at + WINDOW_SECONDS), len(applied)):
        at = applied[place]
        if place + 1 - bisect_left(applied, at - WINDOW_SECONDS) >= wanted:
            return at - back_at
    return None
