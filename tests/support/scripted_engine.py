"""An executor with a scripted engine: on threads of a test, and in processes that a test can kill and freeze."""

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from rose.schemas.errors import RoseError
from rose.schemas.heartbeats import WorkerClass
from rose.schemas.sampled_tokens import SampledTokensBuilder
from rose.schemas.turns import TurnTimes
from rose.topics.processes import signal_safe_setter
from rose.topics.settings import BusSettings
from rose.workers.executor import metrics
from rose.workers.executor.config import ExecutorConfig
from rose.workers.executor.grants import UNRESTRICTED, GrantFollower, IntakeGate, Lease, PermissionSource
from rose.workers.executor.ipc.engine_client import EngineClient
from rose.workers.executor.ipc.messages import (
    ABORTED,
    COMMAND_DECODER,
    AbortTurn,
    ActivateWeights,
    Command,
    EngineStatus,
    MessageSender,
    StageWeights,
    SubmitTurn,
    TurnFinished,
    WeightsActivated,
    WeightsStaged,
    aborted_before_start,
)
from rose.workers.executor.ipc.shared_memory import ChannelFds, RingBuffer
from rose.workers.executor.loop import Executor
from rose.workers.executor.vllm.types import FinishedTurn
from rose.workers.weights.receive import StagedVersion
from tests.support.executor_fixtures import SLOT, Router
from tests.support.waiting import until

NAME = f"executor-{SLOT}"
TICK = EngineStatus(-1, "cpu", 0, 0, 10_000, 10_000, 1, 1.0, 1.0, 0, 0.0)
Wanted = TypeVar("Wanted", bound=Command)


class OneVersion:
    """A receiver that got version 3."""

    newest, refused_newest = 3, None

    def __init__(self) -> None:
        self._staged: StagedVersion | None = StagedVersion(3, {"w": torch.zeros(4)}, 16, None, 0.0)  # type: ignore[arg-type]

    def staged(self) -> StagedVersion | None:
        staged, self._staged = self._staged, None
        return staged

    def refuse(self, version: int, reason: str) -> None:
        """Ignore a refused version."""


@dataclass
class Engine:
    """The engine end of an executor's channel. It reports the status `tick`."""

    channel: ChannelFds
    tick: EngineStatus = TICK
    commands: list[Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reports = MessageSender(RingBuffer(self.channel.reports))
        self._orders = RingBuffer(self.channel.commands)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def set_status(self, **changes: Any) -> None:
        self.tick = msgspec.structs.replace(self.tick, **changes)

    def wait_for_command(self, kind: type[Wanted]) -> Wanted:
        """Wait for a command of a kind and remove it from `commands`."""
        until(lambda: any(isinstance(command, kind) for command in self.commands))
        found = next(command for command in self.commands if isinstance(command, kind))
        self.commands.remove(found)
        return found

    def serve(self) -> None:
        """Stage and activate the commanded version."""
        version = self.wait_for_command(StageWeights).version
        self.reports.send(WeightsStaged(version))
        self.wait_for_command(ActivateWeights)
        self.reports.send(WeightsActivated(version, 0.0))
        self.set_status(version=version)

    def complete(self, name: str, tokens: list[int], logprob: float = -1.0) -> None:
        self.reports.send(turn_finished(name, tokens, logprob=logprob))

    def abort(self, name: str, tokens: list[int]) -> None:
        self.reports.send(turn_finished(name, tokens, finish_reason=ABORTED))

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            self.commands += map(COMMAND_DECODER.decode, self._orders.read())
            self.reports.send(self.tick)


def turn_finished(
    name: str,
    tokens: list[int],
    *,
    finish_reason: str = "stop",
    version: int = 3,
    logprob: float = -1.0,
    finished_at: float = 3.0,
) -> TurnFinished:
    """Return the report of a turn with these tokens, all with the same logprob."""
    sampled = SampledTokensBuilder()
    sampled.append(tokens, [logprob] * len(tokens))
    turn = FinishedTurn(
        name=name,
        sampled=sampled.build(version),
        finish_reason=finish_reason,
        context_tokens=3,
        cached_tokens=0,
        times=TurnTimes(scheduled_at=finished_at, first_token_at=finished_at, finished_at=finished_at),
    )
    return TurnFinished(turn, device_seconds=0.5)


@contextmanager
def running(
    settings: BusSettings, granted: PermissionSource | None = None, *, kind: type[Engine] = Engine, lends: bool = True
) -> Iterator[tuple[Engine, Router]]:
    """Run an executor with an engine of this kind; yield the engine and the router counterpart."""
    channel, stop = ChannelFds.create(), threading.Event()
    engine = kind(channel)
    parent = os.pidfd_open(os.getpid())
    executor = Executor(
        settings,
        ExecutorConfig(model_folder=Path(), name=NAME, slot=SLOT),
        WorkerClass.SERVING,
        EngineClient(channel, parent),
        TICK,
        OneVersion(),  # type: ignore[arg-type]
        IntakeGate(granted or (lambda: UNRESTRICTED), lends=lends and granted is not None),
    )
    thread = threading.Thread(target=executor.run, args=(stop,))
    thread.start()
    try:
        yield engine, Router(settings)
    finally:
        stop.set()
        thread.join()
        engine.close()
        channel.close()
        os.close(parent)


class Answering(Engine):
    """An engine that activates every commanded version and completes each turn after a delay."""

    def __init__(self, channel: ChannelFds, turn_seconds: float = 0.1) -> None:
        self._due: deque[tuple[float, SubmitTurn]] = deque()
        self._turn_seconds = turn_seconds
        super().__init__(channel)

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            for command in map(COMMAND_DECODER.decode, self._orders.read()):
                self._obey(command)
            while self._due and self._due[0][0] <= time.monotonic():
                self._complete(self._due.popleft()[1])
            self.reports.send(self.tick)

    def _obey(self, command: Command) -> None:
        match command:
            case StageWeights():
                self.reports.send(WeightsStaged(command.version))
            case ActivateWeights():
                self.set_status(version=command.version)
                self.reports.send(WeightsActivated(command.version, 0.0))
            case SubmitTurn():
                self._due.append((time.monotonic() + self._turn_seconds, command))
            case AbortTurn():
                mine = [each for each in self._due if each[1].name == command.name]
                for each in mine:
                    self._due.remove(each)
                    self.reports.send(aborted_before_start(command.name, time.time()))
            case _:
                pass

    def _complete(self, taken: SubmitTurn) -> None:
        self.reports.send(turn_finished(taken.name, [3, 4], version=taken.version, finished_at=time.time()))


def run_scripted_executor(settings: BusSettings, config: ExecutorConfig, message_file: Path) -> None:
    """Program of an executor process. It runs until SIGTERM, or until another executor starts under its name, and
    writes its last message to the file."""
    stop, channel = threading.Event(), ChannelFds.create()
    set_stop = signal_safe_setter(stop)
    signal.signal(signal.SIGTERM, lambda *_: set_stop())
    engine, link = Answering(channel), EngineClient(channel, os.pidfd_open(os.getpid()))
    grants = GrantFollower(settings, config.worker, Lease())
    grants.wait_until_read(stop)
    gate = IntakeGate(grants.permission, lends=False)
    executor = Executor(settings, config, WorkerClass.DEDICATED, link, TICK, OneVersion(), gate)  # type: ignore[arg-type]
    try:
        executor.run(stop)
    except RoseError as error:
        message_file.write_text(str(error))
        raise SystemExit(error.exit_status) from None
    finally:
        grants.stop()
        engine.close()
    samples = [each for family in metrics.TURNS.collect() for each in family.samples if each.name.endswith("_total")]
    message_file.write_bytes(
        msgspec.json.encode({each.labels["outcome"]: each.value for each in samples if each.value})
    )


@dataclass
class ScriptedExecutorProcess:
    """A process with a scripted executor."""

    process: ForkServerProcess
    message_file: Path
    """File with the last message: the counts, or the reason of the end."""

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> int | None:
        """Send SIGTERM and wait; return the exit status."""
        self.send(signal.SIGTERM)
        self.process.join(60.0)
        return self.process.exitcode


@contextmanager
def scripted_process(
    settings: BusSettings, folder: Path, name: str, *, slot: int | None = None
) -> Iterator[ScriptedExecutorProcess]:
    """Run a process with an executor of this name. A process that still runs at the end is killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    config = ExecutorConfig(model_folder=Path(), name=name, slot=slot, max_turns=4)
    message_file = folder / f"{name}-{len(list(folder.iterdir()))}"
    message_file.touch()
    process = context.Process(target=run_scripted_executor, args=(settings, config, message_file))
    process.start()
    try:
        yield ScriptedExecutorProcess(process, message_file)
    finally:
        process.kill()
        process.join()
