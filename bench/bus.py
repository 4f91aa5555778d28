"""Measures the cost of the router: decisions a second, turns a second, and latency relative to a bare loop.

Run `python -m bench.bus` (on the embedded broker; on Apache Kafka with KAFKA_HOME set). `--json FILE` stores the
result. `--context TOKENS` (repeatable) measures contexts by reference instead: `bench.contexts`, and the turns a second
of the router with contexts of 16,000 tokens relative to contexts of 150 tokens.
With `--secured` Apache Kafka has TLS, SCRAM and an authorizer. Router and bare loop sign in with the rights of a
router, the load with the rights of an environment worker and an executor.

core        Decisions a second of one core: a recorded history of 200 executors and 10,000 live trajectories is
            replayed through the pure core. A decision is one request and its dispatch; results and heartbeats are part
            of the history and of the measured time. Time is processor time, so other load does not count.
core_beside_measure, core_growth
            With `--scale`, and instead of all other checks: decisions a second with fleets of 50 and 5,000 workers,
            relative to an older commit with the same fleets in the same run; and the factor by which ten times the
            workers increase the cost of a decision, with 50 to 5,000 workers. A slow core would miss the first bound,
            a search over all executors the second.
router      Turns a second through the real router process: a fixed number of turns is in flight, so no queue grows.
            Requests, results and heartbeats all pass the broker.
p50_ratio,  Latency from request to inbox through the router, relative to a bare confluent-kafka loop that moves the
p99_ratio   same records with the same broker, clients, settings and rate, in alternating windows (A B A B). Each window
            has a percentile; the ratio is between the medians over the windows. The percentiles of all pooled turns are
            printed too. A window is long enough to contain periodic work of the router (a commit every 5 s). The rate
            leaves time to spare on two cores: four busy processes share the cores, and a higher rate would measure the
            machine's scheduler. The program that is not measured is stopped (SIGSTOP), and each program has a moment to
            resume.
"""

import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from bench.broker import kafka_home, scratch_broker, scratch_node, user_of
from bench.check import Check, options, tell
from bench.contexts import LONG, TURNS, bytes_a_turn, memory, read_back
from bench.cores import scale
from bench.history import Fleet, Recorder
from bench.load import USUAL, Executors, Lane, Shape, closed_loop, drain, open_loop
from bench.processes import processor_seconds, start_program
from rose.pipeline.routing.router import Router
from rose.topics.acl import ADMIN, ENVIRONMENT, EXECUTOR, ROUTER, Role
from rose.topics.admin import create_topics
from rose.topics.catalog import Partitions
from rose.topics.settings import BusSettings

WORKERS = 200
TRAJECTORIES = 10_000
CORE_SECONDS = 3.0
"""Simulated seconds of the history that are timed, at about 20,000 turns a second; the ramp before them is not
timed."""
CORE_RAMP_SECONDS = 1.5
CORE_REPEATS = 3
FLYING_TURNS = 4_000
"""Number of turns in flight while throughput is measured: 125 for each executor."""
SETTLE_SECONDS = 4.0
"""Seconds of load at the beginning of each window that do not count: librdkafka takes up to 1 s to resume a partition,
and a router that was stopped for long joins its consumer group again."""
SHORT = 150
"""Length of the contexts in tokens whose turns a second are compared with the turns a second of LONG contexts."""
PAIRS = 3
"""Number of pairs of windows: one window with short and one with long contexts."""
WARM_SECONDS = 10.0
"""Seconds of load before each measurement: the first thousands of records on a new Apache Kafka are slow."""


def core() -> Check:
    """Replay a recorded history through new router cores."""
    recorder = Recorder(Fleet(WORKERS, TRAJECTORIES, turn_seconds=0.5))
    recorder.record(CORE_RAMP_SECONDS)
    ramp = len(recorder.history)
    recorder.record(CORE_SECONDS)
    runs = [_replay(recorder, ramp) for _ in range(CORE_REPEATS)]
    decisions = runs[0][0]
    return Check(
        name="core",
        value=round(decisions / statistics.median(processor for _, processor, _ in runs), 1),
        unit="decisions/s",
        bound=20_000,
        direction="min",
        against="one core: processor time of the replay, median of the runs",
        details={
            "workers": WORKERS,
            "live_trajectories": recorder.live,
            "turns_at_executors": recorder.router.outstanding,
            "decisions": decisions,
            "events": len(recorder.history) - ramp,
            "per_wall_second": round(decisions / statistics.median(wall for _, _, wall in runs), 1),
            "runs": [round(decisions / processor) for _, processor, _ in runs],
        },
    )


def _replay(recorder: Recorder, ramp: int) -> tuple[int, float, float]:
    """Return the number of decisions, and the processor and wall seconds that they took."""
    router = Router()
    for now, event in recorder.history[:ramp]:
        router.on_event(event, now)
    before, measured = router.counters.dispatched, recorder.history[ramp:]
    wall, processor = time.perf_counter(), time.process_time()
    for now, event in measured:
        router.on_event(event, now)
        router.tick(now)
    processor, wall = time.process_time() - processor, time.perf_counter() - wall
    assert router.counters == recorder.router.counters, "a replay decides what was decided"
    return router.counters.dispatched - before, processor, wall


class SignIn(Protocol):
    """Returns the settings with which a user of a namespace, with the rights of these roles, reaches the broker."""

    def __call__(self, namespace: str, name: str, *roles: Role) -> BusSettings: ...


class Way:
    """One way from requests to inboxes: a program in its own process, and the load that passes through the program."""

    def __init__(self, program: str, sign_in: SignIn, partitions: Partitions, shape: Shape = USUAL) -> None:
        namespace = f"bench-{program}."
        create_topics(sign_in(namespace, "admin", ADMIN), partitions)
        settings = sign_in(namespace, program, ROUTER)
        self.process = start_program(program, settings)
        self.load = sign_in(namespace, "load", ENVIRONMENT, EXECUTOR)
        self.lane = Lane(self.load, partitions, routed=program == "router", shape=shape)

    @contextmanager
    def at_work(self) -> Iterator[Lane]:
        """Within this context the program runs and its inboxes are read."""
        self.process.send_signal(signal.SIGCONT)
        self.lane.resume()
        yield self.lane
        self.lane.pause()
        self.process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        self.lane.close()
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait(60)


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def bus(sign_in: SignIn, *, seconds: float, rate: float, windows: int) -> list[Check]:
    """Return the checks that need a broker."""
    partitions = Partitions()
    with ExitStack() as stack:
        ways = {program: Way(program, sign_in, partitions) for program in ("router", "bare")}
        for way in ways.values():
            stack.callback(way.close)
        executors = Executors(ways["router"].load, partitions)
        # Latency comes first: the embedded broker saves its whole state repeatedly, and its stalls grow with its data.
        latency = _latency(ways, executors, rate, windows, seconds)
        return [_throughput(ways["router"], executors, seconds), *latency]


def _throughput(way: Way, executors: Executors, seconds: float) -> Check:
    with way.at_work() as lane:
        closed_loop(lane, executors, flying=FLYING_TURNS, seconds=WARM_SECONDS)
        before = processor_seconds(way.process.pid)
        arrived, took = closed_loop(lane, executors, flying=FLYING_TURNS, seconds=seconds)
        used = processor_seconds(way.process.pid) - before
        drain(lane, executors)
    return Check(
        name="router",
        value=round(arrived / took, 1),
        unit="turns/s",
        bound=5_000,
        direction="min",
        against=f"{FLYING_TURNS} turns kept on their way, so that no queue grows",
        details={"seconds": round(took, 1), "router_processor_share": round(used / took, 2)},
    )


def _latency(ways: dict[str, Way], executors: Executors, rate: float, windows: int, seconds: float) -> list[Check]:
    for way in ways.values():
        with way.at_work() as lane:
            open_loop(lane, executors, rate=rate, seconds=WARM_SECONDS, seed=0)
    taken: dict[str, list[Sequence[float]]] = {name: [] for name in ways}
    for window in range(1, windows + 1):
        for name, way in ways.items():
            with way.at_work() as lane:
                open_loop(lane, executors, rate=rate, seconds=SETTLE_SECONDS, seed=-window)
                taken[name].append(open_loop(lane, executors, rate=rate, seconds=seconds / windows, seed=window))
    pooled = {name: [each for window in found for each in window] for name, found in taken.items()}
    checks = []
    for percent in (50, 99):
        milliseconds = {
            name: round(1000 * statistics.median(percentile(window, percent) for window in found), 3)
            for name, found in taken.items()
        }
        checks.append(
            Check(
                name=f"p{percent}_ratio",
                value=round(milliseconds["router"] / milliseconds["bare"], 3),
                unit="of bare",
                bound=1.5,
                direction="max",
                against=f"a bare consume-produce loop at {rate:g} turns/s, {windows} interleaved windows of each",
                details={
                    "router_milliseconds": milliseconds["router"],
                    "bare_milliseconds": milliseconds["bare"],
                    **{
                        f"{name}_pooled_milliseconds": round(1000 * percentile(values, percent), 3)
                        for name, values in pooled.items()
                    },
                    "turns": min(len(values) for values in pooled.values()),
                },
            )
        )
    return checks


def contexts(sign_in: SignIn, lengths: Sequence[int], *, seconds: float) -> list[Check]:
    """Measure the cost of contexts by reference, including the router's throughput with long contexts."""
    settings = sign_in("bench-contexts.", "all", ADMIN, ENVIRONMENT, EXECUTOR)
    create_topics(settings, Partitions())
    checks = [*bytes_a_turn(lengths), memory(max(lengths)), read_back(settings, max(lengths))]
    return [*checks, _long_contexts(sign_in, seconds)]


def _long_contexts(sign_in: SignIn, seconds: float) -> Check:
    """Measure the router's throughput with short and long contexts, in alternating windows."""
    partitions = Partitions()
    with ExitStack() as stack:
        ways: dict[int, Way] = {}
        for tokens in (SHORT, LONG):
            step = -(-tokens // TURNS)
            own = partial(_prefixed, sign_in, f"{tokens}-")
            way = ways[tokens] = Way("router", own, partitions, Shape(step, step, (TURNS,)))
            stack.callback(way.close)
            way.process.send_signal(signal.SIGSTOP)
        rates: dict[int, list[float]] = {SHORT: [], LONG: []}
        for _ in range(PAIRS):
            for tokens, way in ways.items():
                executors = Executors(way.load, partitions)
                rates[tokens].append(_throughput(way, executors, seconds / PAIRS).value)
    return Check(
        name="long_contexts",
        value=round(statistics.median(rates[LONG]) / statistics.median(rates[SHORT]), 3),
        unit=f"of turns/s at {SHORT} tokens",
        bound=0.8,
        direction="min",
        against=f"contexts that grow to {LONG} tokens in {TURNS} turns; {PAIRS} interleaved windows of each",
        details={f"turns_a_second_at_{tokens}": [round(rate) for rate in each] for tokens, each in rates.items()},
    )


def _prefixed(sign_in: SignIn, prefix: str, namespace: str, name: str, *roles: Role) -> BusSettings:
    return sign_in(prefix + namespace, name, *roles)


@contextmanager
def broker_of(secured: Path | None) -> Iterator[tuple[str, SignIn]]:
    """Yield the broker's name and the function that creates its users.

    `secured`: folder of the Apache Kafka that requires authentication.
    """
    if secured is None:
        with scratch_broker() as broker:
            yield broker.name, lambda namespace, name, *roles: broker.settings(namespace)
    else:
        with scratch_node(secured) as node:
            yield f"{node.broker.name} with TLS, SCRAM-SHA-512 and ACLs", partial(user_of, node)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each measurement on the broker")
    parser.add_argument("--rate", type=float, default=250.0, help="turns a second while latency is measured")
    parser.add_argument(
        "--windows", type=int, default=10, help="windows of the router and of the bare loop, interleaved"
    )
    parser.add_argument("--secured", action="store_true", help="use an Apache Kafka with TLS, SCRAM and ACLs")
    parser.add_argument(
        "--context", type=int, action="append", metavar="TOKENS", help="measure contexts by reference of this length"
    )
    parser.add_argument(
        "--scale", action="store_true", help="measure only the core, with small and large fleets; no broker"
    )
    arguments = parser.parse_args()
    if arguments.secured and kafka_home() is None:
        parser.error("--secured takes an Apache Kafka: set KAFKA_HOME to a folder with its libs/")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops broker and programs at exit
    if arguments.scale:
        name, checks = "none", scale()
    else:
        with broker_of(kafka_home() if arguments.secured else None) as (name, sign_in):
            if arguments.context:
                checks = contexts(sign_in, arguments.context, seconds=arguments.seconds)
            else:
                checks = [core()]
                checks += bus(sign_in, seconds=arguments.seconds, rate=arguments.rate, windows=arguments.windows)
    tell(checks, broker=name, file=arguments.json)


if __name__ == "__main__":
    main()
