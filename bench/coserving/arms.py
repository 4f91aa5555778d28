"""The arms of the benchmark: serving alone, and serving with rollouts that share its engine or its process.

An arm defines how the server is started (`launch`), which guests run with it (`guests`), and its bounds. Guests begin
before the users of a window and end after them; their tokens are counted by the times at which they arrived.

    alone       serving alone; the denominator of every ratio
    again       serving alone once more: the difference of two equal arms is the resolution of all ratios
    rollouts    rollouts alone, without users: what rollouts can make of the whole engine
    priority    stock vLLM's `--scheduling-policy priority`, rollouts at a lower priority, as many as fit in a batch
    cap         rollouts of equal priority, never more than CAP at once
    guest       a guest alone in a lending server, without users: what a guest can make of the whole engine
    unprotected a guest that computes unless a request waits, without latency targets
    strict      a guest that computes while serving has no request
    slo         a guest that also computes within the slack of the two budgets
    spike       as slo, and every few seconds all trajectories request turns at once while a policy version arrives

`--sweep` adds arms with a guest at other dials (SWEEP).
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
"""Number of concurrent rollouts in the arm in which this limit protects serving."""

LATER = 10
"""Priority of rollouts; users have vLLM's default, 0, and the smaller number goes first."""

STOP_SECONDS = 60.0


class Guests(Protocol):
    """Rollouts that run together with serving."""

    def run_with(self, server: Server) -> AbstractContextManager[RolloutResult]:
        """Run the guests within the context; after it, the result holds every token with its arrival time."""
        ...


@dataclass(frozen=True)
class Requesters:
    """Rollouts as requests to serving's own engine and model, from a client that keeps a fixed number of requests in
    flight.
    """

    trajectories: int
    priority: int | None = None

    def run_with(self, server: Server) -> AbstractContextManager[RolloutResult]:
        """Run the rollouts. Raises ClientError."""
        return _rolling("rollouts", RolloutTask(server.url, MODEL_NAME, self.trajectories, self.priority, VOCABULARY))


@dataclass(frozen=True)
class Guest:
    """Rollouts of another model, in the guest of a lending server."""

    trajectories: int
    spike_seconds: float = 0.0
    """Seconds between two spikes, in which all trajectories request turns at once while a version arrives; 0: no
    spikes."""

    def run_with(self, server: Server) -> AbstractContextManager[RolloutResult]:
        """Run the guest. Raises ClientError."""
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
    """A bound on a figure of an arm."""

    check: str
    figure: str
    """Name of the arm's figure (bench.coserving.results.Standing.value)."""
    bound: float
    direction: str
    against: str
    over: str = ""
    """Arm whose figure is the divisor."""
    over_figure: str = ""
    """Name of the divisor's figure; empty: the same figure."""
    below: str = ""
    """Arm from whose figure the figure is subtracted."""
    above: str = ""
    """Arm whose figure is subtracted."""


@dataclass(frozen=True)
class Arm:
    """One way to run serving."""

    name: str
    launch: Launch = field(default_factory=Launch)
    guests: Guests | None = None
    users: bool = True
    guests_alone: str = ""
    """Arm without users whose throughput is the reference of these guests' harvest."""
    promises: tuple[Promise, ...] = ()


ALONE, AGAIN = "alone", "again"

PRIORITIES = Launch(flags=("--scheduling-policy", "priority"))

YIELD_SECONDS = Lending().yield_seconds

SPIKE_SECONDS = 5.0

TRAJECTORIES = 16
"""Number of trajectories that keep a guest's batch full."""

STRICT, SLO = "strict", "slo"

FAILED = Promise("failed", "failed_worst", 0, "max", "users' requests of the window with the most")
"""A failed request has no latency, so no percentile shows it."""

ARMS = (
    Arm(
        ALONE,
        promises=(
            Promise("busy_at_least", "busy", 0.15, "min", "the busy share of serving fleets, bursts included"),
            Promise("busy_at_most", "busy", 0.35, "max", "the busy share of serving fleets, bursts included"),
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
