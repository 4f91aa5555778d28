"""A run with a server that lends under its users' traffic, as real processes, and what is done to all but the server.

Keeps true
- The seed draws every fault and its moment; the server itself, and its users, are never touched. Only
  who has a transaction that hangs, whose end Apache Kafka says that it has lost, is killed, and that is aborted.
- Whoever ends is started again; whatever happens, no process that was started here is left behind.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rose.topics.admin import create_topics
from rose.topics.catalog import Partitions
from rose.topics.local_broker.process import Broker, free_ports
from rose.topics.settings import BusSettings
from tests.chaos.hanging import WRITERS, abort_hanging, hangs, lost_ends
from tests.support.brokers import flags
from tests.support.lender_server_fixtures import MODEL, SERVING, healthy, server_flags
from tests.support.waiting import WAIT_SECONDS, until

ROOT = Path(__file__).parents[2]

UNCACHED = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
"""On a CPU each new size of a step stays compiled, up to 1024 of them: 220 MB, in a server that lends nothing too."""

DEDICATED, LENDER = 0, 1
"""Inboxes."""
LENDER_NAME = f"executor-{LENDER}"

GROUPS, GROUP_SIZE = 4000, 4
"""More than can be done meanwhile."""

START_SECONDS = 4 * WAIT_SECONDS
"""What a server may take to come up on a machine that has much else to do."""
STOP_SECONDS = 60.0
"""What a process may take to leave."""

BETWEEN_SECONDS = (5.0, 20.0)
"""From one kill to the next."""
AWAY_SECONDS = (0.3, 3.0)
"""How long who was killed is away."""
VICTIMS = ("trainer", "router", "broker")

GUEST_FAULTS = "GUEST_FAULTS"
"""The environment variable that names the file; while it is there guests fail (`failing_guest`). It has the seed."""

CORRUPTION_SEED = "CORRUPTION_SEED"
"""That of the trainer whose chunks are spoilt (`corrupting_trainer`)."""

CONFIG = """
[run]
name = "faults"
folder = "{folder}"

[topics]
home_partitions = 2
inbox_slots = 2
sample_partitions = 2
chunk_partitions = 2

[environment]
max_turn_tokens = 16
max_context_tokens = 256
window_groups = 16

[executor]
max_turns = 16
max_model_len = 256
step_tokens = 256
kv_cache_bytes = {kv_cache_bytes}

[lender]
promise = {{ dial = 0.5, ttft_seconds = 0.5, tpot_seconds = 0.1, yield_seconds = 0.02 }}

[serving]
environment = {{ {environment} }}

[users]
pace = 0.5
output_divisor = 8

[weights]
anchor_every = 4

[trainer]
groups_per_step = 4
minibatches = 1
"""
LOOK_SECONDS = 0.2
"""Between two looks at who has ended."""
AGAIN_SECONDS = 1.0
"""As long as an orchestrator waits, at the least, with what has ended."""
KV_CACHE_BYTES = 16 << 20
"""Of the guest; the server has twice as much in all."""

SERVING_TROUBLE = re.compile(r"\bERROR \d\d-\d\d (?!.*rose: guest_dropped)|Traceback|lending_disabled|Server Error")
"""What must not be in the server's log."""

PARTITIONS = Partitions(home=2, slots=2, samples=2, chunks=2)
"""As CONFIG has them."""

GUEST = re.compile(r"rose: guest_(built|dropped|suspended)")


@dataclass(frozen=True, slots=True)
class Left:
    """What the engine core holds at a moment."""

    threads: int
    descriptors: int
    resident_bytes: int


@dataclass(slots=True)
class Run:
    """All processes of a run on this machine. Used by one thread that lives as long as they should."""

    folder: Path
    broker: Broker
    settings: BusSettings
    seed: int
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    ended: list[str] = field(default_factory=list)
    """Who ended by itself, and what it said last."""
    lost: Counter[str] = field(default_factory=Counter)
    """How often Kafka has said of each that it lost the end of a transaction of it."""
    port: int = 0

    def prepare(self) -> None:
        """Topics, configuration, and prompts for longer than the run takes."""
        create_topics(self.settings, PARTITIONS)
        self.guest_faults.write_text(str(self.seed))
        environment = SERVING | UNCACHED | {"PYTHONPATH": str(ROOT), GUEST_FAULTS: str(self.guest_faults)}
        variables = ", ".join(f'{name} = "{value}"' for name, value in environment.items())
        text = CONFIG.format(folder=self.folder, environment=variables, kv_cache_bytes=KV_CACHE_BYTES)
        (self.folder / "rose.toml").write_text(text)
        prompt = {"group_size": GROUP_SIZE, "environment": "calculator"}
        lines = [json.dumps({"group_id": f"g{number}", "seed": number, **prompt}) for number in range(GROUPS)]
        (self.folder / "prompts.jsonl").write_text("\n".join(lines))
        self.rose("submit", str(self.folder / "prompts.jsonl"))

    @property
    def guest_faults(self) -> Path:
        """While it is there, guests fail."""
        return self.folder / "guest-faults"

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def rose(self, *arguments: str) -> None:
        """A command, to its end."""
        command = [*self._command("rose.pipeline.cli.main"), *arguments, *self._common]
        ran = subprocess.run(
            command, env=self._environment, cwd=self.folder, capture_output=True, timeout=START_SECONDS
        )
        assert ran.returncode == 0, ran.stderr.decode()

    def start(self, name: str) -> None:
        """A role under this name."""
        program = "tests.chaos.corrupting_trainer" if name == "trainer" else "rose.pipeline.cli.main"
        command = [*self._command(program), *self._arguments(name)]
        with self.log(name).open("ab") as output:
            self.processes[name] = subprocess.Popen(
                command, env=self._environment, cwd=self.folder, stdout=output, stderr=output, start_new_session=True
            )

    def _arguments(self, name: str) -> list[str]:
        if name == "lender":
            [self.port] = free_ports(1)
            scheduler = ("--scheduler-cls", "tests.chaos.failing_guest.Failing")
            vllm = [*server_flags(self.port), "--uvicorn-log-level", "warning", *scheduler]
            return ["lend", "--model", str(MODEL), "--name", LENDER_NAME, *self._common, "--", *vllm]
        if name == "users":
            return ["loadgen", f"http://127.0.0.1:{self.port}", *self._common]
        role, _, number = name.partition("-")
        own = {"executor": ("--name", name), "environment": ("--number", number)}.get(role, ())
        return [role, *own, *self._common]

    def _command(self, program: str) -> list[str]:
        return [sys.executable, "-m", program]

    @property
    def _common(self) -> list[str]:
        return ["--config", str(self.folder / "rose.toml"), *flags(self.settings)]

    @property
    def _environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROSE_")}
        return inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", CORRUPTION_SEED: str(self.seed)}

    def gather(self) -> None:
        """Start everybody; the server answers, and then its users come."""
        for name in ("lender", "router", "environment-0", "trainer", f"executor-{DEDICATED}"):
            self.start(name)
        server = self.processes["lender"]
        until(lambda: healthy(self.port) or server.poll() is not None, START_SECONDS)
        assert server.poll() is None, self.log("lender").read_text()[-4000:]
        self.start("users")

    def rage(self, seconds: float) -> None:
        """Kill one after another for so long, each in turn in an order that the seed draws."""
        dice = random.Random(f"lending {self.seed}")
        began = due = time.monotonic()
        victims: list[str] = []
        while time.monotonic() < began + seconds:
            self.tick()
            if time.monotonic() >= due:
                victims = victims or dice.sample(VICTIMS, len(VICTIMS))
                self._kill(victims.pop(), dice.uniform(*AWAY_SECONDS))
                due = time.monotonic() + dice.uniform(*BETWEEN_SECONDS)
            time.sleep(LOOK_SECONDS)  # no event says that one of several processes has ended

    def _kill(self, victim: str, away_seconds: float) -> None:
        self.faults[f"kill {victim}"] += 1
        if victim == "broker":
            self.broker.kill()
            time.sleep(away_seconds)  # this is the fault
            self.broker.launch()
            self.broker.await_ready()
            return
        self.processes[victim].kill()
        self.processes[victim].wait()
        time.sleep(away_seconds)  # this is the fault
        self.start(victim)

    def tick(self) -> None:
        """Start again who has ended; of the server and its users nobody may. End what hangs on Apache Kafka."""
        for name, process in list(self.processes.items()):
            if process.poll() is not None:
                last = self.log(name).read_text(errors="replace").splitlines()[-1:]
                self.ended.append(f"{name} ended with status {process.returncode}: {''.join(last)}")
                assert name not in ("lender", "users"), self.ended[-1]
                time.sleep(AGAIN_SECONDS)  # as its orchestrator would
                self.start(name)
        if not self.broker.embedded:
            for name in WRITERS.keys() & self.processes.keys():
                self._end_hanging(name)

    def _end_hanging(self, name: str) -> None:
        before, self.lost[name] = self.lost[name], lost_ends(self.broker.log, self.settings, name)
        if self.lost[name] > before and hangs(self.settings, name, PARTITIONS):
            self.processes[name].kill()
            self.processes[name].wait()
            abort_hanging(self.settings, name, PARTITIONS)
            self.ended.append(f"{name} had a transaction that hung, whose end Kafka had lost: it was aborted")
            self.start(name)

    def wake(self) -> None:
        """By a grant."""
        self.rose("grant", LENDER_NAME)
        self.until_guest("built")

    def park(self) -> None:
        """By a grant, a guest that lends."""
        self.rose("grant", LENDER_NAME, "--no-lend", "--reason", "test")
        self.until_guest("suspended")

    def until_guest(self, is_now: str) -> None:
        """Wait until that was the last thing that happened to the guest."""

        def found() -> bool:
            self.tick()
            return GUEST.findall(self.log("lender").read_text(errors="replace"))[-1:] == [is_now]

        until(found, START_SECONDS)

    def count_logged(self, text: str) -> int:
        """How often the server's log says so."""
        return self.log("lender").read_text(errors="replace").count(text)

    def left(self) -> Left:
        """What the engine core holds now."""
        children = psutil.Process(self.processes["lender"].pid).children(recursive=True)
        core = next(child for child in children if child.name().startswith("VLLM::Engin"))
        return Left(core.num_threads(), core.num_fds(), core.memory_info().rss)

    def serving_troubles(self) -> Iterator[str]:
        """Lines of the server's log that say that serving went wrong."""
        for line in self.log("lender").read_text(errors="replace").splitlines():
            if SERVING_TROUBLE.search(line):
                yield line

    def leave(self) -> dict[str, int]:
        """Ask all to leave, the users first and the server last; the status with which each did."""
        order = ["users", *(name for name in self.processes if name not in ("users", "lender")), "lender"]
        status = {}
        for name in order:
            process = self.processes[name]
            process.send_signal(signal.SIGTERM)
            status[name] = process.wait(STOP_SECONDS)
        self.processes.clear()
        return status

    def close(self) -> None:
        """Kill whatever is left."""
        for process in self.processes.values():
            for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
                child.kill()
            process.kill()
            process.wait()
