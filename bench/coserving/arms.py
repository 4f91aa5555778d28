"""The ways in which serving is measured: alone, and beside rollouts that share its engine or its process.

An arm says how the server is started (`launch`), what runs beside it (`guests`), and what it is held against. Guests
begin before the users of a window and end after them; their tokens are counted by the moments at which they came.

    alone       serving alone; every ratio is over it
    again       serving alone once more: how far apart two equal arms are is what can be told apart at all
    rollouts    rollouts alone, no users: what a guest could make of the whole engine
    priority    stock vLLM's `--scheduling-policy priority`, rollouts at a lower priority, as many as fit in a batch
    cap         rollouts of equal priority, never more than CAP at once
    guest       a guest alone in a lending server, no users: what it could make of the whole engine
    unprotected a guest that computes whenever it likes, unless a request waits: no promise holds it back
    strict      a guest while serving has nothing to do
    slo         a guest also inside the slack of the two budgets
    spike       as slo, and every few seconds all trajectories ask at once while a policy version lands

With `--sweep` the guest at other dials as well (SWEEP).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from bench.coserving.clients import RolloutResult, RolloutTask
from bench.coserving.guests import GuestTask
from bench.coserving.processes import Client
from bench.coserving.server import MAX_RUNNING, MODEL_NAME, VOCABULARY, Launch, Lends, Server
from rose.workers.lender.admission import SLO as SLO_DIAL
from rose.workers.lender.admission import STRICT as STRICT_DIAL
from rose.workers.lender.admission import Promise as Lending

CAP = 4
"""Rollouts at once where a fixed number of them is what protects serving."""

LATER = 10
"""The priority of rollouts; users have vLLM's default, 0, and the smaller goes first."""

STOP_SECONDS = 60.0


class Guests(Protocol):
    """Rollouts that run beside serving."""

    def beside(self, server: Server) -> AbstractContextManager[RolloutResult]:
        """They run within the context; when it is left, what it gave holds every token and the moment it came."""
        ...


@dataclass(frozen=True)
class Requesters:
    """Rollouts as requests to serving's own engine and model, from a client that keeps so many on their way."""

    trajectories: int
    priority: int | None = None

    def beside(self, server: Server) -> AbstractContextManager[RolloutResult]:
        """Raises ClientError."""
        return _rolling("rollouts", RolloutTask(server.url, MODEL_NAME, self.trajectories, self.priority, VOCABULARY))


@dataclass(frozen=True)
class Guest:
    """Rollouts of another model, in the guest of a server that lends."""

    trajectories: int
    spike_seconds: float = 0.0
    """Between two moments at which all trajectories ask at once while a version lands; 0: there are none."""

    def beside(self, server: Server) -> AbstractContextManager[RolloutResult]:
        """Raises ClientError."""
        task = GuestTask(
            socket=str(server.lends_at),
            trajectories=self.trajectories,
            vocabulary=VOCABULARY,
            model=str(server.lent),
            spike_seconds=self.spike_seconds,
        )
        return _rolling("guests", task)


@contextmanager
def _rolling(kind: str, task: msgspec.Struct) -> Iterator[RolloutResult]:
    with Client(kind, task) as client:
        client.wait_until_ready()
        rolled = RolloutResult([], [], [])
        yield rolled
        client.say(b"stop")
        measured = client.result(RolloutResult, seconds=STOP_SECONDS)
    for field_ in msgspec.structs.fields(RolloutResult):
        setattr(rolled, field_.name, getattr(measured, field_.name))


@dataclass(frozen=True)
class Promise:
    """A bound that an arm is held to."""

    check: str
    figure: str
    """One of the arm's (bench.coserving.results.Standing.value)."""
    bound: float
    direction: str
    against: str
    over: str = ""
    """The arm whose figure it is divided by."""
    over_figure: str = ""
    """Which; the same if not given."""
    below: str = ""
    """The arm from whose figure it is subtracted."""
    above: str = ""
    """The arm whose figure is subtracted from it."""


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

YIELD_SECONDS = Lending().yield_seconds

SPIKE_SECONDS = 5.0

TRAJECTORIES = 16
"""Of a guest: what keeps its batch full."""

STRICT, SLO = "strict", "slo"

FAILED = Promise("failed", "failed_worst", 0, "max", "users' requests of the window with the most")
"""A failed request has no latency, so that no percentile shows it."""

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
    Arm("guest", launch=Launch(lends=Lends(dial=STRICT_DIAL)), guests=Guest(TRAJECTORIES), users=False),
    Arm(
        "unprotected",
        launch=Launch(lends=Lends(dial=1.0, promises=False)),
        guests=Guest(TRAJECTORIES),
        guests_alone="guest",
    ),
    Arm(
        STRICT,
        launch=Launch(lends=Lends(dial=STRICT_DIAL)),
        guests=Guest(TRAJECTORIES),
        guests_alone="guest",
        promises=(
            FAILED,
            Promise("ttft", "ttft_p99_ms_ratio", 1.10, "max", "serving alone"),
            Promise("tpot", "tpot_p99_ms_ratio", 1.05, "max", "serving alone"),
            Promise("yield", "guest_longest_ms_worst", 1000 * YIELD_SECONDS, "max", "one bounded step"),
            Promise(
                "yield_computed",
                "guest_computed_ms_worst",
                1000 * YIELD_SECONDS,
                "max",
                "one bounded step, less what the engine's thread waited for a core",
            ),
            Promise(
                "burst_to_yield", "waited_p99_ms", 1000 * YIELD_SECONDS, "max", "more than serving alone", above=ALONE
            ),
            Promise("prefix_hits", "prefix_hit_rate_ratio", 0.98, "min", "serving alone"),
            Promise("harvest", "harvest", 0.80, "min", "the guest alone, in the time that serving leaves idle"),
            Promise(
                "guest_step",
                "guest_step_ms",
                4.0,
                "min",
                "serving's step: the median time between two tokens that a user gets",
                over_figure="gap_p50_ms",
                over=ALONE,
            ),
        ),
    ),
    Arm(
        SLO,
        launch=Launch(lends=Lends(dial=SLO_DIAL)),
        guests=Guest(TRAJECTORIES),
        guests_alone="guest",
        promises=(
            replace(FAILED, check="slo_failed"),
            Promise("slo_ttft", "ttft_p99_ms_ratio", 1.10, "max", "serving alone"),
            Promise("slo_ttft_missed", "ttft_attainment", 0.005, "max", "less than serving alone", below=ALONE),
            Promise("slo_tpot_missed", "tpot_attainment", 0.005, "max", "less than serving alone", below=ALONE),
            Promise("slo_yield", "guest_longest_ms_worst", 1000 * YIELD_SECONDS, "max", "one bounded step"),
            Promise("slo_prefix_hits", "prefix_hit_rate_ratio", 0.98, "min", "serving alone"),
            Promise("slo_harvest", "guest_tokens_per_second", 1.25, "min", "strict", over=STRICT),
        ),
    ),
    Arm(
        "spike",
        launch=Launch(lends=Lends(dial=SLO_DIAL)),
        guests=Guest(TRAJECTORIES, spike_seconds=SPIKE_SECONDS),
        guests_alone="guest",
        promises=(
            replace(FAILED, check="spike_failed"),
            Promise("spike_ttft_missed", "ttft_attainment", 0.005, "max", "less than serving alone", below=ALONE),
            Promise("spike_tpot_missed", "tpot_attainment", 0.005, "max", "less than serving alone", below=ALONE),
        ),
    ),
)

SWEEP = tuple(
    Arm(f"dial {dial:g}", launch=Launch(lends=Lends(dial=dial)), guests=Guest(TRAJECTORIES), guests_alone="guest")
    for dial in (0.25, 0.5, 0.75, 1.0)
)
