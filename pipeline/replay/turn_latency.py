"""Latency of a turn by stage: the time between each two stations that the turn passed.

Keeps true: the stages add up to the time from the first station to the last. A station that the turn did not pass has
no stage: a turn that was given up has no prefill and no decode.

A worker learns of its commit at about the time when others can read its records, so the stage after the commit can be
slightly negative.

Example: requested at 1.0, queued at 1.2, finished at 9.2 without a token -> to the router 0.2 s, to its end 8.0 s
"""

from typing import NamedTuple

from rose.schemas.turns import TurnTimes


class LatencyStage(NamedTuple):
    """The way to one station, and its duration in seconds."""

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
"""Names of the stages with the station at which each one ends, in the order in which a turn passes them."""

_CUT_SHORT = "to its end"
"""Name of the stage to the end of a turn that has sampled no token."""


def latency_stages(times: TurnTimes) -> list[LatencyStage]:
    """Return the stages of one execution. Each station's time is by the clock of its own machine."""
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
