"""One rollout on emulated executors: a real router, environment worker and control app, and the fleet beside them.

Keeps true: nothing that was started here outlives the block; every sample is given an outcome, as a trainer would.
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

MODEL = Path(str(files("rose.workers.models") / "calculator"))
"""Its tokenizer alone is used."""

MOST_TOKENS = 64
"""Of a turn."""

LIVE_ENVIRONMENTS = 4096
"""All that there are: none is closed and restored later."""

READY_SECONDS = 60.0

SILENT_SECONDS = 60.0
"""A rollout that ends no trajectory for so long goes on no more."""


def job_of(settings: BusSettings) -> str:
    """What the control app grants to."""
    return run_id(settings.namespace, RUN)


class Stalled(RoseError):
    """A rollout that does not go on."""


class Trainer:
    """Gives each sample its outcome, on a thread: the smallest thing that lets groups end."""

    def __init__(self, settings: BusSettings, samples: int) -> None:
        """`samples`: partitions."""
        self.completed: dict[str, float] = {}
        """By trajectory: when its sample was emitted, in unix seconds."""
        self.rewarded = 0
        """Those that ended by themselves."""
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
    """The fleet, in a process of its own."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        """Raises Stalled for one that does not come up."""
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
        """Users come from now on, and what the plan does is done."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def stop(self) -> list[Line]:
        """All of them leave; the journal."""
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
    """One that runs."""

    settings: BusSettings
    fleet: FleetProcess
    trainer: Trainer
    control: ForkedProcess | None
    roles: Mapping[str, int]
    """Process ids by name, the fleet's among them."""
    folder: Path
    began_at: float = 0.0

    def submit(self, prompts: Sequence[Prompt], *, go: bool = True) -> None:
        """As a user does, all at once. With `go` the clocks of users and of the plan begin."""
        with closing(Writer(self.settings, "bench-prompts")) as writer:
            if go:
                self.fleet.go()
                self.began_at = time.time()
            for prompt in prompts:
                writer.write(PROMPTS, prompt, key=prompt.group_id, partition=home_partition(prompt.group_id, HOMES))
            writer.flush()

    def until(self, met: Callable[[], bool]) -> None:
        """Raises Stalled."""
        seen, deadline = -1, time.monotonic() + SILENT_SECONDS
        while not met():
            if len(self.trainer.completed) != seen:
                seen, deadline = len(self.trainer.completed), time.monotonic() + SILENT_SECONDS
            if time.monotonic() > deadline or self.fleet.process.poll() is not None:
                raise Stalled(f"{seen} trajectories have ended, and no more do; logs are in {self.folder}")
            time.sleep(0.1)  # what is waited for is asked of logs and of a process, and neither tells when it changes

    def ended(self, prompts: Sequence[Prompt]) -> bool:
        """Whether all their trajectories have."""
        groups = {prompt.group_id for prompt in prompts}
        done = sum(name.partition(":")[0] in groups for name in list(self.trainer.completed))
        return done == sum(prompt.group_size for prompt in prompts)

    def lending(self) -> set[str]:
        """Those whose newest grant has them lend."""
        newest = {envelope.key: envelope.record for envelope in read_whole_topics(self.settings, [GRANTS])}
        return {name for name, grant in newest.items() if isinstance(grant, CapacityGrant) and grant.lend}

    def processor_seconds(self) -> dict[str, float]:
        """By role, so far; of those that live."""
        taken = {}
        for name, pid in self.roles.items():
            with suppress(psutil.NoSuchProcess):
                taken[name] = processor_seconds(pid)
        return taken

    def waiting(self) -> Iterable[tuple[float, int]]:
        """When each summary was written, and how many turns waited."""
        for envelope in read_whole_topics(self.settings, [SUMMARIES]):
            if isinstance(envelope.record, CellSummary):
                yield envelope.record.written_at, envelope.record.waiting_turns


@contextmanager
def rollout(
    settings: BusSettings, plan: Plan, folder: Path, *, groups: int, control: Mapping[str, object] | None
) -> Iterator[Rollout]:
    """The roles on a broker, topics created; `control`: its settings, None for a run without one."""
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
    wanted: list[tuple[str, Mapping[str, object]]] = [("router", {}), ("environment", environment)]
    if control is not None:
        said = {f"control.{name}": value for name, value in control.items()}
        wanted.append(("control", {"control.page_port": 0, **said}))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROSE_")}
    with ForkServer(folder, inherited | {"PYTHONPATH": os.pathsep.join(sys.path)}) as fork_server:
        roles = {
            role: fork_server.start(
                (role, "--number=0", *_flags(settings, said)), name=role, log=folder / f"{role}.log"
            )
            for role, said in wanted
        }
        with closing(FleetProcess(plan, folder)) as fleet, closing(Trainer(settings, partitions.samples)) as trainer:
            parks = 0 if control is None else sum(spec.lends for spec in plan.executors)
            _until_ready(roles.values(), folder, settings, parks=parks)
            pids = {name: role.pid for name, role in roles.items()} | {"fleet": fleet.process.pid}
            yield Rollout(settings, fleet, trainer, roles.get("control"), pids, folder)


def _until_ready(roles: Collection[ForkedProcess], folder: Path, settings: BusSettings, *, parks: int) -> None:
    """Also until the control app has told so many lenders to wait. Raises Stalled."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        ended = any(role.poll() is not None for role in roles)
        told = len({envelope.key for envelope in read_whole_topics(settings, [GRANTS])})
        heard = any(True for _ in read_whole_topics(settings, [SUMMARIES]))
        said = (folder / "environment.log").read_text(encoding="utf-8")
        if heard and told >= parks and "event=homes_recovered" in said:
            return
        if ended or time.monotonic() > deadline:
            raise Stalled(f"the roles did not come up: logs are in {folder}")


def _flags(settings: BusSettings, said: Mapping[str, object]) -> Sequence[str]:
    everything = {"run.name": RUN, "broker.embedded": str(settings.embedded).lower(), **said}
    properties = [word for name, value in settings.properties.items() for word in ("-X", f"{name}={value}")]
    words = [word for name, value in everything.items() for word in ("--set", f"{name}={value}")]
    return "--bootstrap-server", settings.bootstrap, "--namespace", settings.namespace, *properties, *words
