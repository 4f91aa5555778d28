"""A simulation of cells and of lenders that count their leases by their own clocks."""

from dataclasses import dataclass, field

from rose.pipeline.control.config import ControlConfig
from rose.pipeline.control.elasticity import ElasticityCore
from rose.schemas.cells import CellSummary, ExecutorLine
from rose.schemas.grants import CapacityGrant, GrantSource
from rose.schemas.heartbeats import ExecutorState
from rose.schemas.wire import encode

JOB, OTHER = "ns.:run", "ns.:other"
CONFIG = ControlConfig(most_lenders=2, lease_seconds=12.0, margin_seconds=2.0, dwell_seconds=5.0, idle_seconds=4.0)


def line(name: str, **other: object) -> ExecutorLine:
    fields: dict[str, object] = {
        "serving": True,
        "by_grant": True,
        "state": ExecutorState.PAUSED,
        "open": False,
        "free_turns": 0,
        "free_tokens": 0,
        "held_turns": 0,
        "held_tokens": 0,
        "load_seconds": 0.0,
        "prefill_tokens_per_second": 1.0,
        "decode_tokens_per_second": 1.0,
        "lanes": 8,
        "lag_versions": 0,
        "serving_running": 0,
        "serving_waiting": 0,
        **other,
    }
    return ExecutorLine(worker=name, **fields)  # type: ignore[arg-type]


def at_work(name: str, **other: object) -> ExecutorLine:
    fields: dict[str, object] = {
        "state": ExecutorState.READY,
        "open": True,
        "prefill_tokens_per_second": 1000.0,
        "decode_tokens_per_second": 25.0,
        "free_turns": 8,
        "free_tokens": 8000,
        **other,
    }
    return line(name, **fields)


DEDICATED = at_work("d", serving=False, by_grant=False, free_turns=0, load_seconds=4.0)


def summary(*lines: ExecutorLine, waiting: int = 0, cell: int = 0, cells: int = 1) -> CellSummary:
    return CellSummary(
        cell=cell,
        cells=cells,
        router="router-0",
        waiting_turns=waiting,
        outstanding_turns=0,
        wanted_tokens=300 * waiting,
        prefill_tokens=200 * waiting,
        new_tokens=100 * waiting,
        waiting_seconds=0.0,
        policy_version=0,
        executors=lines,
        written_at=0.0,
    )


@dataclass
class SimulatedLender:
    """A lender that reads the written grants and counts its lease by itself."""

    wakes_in: float = 3.0
    until: float = 0.0
    comes_at: float | None = None
    busy: int = 0
    hand: bool | None = None
    """The manual grant of the lender; None if there is none."""

    def read(self, grant: CapacityGrant, now: float) -> None:
        lent = now < self.until
        self.until = now + grant.lease_seconds if grant.lend and grant.job == JOB else 0.0
        if self.until and not lent:
            self.comes_at = now + self.wakes_in

    def lends(self, now: float) -> bool:
        return (now < self.until) if self.hand is None else self.hand

    def line(self, name: str, now: float) -> ExecutorLine:
        there = self.lends(now) and self.comes_at is not None and now >= self.comes_at
        return at_work(name, serving_running=self.busy) if there else line(name, serving_running=self.busy)


@dataclass
class ControlSimulation:
    config: ControlConfig = CONFIG
    now: float = 1000.0
    lenders: dict[str, SimulatedLender] = field(default_factory=dict)
    log: list[CapacityGrant] = field(default_factory=list)
    deleted: list[tuple[str, GrantSource]] = field(default_factory=list)
    control: ElasticityCore = field(init=False)

    def __post_init__(self) -> None:
        self.control = ElasticityCore(self.config, JOB)

    def summary(self, waiting: int) -> CellSummary:
        return summary(DEDICATED, *(each.line(name, self.now) for name, each in self.lenders.items()), waiting=waiting)

    def second(self, waiting: int, *, silent: bool = False) -> list[CapacityGrant]:
        """Advance the simulation by one second, with or without a summary."""
        self.now += 1.0
        if not silent:
            self.control.on_summary(self.summary(waiting), self.now)
        written = self.control.tick(self.now)
        for grant in written:
            encode(grant)
            assert grant.reason and grant.job == JOB and grant.lease_seconds == self.config.lease_seconds
            if grant.worker in self.lenders:
                self.lenders[grant.worker].read(grant, self.now)
            self.control.on_grant(grant.worker, grant, self.now)  # as it is read back from the log
        self.log += written
        for worker, grant_source in self.control.expired_grants(self.now):
            self.control.on_grant(worker, None, self.now, source=grant_source)
            self.deleted.append((worker, grant_source))
        return written

    def seconds(self, count: int, waiting: int, *, silent: bool = False) -> list[CapacityGrant]:
        return [grant for _ in range(count) for grant in self.second(waiting, silent=silent)]

    @property
    def lending(self) -> set[str]:
        return {name for name, each in self.lenders.items() if each.lends(self.now)}


def fleet(*names: str, **other: object) -> ControlSimulation:
    return ControlSimulation(lenders={name: SimulatedLender(**other) for name in names})  # type: ignore[arg-type]


def changed(**changes: object) -> ControlConfig:
    fields = {name: getattr(CONFIG, name) for name in CONFIG.__slots__}
    return ControlConfig(**{**fields, **changes})
