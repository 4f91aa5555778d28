"""Where a turn's time went: one leg between each two stations that it passed.

Keeps true: the legs add up to the time from the first station to the last; a station that it never came by makes no
leg, so a turn that was given up has no prefill and no decode.

A worker hears of its commit about when others may read what it wrote: the leg behind it may be a little less than 0.

Example: asked at 1.0, in the router at 1.2, given up at 9.2   -> to the router 0.2 s, to its end 8.0 s
"""

from typing import NamedTuple

from rose.schemas.turns import TurnTimes


class LatencyStage(NamedTuple):
    """The way to one station, and how long it took."""

    name: str
    seconds: float


_STATIONS = (
    ("", "requested_at"),
    ("its transaction", "committed_at"),
    ("to the router", "queued_at"),
    ("wait for room", "dispatched_at"),
    ("to the inbox", "received_at"),
    ("engine's queue", "scheduled_at"),
    ("prefill", "first_token_at"),
    ("decode", "finished_at"),
    ("back", "applied_at"),
)
"""In the order in which a turn passes them; each leg ends at the station beside its name."""

_CUT_SHORT = "to its end"
"""The leg to the end of a turn that has sampled no token."""


def latency_stages(times: TurnTimes) -> list[LatencyStage]:
    """The legs of one execution; stations of different hosts are told by their own clocks."""
    legs: list[LatencyStage] = []
    before = 0.0
    for name, station in _STATIONS:
        at = float(getattr(times, station))
        if not at:
            continue
        if before:
            cut_short = station == "finished_at" and not times.first_token_at
            legs.append(LatencyStage(_CUT_SHORT if cut_short else name, at - before))
        before = at
    return legs
