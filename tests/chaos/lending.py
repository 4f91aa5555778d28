"""A run with a lending server under user traffic, as real processes, and faults of all processes except the server.

Keeps true
- The seed draws every fault and its time. The server and its users are never faulted. Only a process with a hanging
  transaction, whose end Kafka reports as lost, is killed, and the transaction is aborted.
- Every ended process is restarted, and no started process is left behind.
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
from rose.topics.local_broker import Broker, free_ports
from rose.topics.settings import BusSettings
from tests.chaos.hanging import WRITERS, abort_hanging, hangs, lost_ends
from tests.support.brokers import flags
from tests.support.lender_server_fixtures import MODEL, SERVING, healthy, server_flags
from tests.support.waiting import WAIT_SECONDS, until

ROOT = Path(__file__).parents[2]

UNCACHED = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0"}
"""A server on a CPU keeps each new step size compiled, up to 1024 sizes or 220 MB, even if it does not lend."""

DEDICATED, LENDER = 0, 1
"""Inbox numbers."""
LENDER_NAME = f"executor-{LENDER}"

GROUPS, GROUP_SIZE = 4000, 4
"""The groups are more than the run can finish."""

START_SECONDS = 4 * WAIT_SECONDS
"""Time that a server may take to start on a busy machine."""
STOP_SECONDS = 60.0
"""Time that a process may take to stop."""

BETWEEN_SECONDS = (5.0, 20.0)
"""Time between two kills."""
AWAY_SECONDS = (0.3, 3.0)
"""Time between a kill and the restart."""
VICTIMS = ("trainer", "router", "broker")

GUEST_FAULTS = "GUEST_FAULTS"
"""Environment variable with the path of a file. While the file exists, guests fail (`failing_guest`). The file has the
seed."""

CORRUPTION_SEED = "CORRUPTION_SEED"
"""Environment variable with the seed of the corrupting trainer (`corrupting_trainer`)."""

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
"""Time between two checks for ended processes."""
AGAIN_SECONDS = 1.0
"""Shortest delay of an orchestrator before it restarts a process."""
KV_CACHE_BYTES = 16 << 20
"""KV memory of the guest; the server has twice as much in total."""

SERVING_TROUBLE = re.compile(r"\bERROR \d\d-\d\d (?!.*rose: guest_dropped)|Traceback|lending_disabled|Server Error")
"""Pattern that the server log must not match."""

PARTITIONS = Partitions(home=2, slots=2, samples=2, chunks=2)
"""The partitions of CONFIG."""

GUEST = re.compile(r"rose: guest_(built|dropped|suspended)")


@dataclass(frozen=True, slots=True)
class CoreResources:
    """Resources of the engine core at one time."""

    threads: int
    descriptors: int
    resident_bytes: int


@dataclass(slots=True)
class Run:
    """All processes of a run on this machine. Used by one thread that lives as long as the processes."""

    folder: Path
    broker: Broker
    settings: BusSettings
    seed: int
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    ended: list[str] = field(default_factory=list)
    """Processes that ended by themselves, with their last log line."""
    lost: Counter[str] = field(default_factory=Counter)
    """Number of lost transaction ends by process."""
    port: int = 0

    def prepare(self) -> None:
        """Create topics, configuration, and prompts for longer than the run."""
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
        """The file that makes guests fail while it exists."""
        return self.folder / "guest-faults"

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def rose(self, *arguments: str) -> None:
        """Run a command to its end."""
        command = [*self._command("rose.pipeline.cli.main"), *arguments, *self._common]
        ran = subprocess.run(
            command, env=self._environment, cwd=self.folder, capture_output=True, timeout=START_SECONDS
        )
        assert ran.returncode == 0, ran.stderr.decode()

    def start(self, name: str) -> None:
        """Start a role under this name."""
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
        """Start all processes. The users start once the server answers."""
        for name in ("lender", "router", "environment-0", "trainer", f"executor-{DEDICATED}"):
            self.start(name)
        server = self.processes["lender"]
        until(lambda: healthy(self.port) or server.poll() is not None, START_SECONDS)
        assert server.poll() is None, self.log("lender").read_text()[-4000:]
        self.start("users")

    def rage(self, seconds: float) -> None:
        """Kill processes in turn for the given time, in an order drawn from the seed."""
        dice = random.Random(f"lending {self.seed}")
        began = due = time.monotonic()
        victims: list[str] = []
        while time.monotonic() < began + seconds:
            self.tick()
            if time.monotonic() >= due:
                victims = victims or dice.sample(VICTIMS, len(VICTIMS))
                self._kill(victims.pop(), dice.uniform(*AWAY_SECONDS))
                due = time.monotonic() + dice.uniform(*BETWEEN_SECONDS)
            time.sleep(LOOK_SECONDS)  # no event reports the end of one of several processes

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
        """Restart ended processes; the server and its users must not end. Abort hanging transactions on Apache
        Kafka."""
        for name, process in list(self.processes.items()):
            if process.poll() is not None:
                last = self.log(name).read_text(errors="replace").splitlines()[-1:]
                self.ended.append(f"{name} ended with status {process.returncode}: {''.join(last)}")
                assert name not in ("lender", "users"), self.ended[-1]
                time.sleep(AGAIN_SECONDS)  # as an orchestrator would
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
        """Wake the guest by a grant."""
        self.rose("grant", LENDER_NAME)
        self.until_guest("built")

    def park(self) -> None:
        """Park a lending guest by a grant."""
        self.rose("grant", LENDER_NAME, "--no-lend", "--reason", "test")
        self.until_guest("suspended")

    def until_guest(self, is_now: str) -> None:
        """Wait until the last logged event of the guest is this event."""

        def found() -> bool:
            self.tick()
            return GUEST.findall(self.log("lender").read_text(errors="replace"))[-1:] == [is_now]

        until(found, START_SECONDS)

    def count_logged(self, text: str) -> int:
        """Return how often the server log contains the text."""
        return self.log("lender").read_text(errors="replace").count(text)

    def left(self) -> CoreResources:
        """Return the resources of the engine core now."""
        children = psutil.Process(self.processes["lender"].pid).children(recursive=True)
        core = next(child for child in children if child.name().startswith("VLLM::Engin"))
        return CoreResources(core.num_threads(), core.num_fds(), core.memory_info().rss)

    def serving_troubles(self) -> Iterator[str]:
        """Yield lines of the server log that report a serving error."""
        for line in self.log("lender").read_text(errors="replace").splitlines():
            if SERVING_TROUBLE.search(line):
                yield line

    def leave(self) -> dict[str, int]:
        """Stop all processes, users first and the server last; return their exit statuses."""
        order = ["users", *(name for name in self.processes if name not in ("users", "lender")), "lender"]
        status = {}
        for name in order:
            process = self.processes[name]
            process.send_signal(signal.SIGTERM)
            status[name] = process.wait(STOP_SECONDS)
        self.processes.clear()
        return status

    def close(self) -> None:
        """Kill all remaining processes."""
        for process in self.processes.values():
            for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
                child.kill()
            process.kill()
            process.wait()
