"""The storm: real roles on a real broker, everything done to them that a seed draws, and what the log says then.

Example
    report = blow(folder, draw(seed, Shape(nodes=3)), cluster)
    assert not report.breaches, report
"""

import json
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from rose.topics.admin import create_topics
from rose.topics.catalog import OUTCOMES, PROMPTS, REQUESTED, SAMPLES, Partitions
from rose.topics.local_broker import QUIET, Broker
from rose.topics.queries import offset_in
from rose.topics.settings import BusSettings
from tests.support.brokers import flags
from tests.support.kafka_cluster import Cluster
from tests.support.lender_server_fixtures import SERVING
from tests.support.storm.lines import Line, LineKind
from tests.support.storm.log_checks import Log, breaches, read_all, read_log
from tests.support.storm.plan import SLOTS, Act, Plan, PlannedFault, Role, Worker
from tests.support.storm.roles import Roles
from tests.support.storm.stalls import Interval, Stall, excuses, stalls

MOST_STALL_SECONDS = 20.0
"""Longest allowed stall, in seconds."""
LEAST_ASKED = 0.9
"""Share of the planned stop requests that must happen. A worker that is still leaving cannot be stopped again."""
READY_SECONDS = 600.0
"""Time that all roles together may take to start. A serving engine takes longest."""
SILENCE_SECONDS = 75.0
"""A storm without an applied turn or an outcome for so long is aborted. The time includes a freeze, a session timeout
and a start."""
DRAIN_SECONDS = 240.0
"""Time after the last fault within which everything must end."""
LETTERS_SECONDS = 30.0
"""Time that the last dead letters may take after everything else has ended."""
TICK_SECONDS = 0.05
LOOK_SECONDS = 2.0
"""Time between two checks of the log."""
PRODUCE_SECONDS = 1.0
"""Time between two deliveries of lines to kcat."""
SHOWN_BREACHES = 40
SHOWN_STALLS = 10

NAMESPACE = "storm."
PARTITIONS = Partitions(home=6, slots=SLOTS, samples=2, chunks=2)
"""Partitions for one cell."""
GROUPS_PER_STEP = 4
CONFIG = """
[run]
name = "storm"
folder = "{folder}"
environment_workers = 3
executors = 3

[topics]
home_partitions = {partitions.home}
inbox_slots = {partitions.slots}
sample_partitions = {partitions.samples}
chunk_partitions = {partitions.chunks}
cells = {partitions.cells}

[environment]
max_turn_tokens = 16
max_context_tokens = 256
window_groups = 8
members_ratio = {members_ratio}
groups_ratio = {groups_ratio}
step_timeout_seconds = 8.0
environments = ["storm_environments:Blocking"]
import_paths = ["{imports}"]

[executor]
max_turns = 16
max_model_len = 256
step_tokens = 512
kv_cache_bytes = 16777216
vllm = {{ tensor_parallel_size = {ranks} }}

[serving]
environment = {{ {environment} }}

[control]
page_port = 0
lease_seconds = 6.0
dwell_seconds = 3.0
idle_seconds = 2.0
margin_seconds = 0.5

[trainer]
groups_per_step = {groups_per_step}
total_groups = {total_groups}
minibatches = 1
max_staleness = 8
"""


@dataclass(slots=True)
class Report:
    """Result of a storm."""

    seed: int
    broker: str
    folder: Path
    """Folder with the journal, the excused times and the logs of all roles."""
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    """Number of faults by kind."""
    crashes: Counter[str] = field(default_factory=Counter)
    """Roles that ended by themselves and were restarted."""
    crash_words: list[str] = field(default_factory=list)
    """Last log lines of crashed roles."""
    trajectories: int = 0
    turns: int = 0
    """Number of applied turns."""
    repeated: int = 0
    """Number of attempts beyond the first."""
    dropped: int = 0
    """Number of results that were not applied."""
    letters: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    stall: Stall | None = None
    """The longest stall."""
    left: Counter[int] = field(default_factory=Counter)
    """Exit statuses of stopped workers; at the end all remaining workers are stopped."""
    attempts_at_fault: int = 0
    """Largest number of failed attempts at one turn."""
    waits: dict[Role, float] = field(default_factory=dict)
    """Longest wait of a turn for each role, in seconds."""
    breaches: list[str] = field(default_factory=list)

    @property
    def asked_to_leave(self) -> int:
        """Number of stop requests during the storm."""
        return sum(many for what, many in self.faults.items() if what.startswith(f"{Act.LEAVE.value} "))

    @property
    def stall_seconds(self) -> float:
        return 0.0 if self.stall is None else self.stall.seconds

    def __str__(self) -> str:
        lines = [
            f"storm {self.seed} on {self.broker}: {self.seconds:.0f} s, {self.trajectories} trajectories, "
            f"{self.turns} turns, {sum(self.faults.values())} faults",
            f"faults: {_counts_text(self.faults)}; ended by themselves: {_counts_text(self.crashes)}",
            f"outcomes: {_counts_text(self.outcomes)}; {self.letters} dead letters",
            f"{self.repeated} turns repeated, {self.dropped} results dropped, longest stall {self.stall_seconds:.1f} s",
            "longest waits: " + ", ".join(f"{role.value} {seconds:.1f} s" for role, seconds in self.waits.items()),
            *self.crash_words,
        ]
        if self.breaches:
            lines += [f"{len(self.breaches)} breaches; journal and logs are in {self.folder}"]
            lines += self.breaches[:SHOWN_BREACHES]
        return "\n  ".join(lines)


def _counts_text(counts: Counter[str]) -> str:
    return ", ".join(f"{many} {name}" for name, many in sorted(counts.items())) or "none"


class StormBroken(Exception):
    """Raised if the storm cannot continue because nothing progresses."""


def blow(folder: Path, plan: Plan, broker: Cluster | Broker, *, sites: Sequence[Path] = ()) -> Report:
    """Run the storm on its own broker, and check the log. `sites` are those of `Roles`.

    Call this from a thread that lives as long as the storm.
    """
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    report = Report(plan.seed, broker.name, folder, trajectories=len(plan.trajectories))
    settings = broker.settings(NAMESPACE)
    partitions = replace(PARTITIONS, cells=plan.shape.cells)
    create_topics(settings, partitions, replication_factor=plan.shape.nodes or 1)
    arguments = ("--config", str(_configure(folder, plan)), *flags(settings))
    shape = plan.shape
    stays_in = 1 if shape.moves else shape.cells
    roles = Roles(folder, arguments, broker, SLOTS, sites, cells=stays_in, controlled=bool(shape.control))
    with closing(roles):
        storm = _Storm(plan, settings, roles)
        try:
            storm.gather()
            storm.rage()
        except StormBroken as error:
            report.breaches.append(str(error))
        roles.leave()
    report.breaches += [f"{worker} did not leave when it was asked to" for worker in roles.overdue]
    report.breaches += storm.unproduced()
    report.faults, report.crashes, report.crash_words = roles.faults, roles.crashes, roles.crash_words
    report.left = roles.left
    if isinstance(broker, Cluster):
        broker.await_in_sync(READY_SECONDS)
    _conclude(report, plan, roles, settings)
    report.seconds = time.monotonic() - began
    return report


def _configure(folder: Path, plan: Plan) -> Path:
    path = folder / "storm.toml"
    summary = CONFIG.format(
        folder=folder,
        partitions=replace(PARTITIONS, cells=plan.shape.cells),
        imports=Path(__file__).with_name("environments"),
        groups_per_step=GROUPS_PER_STEP,
        total_groups=len(plan.groups) + plan.refused,
        ranks=plan.shape.ranks,
        members_ratio=plan.shape.members_ratio,
        groups_ratio=plan.shape.groups_ratio,
        environment=", ".join(f'{name} = "{value}"' for name, value in SERVING.items()),
    )
    path.write_text(summary)
    return path


def _conclude(report: Report, plan: Plan, roles: Roles, settings: BusSettings) -> None:
    log = read_log(settings, blocked=plan.blocked)
    report.turns = log.turns
    report.repeated = sum(log.dispatches.values()) - len(log.dispatches)
    report.dropped = log.results - log.turns
    report.letters = len(log.dead_letters)
    report.attempts_at_fault, report.waits = log.faults, log.waits
    report.outcomes = Counter(end for ends in log.outcomes.values() for end in ends)
    ended = max((each.at for each in roles.happenings), default=0.0)
    work = list(work_left(plan, log, until=ended))
    excused = [] if plan.in_turn else excuses(roles.happenings, until=ended)
    found = stalls(log.applied_at, work, excused)
    summary = {"excused": excused, "longest stalls": [asdict(stall) for stall in found[:SHOWN_STALLS]]}
    (report.folder / "stalls.json").write_text(json.dumps(summary, indent=1))
    report.stall = found[0] if found else None
    if report.stall_seconds > MOST_STALL_SECONDS:
        assert report.stall is not None
        report.breaches.append(
            f"no turn was applied from {report.stall.begin:.1f} to {report.stall.end:.1f}, "
            f"for {report.stall_seconds:.1f} s of which there is no excuse"
        )
    report.breaches += breaches(plan, log, settings)


def work_left(plan: Plan, log: Log, *, until: float) -> list[Interval]:
    """Return the times in which a requested group had not ended."""
    requested: dict[str, list[float]] = defaultdict(list)
    for line in plan.lines:
        if line.sort is not LineKind.BAD and line.mark in log.produced_at:
            requested[line.group_id].append(log.produced_at[line.mark])
    groups = plan.groups
    return [
        (min(moments), max(log.sampled_at.get(f"{group_id}:{index}", until) for index in range(groups[group_id])))
        for group_id, moments in requested.items()
    ]


class _Watch:
    """Watches the progress of the log during the storm. It queries only end offsets, because a reader would use a whole
    core."""

    def __init__(self, settings: BusSettings) -> None:
        self._address = {"bootstrap.servers": settings.bootstrap, **QUIET}
        self._admin = AdminClient(self._address)
        names = [*map(settings.topic, (REQUESTED, SAMPLES, OUTCOMES))]
        known = self._admin.list_topics(timeout=LOOK_SECONDS).topics
        self._ends = {
            TopicPartition(name, part): OffsetSpec.latest() for name in names for part in known[name].partitions
        }
        self._seen: list[int] = []
        self._next_look = 0.0
        self.moved_at = time.monotonic()

    def look(self) -> None:
        """Check the progress at intervals."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        try:
            found = self._admin.list_offsets(self._ends, request_timeout=LOOK_SECONDS)
            seen = [offset_in(end) for end in found.values()]
        except KafkaException:  # a node is down; a client that met this may keep an old leader epoch for good
            self._admin = AdminClient(self._address)
            return
        if seen != self._seen:
            self._seen, self.moved_at = seen, time.monotonic()


class _Storm:
    """The course of a storm."""

    def __init__(self, plan: Plan, settings: BusSettings, roles: Roles) -> None:
        self._plan = plan
        self._settings = settings
        self._roles = roles
        self._watch = _Watch(settings)
        self._lines = list(plan.lines)
        self._kcats: list[subprocess.Popen[bytes]] = []
        self._failures: list[str] = []
        self._next_produce = 0.0

    def gather(self) -> None:
        """Start all workers and wait until all of them are ready."""
        for worker in self._plan.first:
            self._roles.start(worker)
        deadline = time.monotonic() + READY_SECONDS
        while late := self._late():
            if {worker.role for worker in late} == {Role.TRAINER}:
                self._roles.proven(late[0])  # executors serve the published version
            self._turn_over()
            if time.monotonic() > deadline:
                words = "; ".join(f"{worker}: {self._roles.last_words(worker)}" for worker in late)
                raise StormBroken(f"not ready after {READY_SECONDS:.0f} s: {words}")

    def rage(self) -> None:
        """Carry out the plan, then wait until every trajectory has ended and every invalid line is dead-lettered."""
        began = self._watch.moved_at = time.monotonic()
        planned_faults, through = list(self._plan.planned_faults), self._plan.shape.seconds
        while not (self._roles.complete and self._all_produced()):
            now = time.monotonic() - began
            while planned_faults and planned_faults[0].at <= now and not self._too_soon(planned_faults[0]):
                self._roles.do(planned_faults.pop(0))
            self._produce(self._plan.due(now, len(planned_faults)))
            self._turn_over()
            if self._plan.in_turn and planned_faults:  # there may be no work until the next fault releases lines
                through, self._watch.moved_at = now, time.monotonic()
            if time.monotonic() - self._watch.moved_at > SILENCE_SECONDS:
                raise StormBroken(f"nothing moved for {SILENCE_SECONDS:.0f} s")
            if now > through + DRAIN_SECONDS:
                raise StormBroken(f"work was left {DRAIN_SECONDS:.0f} s after the last fault")
        deadline = time.monotonic() + LETTERS_SECONDS
        while not self._all_dead() and time.monotonic() < deadline:
            self._turn_over()

    def _too_soon(self, planned_fault: PlannedFault) -> bool:
        """Whether other workers must be healthy first."""
        if self._plan.in_turn:
            return planned_fault.act is Act.LEAVE and not self._roles.all_well()
        return (
            planned_fault.act is Act.KILL and planned_fault.worker.role is Role.NODE and self._roles.waits_for_nodes()
        )

    def _late(self) -> list[Worker]:
        """Return the workers that are not ready; one ready router is enough."""
        first = self._plan.first
        served = any(self._roles.ready(worker) for worker in first if worker.role is Role.ROUTER)
        return [
            worker for worker in first if not self._roles.ready(worker) and not (served and worker.role is Role.ROUTER)
        ]

    def _all_dead(self) -> bool:
        """Whether every invalid line is dead-lettered."""
        dead = {line.mark for line in self._plan.lines if line.sort is LineKind.BAD}
        dlq_topic = f"{self._settings.namespace}{PROMPTS.dead_letters}"
        return dead <= {found.mark for found in read_all(self._settings, [dlq_topic])}

    def unproduced(self) -> list[str]:
        """Return the lines that kcat could not produce."""
        for kcat in self._kcats:
            kcat.kill()
            kcat.wait()
        return self._failures

    def _turn_over(self) -> None:
        self._roles.tick()
        self._watch.look()
        time.sleep(TICK_SECONDS)  # logs and processes are polled, because they send no events

    def _produce(self, now: float) -> None:
        """Give the due lines to kcat: lines with a key and lines without."""
        if now < self._next_produce:
            return
        self._next_produce = now + PRODUCE_SECONDS
        due: list[Line] = []
        while self._lines and self._lines[0].at <= now:
            due.append(self._lines.pop(0))
        self._hand_over([b"%s\t%s\n" % (line.key.encode(), line.value) for line in due if line.key], "-K", "\t")
        self._hand_over([line.value + b"\n" for line in due if not line.key])

    def _hand_over(self, lines: Sequence[bytes], *options: str) -> None:
        if not lines:
            return
        topic = self._settings.topic(PROMPTS)
        command = ["kcat", "-P", "-b", self._settings.bootstrap, "-t", topic, "-X", "enable.idempotence=true", *options]
        kcat = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert kcat.stdin is not None
        kcat.stdin.write(b"".join(lines))
        kcat.stdin.close()
        self._kcats.append(kcat)

    def _all_produced(self) -> bool:
        for kcat in [kcat for kcat in self._kcats if kcat.poll() is not None]:
            self._kcats.remove(kcat)
            if kcat.returncode != 0:
                assert kcat.stderr is not None
                self._failures.append(f"kcat: {kcat.stderr.read().decode(errors='replace').strip()}")
        return not (self._lines or self._kcats)
