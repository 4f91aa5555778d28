"""The processes of a storm: started, faulted and recorded in a journal.

Keeps true
- Every start, end, freeze and first sign of work is in the journal with its time.
- No started process is left behind, frozen or not.
"""

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil

from rose.pipeline.local.fork_server import ForkedProcess, ForkServer
from rose.topics.local_broker import Broker, free_ports
from tests.support.installed_versions import InstalledVersions
from tests.support.kafka_cluster import Cluster
from tests.support.lender_server_fixtures import MODEL, server_flags
from tests.support.storm.plan import Act, Part, PlannedFault, Role, Worker, cell_of
from tests.support.storm.stalls import Change, RoleEvent

LOOK_SECONDS = 0.1
"""Time between two checks of leaving roles, in seconds."""

LEAVE_SECONDS = 30.0
"""Time that a role may take to stop."""
ABORT_SECONDS = 2.0
"""Time that an aborted role may take to log its stacks."""
AGAIN_SECONDS = 1.0
"""Time after which a role that ended by itself is restarted."""
SPARE_SECONDS = 6.0
"""Time after which an idle router or control app counts as ready, because it logs nothing."""
SYNC_SECONDS = 1.0
"""Time between two checks whether a node is back."""

READY = {
    Role.ENVIRONMENT: re.compile(r"event=homes_recovered"),
    Role.EXECUTOR: re.compile(r"event=version_activated"),
    Role.LENDER: re.compile(r"event=version_activated"),
    Role.ROUTER: re.compile(r"event=cell_session_started"),
    Role.TRAINER: re.compile(r"event=(run_resumed|step_finished)"),
}
"""Log event by which a role shows that it works."""

PARKED = re.compile(r"guest_suspended")
"""Log event of a lender without work from a control app."""


@dataclass(slots=True)
class _Process:
    """One start of one worker."""

    worker: Worker
    number: int
    process: ForkedProcess
    log: Path
    log_begin: int
    """Byte offset of this start in the log."""
    started_at: float
    ready: bool = False
    asked_at: float | None = None
    """Time at which the process was asked to stop."""
    overdue: bool = False
    """Whether the process did not stop and was aborted."""


class Roles:
    """All processes of a storm. Used by one thread that lives as long as the processes."""

    def __init__(
        self,
        folder: Path,
        arguments: tuple[str, ...],
        broker: Cluster | Broker,
        most: int,
        sites: Sequence[Path] = (),
        *,
        cells: int = 1,
        controlled: bool = False,
    ) -> None:
        """`arguments` follow the role's own arguments on the command line. Lenders have the last names of `most`
        executors.

        `cells` gives the cell of each executor that stays in a cell. If `controlled`, a manually parked lender is
        released to the control app. `sites` are installations of the roles, see `InstalledVersions`; without `sites`
        the roles are from this checkout.
        """
        self._folder = folder
        self._most = most
        self._cells = cells
        self._controlled = controlled
        self._arguments = arguments
        self._broker = broker
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ROSE_")}
        environment |= {"OMP_NUM_THREADS": "1"}
        self._fork_server = InstalledVersions(folder, environment, sites) if sites else ForkServer(folder, environment)
        self._journal: TextIO = (folder / "journal.jsonl").open("a")
        self._present: dict[Worker, _Process] = {}
        self._leaving: list[_Process] = []
        self._again: dict[Worker, float] = {}
        """Workers to be started, with their earliest start time. A start waits for the end of the same name."""
        self._node_starts: dict[Worker, int] = {}
        self._next_look = 0.0
        self._starts = 0
        self.happenings: list[RoleEvent] = []
        self.faults: Counter[str] = Counter()
        """Number of faults by kind."""
        self.crashes: Counter[str] = Counter()
        """Roles that ended by themselves with an error."""
        self.crash_words: list[str] = []
        """Last log lines of crashed roles."""
        self.overdue: list[Worker] = []
        """Workers that did not stop when asked, and were killed."""
        self.left: Counter[int] = Counter()
        """Exit statuses of stopped workers."""
        self.complete = False
        """Whether the trainer has ended by itself with status 0."""

    def do(self, planned_fault: PlannedFault) -> None:
        """Apply one fault of the plan. A fault that the worker cannot have now is left out."""
        worker = planned_fault.worker
        if worker.role is Role.NODE:
            self._do_to_node(planned_fault)
        elif planned_fault.act in (Act.PARK, Act.WAKE):
            self._grant(planned_fault.act, worker)
        elif planned_fault.act is Act.START:
            if worker not in self._present:
                self._again[worker] = 0.0
                if planned_fault.joins:
                    self._count("join", worker)
        elif (present := self._present.get(worker)) is not None and present.process.poll() is None:
            self._do_to_role(planned_fault, present)
        else:
            self._again.pop(worker, None)

    def tick(self) -> None:
        """Check for ready and ended processes, and restart processes that ended by themselves. Call it often."""
        now = time.time()
        for present in list(self._present.values()):
            self._look_at(present, now)
        for present in list(self._leaving):
            if (status := present.process.poll()) is not None:
                self._leaving.remove(present)
                # a role that is stopped while it loads has nothing to hand back
                if present.ready or status != -signal.SIGTERM:
                    self.left[status] += 1
                self._note(Change.ENDED, present.worker, present.number, status=status)
            elif present.asked_at is not None and now > present.asked_at + LEAVE_SECONDS:
                if not present.overdue:
                    present.overdue = True
                    self.overdue.append(present.worker)
                    present.process.send_signal(signal.SIGABRT)  # makes the process log where it hangs
                elif now > present.asked_at + LEAVE_SECONDS + ABORT_SECONDS:
                    present.process.send_signal(signal.SIGKILL)
        there = {present.worker for present in self._leaving}
        for worker in [worker for worker, at in self._again.items() if at <= now and worker not in there]:
            del self._again[worker]
            self.start(worker)
        if self._node_starts and now >= self._next_look:
            self._next_look = now + SYNC_SECONDS
            assert isinstance(self._broker, Cluster)
            if self._broker.in_sync():
                for worker, number in self._node_starts.items():
                    self._note(Change.READY, worker, number)
                self._node_starts.clear()

    def waits_for_nodes(self) -> bool:
        """Whether replicas are out of sync after the loss of a node, so that no other node may be killed."""
        return bool(self._node_starts)

    def ready(self, worker: Worker) -> bool:
        """Whether a worker does its work."""
        return worker in self._present and self._present[worker].ready

    def all_well(self) -> bool:
        """Whether no worker is starting or stopping."""
        on_the_way = self._leaving or self._again or self._node_starts
        return not on_the_way and all(present.ready for present in self._present.values())

    def proven(self, worker: Worker) -> None:
        """Mark a worker as ready, as proven by other workers."""
        present = self._present.get(worker)
        if present is not None and not present.ready:
            present.ready = True
            self._note(Change.READY, worker, present.number)

    def last_words(self, worker: Worker) -> str:
        """Return the last line of its log."""
        lines = (self._folder / f"{worker}.log").read_text(errors="replace").splitlines()
        return (lines or ["nothing"])[-1]

    def leave(self) -> None:
        """Ask all processes to stop and wait; kill those that do not stop."""
        for present in list(self._present.values()):
            _send(present, signal.SIGCONT)
            self._ask_to_leave(present)
        self._again.clear()
        while self._leaving:
            self.tick()
            time.sleep(LOOK_SECONDS)  # several processes may end, without an event

    def close(self) -> None:
        """Kill all remaining processes."""
        for present in [*self._present.values(), *self._leaving]:
            present.process.send_signal(signal.SIGKILL)
            present.process.wait()
        self._fork_server.close()
        self._journal.close()

    def start(self, worker: Worker) -> None:
        """Start a process under this name."""
        self._starts += 1
        log = self._folder / f"{worker}.log"
        log.touch()
        begin = log.stat().st_size
        process = self._fork_server.start(self._command(worker), name=str(worker), log=log)
        assert process.pid  # its time begins after the imports of the fork server
        self._present[worker] = _Process(worker, self._starts, process, log, begin, time.time())
        self._note(Change.STARTED, worker, self._starts)

    def _command(self, worker: Worker) -> tuple[str, ...]:
        """Return the command line of `rose`."""
        if worker.role is Role.LENDER:
            flags = (*server_flags(*free_ports(1)), "--uvicorn-log-level", "warning")
            model = ("--model", str(MODEL), "--name", self._name(worker))
            return ("lend", *model, *self._arguments, "--", *flags)
        own = {Role.EXECUTOR: ("--name", str(worker)), Role.TRAINER: ()}
        return (worker.role.value, *own.get(worker.role, ("--number", str(worker.number))), *self._arguments)

    def _name(self, lender: Worker) -> str:
        return f"executor-{self._most - 1 - lender.number}"

    def _do_to_role(self, planned_fault: PlannedFault, present: _Process) -> None:
        worker, number, part = present.worker, present.number, planned_fault.part
        if planned_fault.act is Act.KILL:
            part = self._kill(part, present)
        elif planned_fault.act is Act.LEAVE:
            self._ask_to_leave(present)
        elif planned_fault.act is Act.FREEZE:
            part = _send(present, signal.SIGSTOP, part)
            self._note(Change.FROZEN, worker, number)
        else:
            _send(present, signal.SIGCONT)
            self._note(Change.THAWED, worker, number)
            return
        self._count(f"{planned_fault.act.value}{_of(part)}", worker)

    def _kill(self, part: Part, present: _Process) -> Part:
        """Kill a part of a worker, or its first process if the part does not exist."""
        if not _sent(present, signal.SIGKILL, part):
            part = Part.ALL
        if part is Part.ALL:
            present.process.send_signal(signal.SIGKILL)
            present.process.wait()
            del self._present[present.worker]
        if part is Part.CORE:  # the rest of the server ends by itself
            present.asked_at = time.time()
            del self._present[present.worker]
            self._leaving.append(present)
        self._note(Change.ENDED, present.worker, present.number, status=-signal.SIGKILL, part=part.name)
        return part

    def _grant(self, act: Act, lender: Worker) -> None:
        switch = ("--no-lend" if act is Act.PARK else "--lend", "--reason", "storm")
        text = ("--release",) if act is Act.WAKE and self._controlled else switch
        command = ("grant", self._name(lender), *text, *self._arguments)
        self._fork_server.start(command, name="grant", log=self._folder / "grants.log")
        self._write(act.value, lender, 0)
        if act is Act.PARK:
            self._count(act.value, lender)

    def _ask_to_leave(self, present: _Process) -> None:
        present.asked_at = time.time()
        present.process.send_signal(signal.SIGTERM)
        del self._present[present.worker]
        self._leaving.append(present)
        self._write("asked to leave", present.worker, present.number)

    def _do_to_node(self, planned_fault: PlannedFault) -> None:
        assert isinstance(self._broker, Cluster)
        node = self._broker.nodes[planned_fault.worker.number]
        if planned_fault.act in (Act.KILL, Act.LEAVE):
            if planned_fault.act is Act.KILL:
                node.kill()
            else:
                node.stop()  # a stop first moves the leaders, for seconds
            self._note(Change.ENDED, planned_fault.worker, 0)
            self._count(planned_fault.act.value, planned_fault.worker)
            self._starts += 1
            self._node_starts[planned_fault.worker] = -self._starts
        else:
            node.launch()
            self._note(Change.STARTED, planned_fault.worker, self._node_starts[planned_fault.worker])

    def _look_at(self, present: _Process, now: float) -> None:
        status = present.process.poll()
        role = present.worker.role
        spare = role is Role.CONTROL or (role is Role.ROUTER and not self._broker.settings().embedded)
        if not present.ready and spare and now > present.started_at + SPARE_SECONDS:
            self.proven(present.worker)
        if not present.ready and role in READY:
            with present.log.open("rb") as log:
                log.seek(present.log_begin)
                text = log.read().decode(errors="replace")
            idle = role is Role.LENDER and self._controlled and PARKED.search(text)
            if idle or READY[role].search(text):
                self.proven(present.worker)
        if status is None:
            return
        del self._present[present.worker]
        self._note(Change.ENDED, present.worker, present.number, status=status)
        if present.worker.role is Role.TRAINER and status == 0:
            self.complete = True
        else:
            self.crashes[present.worker.role.value] += 1
            self.crash_words.append(f"{present.worker} ended with status {status}: {self.last_words(present.worker)}")
            self._again[present.worker] = now + AGAIN_SECONDS

    def _count(self, what: str, worker: Worker) -> None:
        self.faults[f"{what} {worker.role.value}"] += 1

    def _note(self, change: Change, worker: Worker, number: int, **more: object) -> None:
        at = self._write(change.value, worker, number, **more)
        self.happenings.append(RoleEvent(at, change, worker.role, number, cell_of(worker, self._cells)))

    def _write(self, what: str, worker: Worker, number: int, **more: object) -> float:
        at = time.time()
        self._journal.write(json.dumps({"at": at, "what": what, "worker": str(worker), "start": number, **more}) + "\n")
        self._journal.flush()
        return at


def _send(present: _Process, number: signal.Signals, part: Part = Part.ALL) -> Part:
    """Send a signal to a part of a worker, or to the whole worker if the part does not exist; return the target."""
    if _sent(present, number, part):
        return part
    with suppress(ProcessLookupError):
        if present.worker.role is Role.LENDER:
            os.killpg(present.process.pid, number)  # the processes of a role are a session
        else:
            present.process.send_signal(number)
    return Part.ALL


def _sent(present: _Process, number: signal.Signals, part: Part) -> bool:
    """Send a signal to the processes of this part of a lender; return whether there were any."""
    if part is Part.ALL:
        return False
    there = False
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(present.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if child.name().startswith(part.value):
                    child.send_signal(number)
                    there = True
    return there


def _of(part: Part) -> str:
    return "" if part is Part.ALL else f" {part.name.lower()} of"
