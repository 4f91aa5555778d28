"""Measures cells: the cost of three routers instead of one, and how long the cells of a dead router wait.

Run `python -m bench.cells` on Apache Kafka with KAFKA_HOME set: the embedded broker does not reassign the cells of a
dead router. `--json FILE` stores the result.

shared      Capacity in turns a second of three routers relative to one router, both over the same six cells: three
            times the processor time of a turn with one router, divided by the processor time of a turn with three
            routers. The measure is processor time because the broker and the load share the cores with the routers;
            the throughput is printed too. Each case is measured on its own topics, in alternating windows; the median
            of the windows counts.
replaced    Seconds from the eviction of a killed router to the first summary of its last cell by another router. The
            router is evicted one session timeout after its last heartbeat, which was up to a second before the kill:
            the earliest possible time counts. Turns are requested and answered during the whole time.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import closing

from bench.broker import kafka_home, scratch_broker
from bench.check import Check, options, tell
from bench.load import Executors, Lane, closed_loop, drain
from bench.processes import processor_seconds, start_program
from rose.pipeline.routing.membership import HEARTBEAT_SECONDS, SESSION_SECONDS
from rose.schemas.cells import CellSummary
from rose.topics.admin import create_topics
from rose.topics.catalog import SUMMARIES, Partitions
from rose.topics.log_reader import read_whole_topics
from rose.topics.settings import BusSettings

CELLS = 6
ROUTERS = 3
PARTITIONS = Partitions(home=12, slots=36, cells=CELLS)
FLYING_TURNS = 4_000
WINDOWS = 3
"""Number of windows of each case, interleaved."""
WARM_SECONDS = 8.0
START_SECONDS = 60.0


class Routers:
    """Several routers over their own topics, and the load that passes through the routers."""

    def __init__(self, settings: BusSettings, count: int) -> None:
        create_topics(settings, PARTITIONS)
        self._settings = settings
        self._processes = [start_program("router", settings, number=number) for number in range(count)]
        self.lane = Lane(settings, PARTITIONS, routed=True)
        self.executors = Executors(settings, PARTITIONS)

    def by_cell(self) -> dict[int, str]:
        """Return the router that wrote the newest summary of each cell."""
        found = (each.record for each in read_whole_topics(self._settings, [SUMMARIES]))
        return {summary.cell: summary.router for summary in found if isinstance(summary, CellSummary)}

    def load_until(self, done: Callable[[], bool], *, flying: int = FLYING_TURNS) -> None:
        """Keep turns in flight until `done` returns true. Raises TimeoutError."""
        deadline = time.monotonic() + START_SECONDS
        while not done():
            closed_loop(self.lane, self.executors, flying=flying, seconds=0.25)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {START_SECONDS:.0f} s; cells are served by {self.by_cell()}")

    def shared(self) -> bool:
        """Return whether all cells are served and every router serves at least one."""
        served = self.by_cell()
        return len(served) == CELLS and len(set(served.values())) == len(self._processes)

    def window(self, seconds: float) -> tuple[float, float]:
        """Return turns a second, and microseconds of the routers' processor time per turn."""
        self.load_until(self.shared)
        closed_loop(self.lane, self.executors, flying=FLYING_TURNS, seconds=WARM_SECONDS)
        before = self._processor_seconds()
        arrived, took = closed_loop(self.lane, self.executors, flying=FLYING_TURNS, seconds=seconds)
        used = self._processor_seconds() - before
        return arrived / took, 1e6 * used / arrived

    def replaced(self) -> float:
        """Kill one router; return the seconds from its eviction until other routers serve all of its cells."""
        self.load_until(self.shared, flying=200)
        lost = {cell for cell, router in self.by_cell().items() if router == "router-1"}
        self._processes[1].kill()
        killed_at = time.time()
        self.load_until(lambda: "router-1" not in self.by_cell().values(), flying=200)
        first: dict[int, float] = {}
        for each in read_whole_topics(self._settings, [SUMMARIES]):
            record, at = each.record, each.timestamp_seconds
            if (
                isinstance(record, CellSummary)
                and record.router != "router-1"
                and record.cell in lost
                and at > killed_at
            ):
                first.setdefault(record.cell, at)
        return max(first.values()) - killed_at - (SESSION_SECONDS - HEARTBEAT_SECONDS)

    def _processor_seconds(self) -> float:
        return sum(processor_seconds(process.pid) for process in self._processes)

    def close(self) -> None:
        drain(self.lane, self.executors)
        self.lane.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(60)


def measure(settings_of: Callable[[str], BusSettings], seconds: float) -> list[Check]:
    """Measure both checks. `settings_of` returns the settings of a namespace of the broker."""
    rates: dict[int, list[float]] = {1: [], ROUTERS: []}
    costs: dict[int, list[float]] = {1: [], ROUTERS: []}
    gaps: list[float] = []
    for number in range(WINDOWS):
        for count in rates:
            with closing(Routers(settings_of(f"cells-{count}-{number}."), count)) as routers:
                rate, cost = routers.window(seconds)
                rates[count].append(rate)
                costs[count].append(cost)
                if count > 1:
                    gaps.append(routers.replaced())
    alone, together = (statistics.median(costs[count]) for count in (1, ROUTERS))
    shared = Check(
        name="shared",
        value=round(ROUTERS * alone / together, 3),
        unit=f"routers' worth of {ROUTERS}",
        bound=2.4,
        direction="min",
        against=f"one router over the same {CELLS} cells; processor time a turn, medians of {WINDOWS} windows",
        details={
            "microseconds_a_turn": {count: [round(each, 1) for each in costs[count]] for count in costs},
            "turns_a_second": {count: [round(each) for each in rates[count]] for count in rates},
        },
    )
    replaced = Check(
        name="replaced",
        value=round(max(gaps), 3),
        unit="s after its eviction",
        bound=3.0,
        direction="max",
        against=f"a router of {ROUTERS} killed with SIGKILL, session {SESSION_SECONDS:g} s; the worst of {WINDOWS}",
        details={"seconds": [round(gap, 3) for gap in gaps]},
    )
    return [shared, replaced]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each window")
    arguments = parser.parse_args()
    if kafka_home() is None:
        parser.error("this takes an Apache Kafka: set KAFKA_HOME to a folder with its libs/")
    with scratch_broker() as broker:
        name, checks = broker.name, measure(broker.settings, arguments.seconds)
    tell(checks, broker=name, file=arguments.json)


if __name__ == "__main__":
    main()
