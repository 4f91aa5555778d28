"""One rollout on emulated executors: a real router, environment worker and control app, and the fleet.

Keeps true: no process outlives the block; every sample gets an outcome, as from a trainer.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from threading import Event, Thread

import msgspec
import psutil
from confluent_kafka import OFFSET_BEGINNING

from bench.fleet.fleet import Line, Plan
from bench.processes import processor_seconds
from rose.pipeline.local.fork_server import ForkedProcess, ForkServer
from rose.schemas.cells import CellSummary
from rose.schemas.errors import RoseError
from rose.schemas.grants import CapacityGrant
from rose.schemas.prompts import Prompt
from rose.schemas.samples import Sample
from rose.topics.admin import create_topics
from rose.topics.catalog import GRANTS, PROMPTS, SAMPLES, SUMMARIES, Partitions, home_partition
from rose.topics.log_reader import read_whole_topics
from rose.topics.processes import die_with_parent
from rose.topics.reader import Reader
from rose.topics.records import Envelope
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.weights.trust import run_id
from tests.support.settling import settle

HOMES = 4

RUN = "emulated"

ROSE = "rose"
"""The routing policy of the production router."""

MODEL = Path(str(files("rose.workers.models") / "calculator"))
"""Model folder, of which only the tokenizer is used."""

MOST_TOKENS = 64
"""Most tokens of a turn."""

LIVE_ENVIRONMENTS = 4096
"""Number of live environments: no environment is closed and restored."""

READY_SECONDS = 60.0

SILENT_SECONDS = 60.0
"""Time without an ended trajectory after which the rollout counts as stalled."""


def job_of(settings: BusSettings) -> str:
    """Return the job to which the control app grants."""
    return run_id(settings.namespace, RUN)


class Stalled(RoseError):
    """The rollout makes no progress."""


class Trainer:
    """A thread that writes an outcome for each sample: the smallest trainer that lets groups end."""

    def __init__(self, settings: BusSettings, samples: int) -> None:
        """Start the thread. `samples`: number of sample partitions."""
        self.completed: dict[str, float] = {}
        """Time in unix seconds at which each trajectory's sample was emitted."""
        self.rewarded = 0
        """Number of trajectories that ended regularly."""
        self.samples: list[Sample] = []
        self._writer = Writer(settings, "bench-trainer")
        self._reader = Reader(settings, "bench-trainer")
        self._reader.assign({(SAMPLES, part): OFFSET_BEGINNING for part in range(samples)})
        self._stopping = Event()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._writer.flush()
        self._writer.close()
        self._reader.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            for item in self._reader.read(100, 0.1):
                if isinstance(item, Envelope) and isinstance(item.record, Sample):
                    self._settle(item.record)
            self._writer.poll()

    def _settle(self, sample: Sample) -> None:
        settle(self._writer, sample)
        self.samples.append(sample)
        self.rewarded += sample.reward is not None
        self.completed[sample.trajectory_id] = sample.completed_at


class FleetProcess:
    """The fleet in its own process."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        """Start the fleet. Raises Stalled if it does not start."""
        self._journal = Path(plan.journal)
        file = folder / "fleet.json"
        file.write_bytes(msgspec.json.encode(plan))
        with (folder / "fleet.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bench.fleet.fleet", str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=die_with_parent(os.getpid(), signal.SIGKILL),
            )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != "ready\n":
            raise Stalled(f"the fleet did not start: see {folder / 'fleet.log'}")

    def go(self) -> None:
        """Start the clock of users and of the plan's actions."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def stop(self) -> list[Line]:
        """Stop all executors; return the journal."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        if self.process.wait(READY_SECONDS):
            raise Stalled(f"the fleet ended with status {self.process.returncode}")
        lines = self._journal.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Line) for line in lines]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass(slots=True)
class Rollout:
    """A running rollout."""

    settings: BusSettings
    fleet: FleetProcess
    trainer: Trainer
    control: ForkedProcess | None
    roles: Mapping[str, int]
    """Process ids by name, including the fleet."""
    folder: Path
    began_at: float = 0.0

    def submit(self, prompts: Sequence[Prompt], *, go: bool = True) -> None:
        """Submit all prompts at once, as a user does. `go` starts the clocks of users and of the plan."""
        with closing(Writer(self.settings, "bench-prompts")) as writer:
            if go:
                self.fleet.go()
                self.began_at = time.time()
            for prompt in prompts:
                writer.write(PROMPTS, prompt, key=prompt.group_id, partition=home_partition(prompt.group_id, HOMES))
            writer.flush()

    def until(self, met: Callable[[], bool]) -> None:
        """Wait until the condition holds. Raises Stalled."""
        seen, deadline = -1, time.monotonic() + SILENT_SECONDS
        while not met():
            if len(self.trainer.completed) != seen:
                seen, deadline = len(self.trainer.completed), time.monotonic() + SILENT_SECONDS
            if time.monotonic() > deadline or self.fleet.process.poll() is not None:
                raise Stalled(f"{seen} trajectories have ended, and no more do; logs are in {self.folder}")
            time.sleep(0.1)  # logs and a process are polled, because neither reports a change

    def ended(self, prompts: Sequence[Prompt]) -> bool:
        """Return whether all trajectories of these prompts have ended."""
        groups = {prompt.group_id for prompt in prompts}
        done = sum(name.partition(":")[0] in groups for name in list(self.trainer.completed))
        return done == sum(prompt.group_size for prompt in prompts)

    def lending(self) -> set[str]:
        """Return the workers whose newest grant lets them lend."""
        newest = {envelope.key: envelope.record for envelope in read_whole_topics(self.settings, [GRANTS])}
        return {name for name, grant in newest.items() if isinstance(grant, CapacityGrant) and grant.lend}

    def processor_seconds(self) -> dict[str, float]:
        """Return the processor seconds of each live role so far."""
        taken = {}
        for name, pid in self.roles.items():
            with suppress(psutil.NoSuchProcess):
                taken[name] = processor_seconds(pid)
        return taken

    def waiting(self) -> Iterable[tuple[float, int]]:
        """Return the time of each summary, and its number of waiting turns."""
        for envelope in read_whole_topics(self.settings, [SUMMARIES]):
            if isinstance(envelope.record, CellSummary):
                yield envelope.record.written_at, envelope.record.waiting_turns


@contextmanager
def rollout(
    settings: BusSettings,
    plan: Plan,
    folder: Path,
    *,
    groups: int,
    control: Mapping[str, object] | None,
    policy: str = ROSE,
) -> Iterator[Rollout]:
    """Create the topics and run the roles.

    Args:
        settings: The bus.
        plan: The fleet.
        folder: Folder of logs.
        groups: Groups that are open at once.
        control: Settings of the control app; None for a rollout without one.
        policy: The routing policy; any other than ROSE's is that of `bench.fleet.policy_router`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    slots = 1 + max(spec.slot for spec in plan.executors)
    partitions = Partitions(home=HOMES, slots=slots, samples=2, chunks=1)
    create_topics(settings, partitions)
    environment = {
        "model.folder": MODEL,
        "trainer.groups_per_step": 1,
        "environment.window_groups": groups,
        "environment.max_turn_tokens": MOST_TOKENS,
        "environment.max_live_environments": LIVE_ENVIRONMENTS,
    }
    starts: list[tuple[str, Mapping[str, object]]] = [("environment", environment)]
    if policy == ROSE:
        starts.append(("router", {}))
    if control is not None:
        values = {f"control.{name}": value for name, value in control.items()}
        starts.append(("control", {"control.page_port": 0, **values}))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROSE_")}
    with ForkServer(folder, inherited | {"PYTHONPATH": os.pathsep.join(sys.path)}) as fork_server:
        roles = {
            role: fork_server.start(
                (role, "--number=0", *_flags(settings, values)), name=role, log=folder / f"{role}.log"
            )
            for role, values in starts
        }
        with (
            _policy_router(settings, policy, folder),
            closing(FleetProcess(plan, folder)) as fleet,
            closing(Trainer(settings, partitions.samples)) as trainer,
        ):
            parks = 0 if control is None else sum(spec.lends for spec in plan.executors)
            _until_ready(roles.values(), folder, settings, parks=parks, summaries=policy == ROSE)
            pids = {name: role.pid for name, role in roles.items()} | {"fleet": fleet.process.pid}
            yield Rollout(settings, fleet, trainer, roles.get("control"), pids, folder)


@contextmanager
def _policy_router(settings: BusSettings, policy: str, folder: Path) -> Iterator[None]:
    """Run the router of a policy; nothing if the policy is ROSE's. Raises Stalled if it does not start."""
    if policy == ROSE:
        yield
        return
    file = folder / "policy_router.json"
    file.write_bytes(msgspec.json.encode(settings))
    with (folder / "policy_router.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.fleet.policy_router", policy, str(file)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            preexec_fn=die_with_parent(os.getpid(), signal.SIGKILL),
        )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise Stalled(f"the policy's router did not start: see {folder / 'policy_router.log'}")
        yield
    finally:
        process.kill()
        process.wait()


def _until_ready(
    roles: Collection[ForkedProcess], folder: Path, settings: BusSettings, *, parks: int, summaries: bool
) -> None:
    """Wait until the roles are ready and the control app has parked this many lenders. Raises Stalled.

    `summaries`: whether the router writes summaries.
    """
    deadline = time.monotonic() + READY_SECONDS
    while True:
        ended = any(role.poll() is not None for role in roles)
        decided = len({envelope.key for envelope in read_whole_topics(settings, [GRANTS])})
        summarised = not summaries or any(True for _ in read_whole_topics(settings, [SUMMARIES]))
        log = (folder / "environment.log").read_text(encoding="utf-8")
        if summarised and decided >= parks and "event=homes_recovered" in log:
            return
        if ended or time.monotonic() > deadline:
            raise Stalled(f"the roles did not come up: logs are in {folder}")


def _flags(settings: BusSettings, values: Mapping[str, object]) -> Sequence[str]:
    everything = {"run.name": RUN, "broker.embedded": str(settings.embedded).lower(), **values}
    properties = [word for name, value in settings.properties.items() for word in ("-X", f"{name}={value}")]
    words = [word for name, value in everything.items() for word in ("--set", f"{name}={value}")]
    return "--bootstrap-server", settings.bootstrap, "--namespace", settings.namespace, *properties, *words
