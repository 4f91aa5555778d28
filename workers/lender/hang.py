"""Whether a guest hangs: it has had serving's thread for longer than its bound.

Keeps true
- Only the guest's time counts. A loop in which serving takes long, or waits, has given the thread back before.
- Only time that both sides were awake for counts: between two looks at most `GAP_SECONDS`, and nothing while the
  engine core or a rank that it may wait for is halted. So a machine that slept, or a debugger, ends no server.

Pure; `since` names one hold of the thread, whatever its clock.

Example (bound 30 s, a look each 0.2 s): since 7 from 100 to 130 -> hangs at 130; since 7, 8, 9, ... -> never.
"""

GAP_SECONDS = 1.0


class Hang:
    """How long the present hold of the thread has lasted, as far as it was seen."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        """The bound."""
        self._since = 0
        self._at = 0.0
        self._held = 0.0
        """Seconds of this hold that were seen."""

    def looked(self, since: int, *, halted: bool, now: float) -> bool:
        """The guest has had the thread since `since`, 0 for not at all; whether it hangs."""
        if since != self._since:
            self._since, self._held = since, 0.0
        elif since and not halted:
            self._held += min(now - self._at, GAP_SECONDS)
        self._at = now
        return bool(since) and self._held >= self.seconds
