"""The ways in which serving is measured: alone, and beside rollouts that share its engine or its process.

An arm says how the server is started (`launch`), what runs beside it (`guests`), and what it is held against. Guests
begin before the users of a window and end after them; their tokens are counted by the moments at which they came.

    alone       serving alone; every ratio is over it
    again       serving alone once more: how far apart two equal arms are is what can be told apart at all
    rollouts    rollouts alone, no users: what a guest could make of the whole engine
    priority    stock vLLM's `--scheduling-policy priority`, rollouts at a lower priority, as many as fit in a batch
    cap         rollouts of equal priority, never more than CAP at once
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from bench.coserving.clients import Rolled, RolloutOrders
from bench.coserving.processes import Client
from bench.coserving.server import MAX_RUNNING, MODEL_NAME, VOCABULARY, Launch, Server

CAP = 4
"""Rollouts at once where a fixed number of them is what protects serving."""

LATER = 10
"""The priority of rollouts; users have vLLM's default, 0, and the smaller goes first."""

STOP_SECONDS = 60.0


class Guests(Protocol):
    """Rollouts that run beside serving."""

    def beside(self, server: Server) -> AbstractContextManager[Rolled]:
        """They run within the context; when it is left, what it gave holds every token and the moment it came."""
        ...


@dataclass(frozen=True)
class Requesters:
    """Rollouts as requests to serving's own engine and model, from a client that keeps so many on their way."""

    trajectories: int
    priority: int | None = None

    @contextmanager
    def beside(self, server: Server) -> Iterator[Rolled]:
        """Raises ClientError."""
        orders = RolloutOrders(server.url, MODEL_NAME, self.trajectories, self.priority, VOCABULARY)
        with Client("rollouts", orders) as client:
            client.wait_until_ready()
            rolled = Rolled([], [], [])
            yield rolled
            client.say(b"stop")
            measured = client.result(Rolled, seconds=STOP_SECONDS)
        rolled.moments, rolled.counts, rolled.errors = measured.moments, measured.counts, measured.errors


@dataclass(frozen=True)
class Promise:
    """A bound that an arm is held to."""

    check: str
    figure: str
    """One of the arm's (bench.coserving.results.Standing.value)."""
    bound: float
    direction: str
    against: str


@dataclass(frozen=True)
class Arm:
    """One way to run serving."""

    name: str
    launch: Launch = field(default_factory=Launch)
    guests: Guests | None = None
    users: bool = True
    guests_alone: str = ""
    """The arm without users that these guests' harvest is a share of."""
    promises: tuple[Promise, ...] = ()


ALONE, AGAIN = "alone", "again"

PRIORITIES = Launch(flags=("--scheduling-policy", "priority"))

ARMS = (
    Arm(
        ALONE,
        promises=(
            Promise("busy_at_least", "busy", 0.15, "min", "as busy as fleets are, bursts and all"),
            Promise("busy_at_most", "busy", 0.35, "max", "as busy as fleets are, bursts and all"),
        ),
    ),
    Arm(AGAIN),
    Arm("rollouts", users=False, guests=Requesters(MAX_RUNNING)),
    Arm("priority", launch=PRIORITIES, guests=Requesters(MAX_RUNNING, priority=LATER), guests_alone="rollouts"),
    Arm("cap", guests=Requesters(CAP), guests_alone="rollouts"),
)
