"""The sidecar of a lending server, with trajectories instead of a bus: submits turns to the guest and counts tokens.

    python -m bench.coserving.guests

The program reads its task as one line of JSON, reports that it is ready, and runs until it reads another line. Its last
line of output is the result.

Keeps true: a turn's tokens are counted at their arrival times, spread evenly from the first to the last token; the
engine reports both times.
"""

import itertools
import math
import os
import random
import sys
import threading
import time
from collections import deque
from contextlib import closing
from pathlib import Path

import msgspec
from safetensors.torch import load_file

from bench.coserving.clients import (
    LESS_URGENT,
    OBSERVATION_TOKENS,
    PROMPT_TOKENS,
    TURN_TOKENS,
    TURNS,
    RolloutResult,
    words,
)
from rose.schemas.arrays import count, pack_tokens, unpack_tokens
from rose.schemas.prompts import Sampling
from rose.workers.executor.ipc.engine_client import EngineClient
from rose.workers.executor.ipc.messages import (
    AbortTurn,
    ActivateWeights,
    EngineStatus,
    Resume,
    SubmitTurn,
    TurnFinished,
    TurnRejected,
    WeightsActivated,
    WeightsRejected,
    WeightsStaged,
)
from rose.workers.lender.sidecar_link import connect

LOOK_SECONDS = 0.002
"""Time between two looks for reports, as in an executor."""

GIVE_UP_SECONDS = 10.0
"""Time for the open turns at the end."""


class GuestTask(msgspec.Struct, frozen=True):
    """The work that a sidecar keeps in progress."""

    socket: str
    trajectories: int
    vocabulary: int
    model: str
    """Folder of the guest's model, whose weights arrive as policy versions."""
    spike_seconds: float
    """Seconds between two spikes; 0: no spikes."""


class Trajectories:
    """Turns of several trajectories.

    Each turn is requested when the previous turn has been answered and there is room.
    """

    def __init__(self, task: GuestTask, link: EngineClient, version: int) -> None:
        self._link = link
        self._spike_seconds = task.spike_seconds or math.inf
        self._next_spike = time.monotonic() + self._spike_seconds
        self._tensors = load_file(Path(task.model) / "model.safetensors") if task.spike_seconds else {}
        self._changing = False
        self._version = version
        self._vocabulary = task.vocabulary
        self._draws = [random.Random(number) for number in range(task.trajectories)]
        self._contexts: list[list[int]] = [[] for _ in self._draws]
        self._turns = [0] * task.trajectories
        self._numbers = itertools.count()
        self._open: dict[str, int] = {}
        self._due = deque(range(task.trajectories))
        """Trajectories whose next turn waits for room."""
        self._room_tokens = 0
        """Tokens that open turns may hold, by the newest report of the engine."""
        self.rolled = RolloutResult([], [], [])

    def _spike(self) -> None:
        """Request turns of all trajectories at once, and send a version."""
        self._next_spike = time.monotonic() + self._spike_seconds
        self.give_up()
        if not self._changing:
            self._changing = True
            self._link.send(self._link.stage_weights(self._version + 1, self._tensors))

    def _ask_on(self) -> None:
        held = sum(len(self._contexts[number]) + TURN_TOKENS for number in self._open.values())
        while self._due and held + (tokens := self._next_tokens(self._due[0])) <= self._room_tokens:
            held += tokens
            self._ask(self._due.popleft())

    def _next_tokens(self, number: int) -> int:
        """Return the most tokens that the trajectory's next turn may hold."""
        first = self._turns[number] % TURNS == 0
        before = PROMPT_TOKENS if first else len(self._contexts[number]) + OBSERVATION_TOKENS
        return before + TURN_TOKENS

    def _ask(self, number: int) -> None:
        draw = self._draws[number]
        turn = self._turns[number] % TURNS
        if turn == 0:
            self._contexts[number] = words(draw, PROMPT_TOKENS, self._vocabulary)
        else:
            self._contexts[number] += words(draw, OBSERVATION_TOKENS, self._vocabulary)
        self._turns[number] += 1
        name = f"{number}/{next(self._numbers)}"
        self._open[name] = number
        sampling = Sampling(max_tokens=TURN_TOKENS, temperature=1.0)
        self._link.send(SubmitTurn(name, pack_tokens(self._contexts[number]), sampling, self._version))

    def read_reports(self, *, more: bool) -> int:
        """Read reports, and request further turns if `more`; return the number of open turns."""
        self._link.wait(LOOK_SECONDS)
        if more and time.monotonic() >= self._next_spike:
            self._spike()
        for report in self._link.reports():
            if isinstance(report, EngineStatus):
                self._room_tokens = report.kv_bytes_total // report.kv_bytes_per_token
                self.rolled.steps += report.steps
                self.rolled.step_seconds += report.step_seconds
                if report.serving is not None:
                    self.rolled.longest_seconds.append(report.serving.longest_seconds)
                    self.rolled.computed_seconds.append(report.serving.computed_seconds)
                    for hold, times in report.serving.held_back.items():
                        self.rolled.held_back[hold] = self.rolled.held_back.get(hold, 0) + times
            elif isinstance(report, WeightsStaged):
                self._link.send(ActivateWeights(report.version))
            elif isinstance(report, WeightsActivated):
                self._version, self._changing = report.version, False
            elif isinstance(report, TurnRejected) and "policy version" in report.reason:
                number = self._open.pop(report.name)  # the turn was under way while the version changed
                self._turns[number] -= 1
                self._due.append(number)
            elif isinstance(report, TurnRejected):
                self._open.pop(report.name)
                self.rolled.errors.append(report.reason)
            elif isinstance(report, WeightsRejected):
                self.rolled.errors.append(report.reason)
            elif isinstance(report, TurnFinished):
                number = self._open.pop(report.turn.name)
                self._count(report)
                self._contexts[number] += unpack_tokens(report.turn.sampled.tokens)
                self._due.append(number)
        if more:
            self._ask_on()
        return len(self._open)

    def give_up(self) -> None:
        """Abort every open turn; each returns its partial output."""
        for name in self._open:
            self._link.send(AbortTurn(name))

    def _count(self, done: TurnFinished) -> None:
        made = count(done.turn.sampled.tokens)
        behind = time.time() - time.monotonic()
        first, last = done.turn.times.first_token_at - behind, done.turn.times.finished_at - behind
        apart = (last - first) / (made - 1) if made > 1 else 0.0
        self.rolled.moments += [first + place * apart for place in range(made)]
        self.rolled.counts += [1] * made


def run_beside(task: GuestTask, stop: threading.Event) -> RolloutResult:
    """Run until `stop` is set. Raises EngineBroken, or OSError if no server lends."""
    with closing(connect(Path(task.socket))) as end:
        link = EngineClient(end.channel, end.connection.fileno())
        link.send(Resume())
        tick = link.wait_until_ready(stop)
        while tick is not None and tick.suspended_reason:
            tick = link.wait_until_ready(stop)
        print("ready", flush=True)
        if tick is None:
            return RolloutResult([], [], [])
        trajectories = Trajectories(task, link, tick.version)
        while not stop.is_set():
            trajectories.read_reports(more=True)
        trajectories.give_up()
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while trajectories.read_reports(more=False) and time.monotonic() < deadline:
            pass
        return trajectories.rolled


def _set_after_line(stop: threading.Event) -> None:
    sys.stdin.readline()
    stop.set()


def main() -> None:
    os.nice(LESS_URGENT)
    task, stop = msgspec.json.decode(sys.stdin.readline(), type=GuestTask), threading.Event()
    threading.Thread(target=_set_after_line, args=(stop,), daemon=True).start()
    print(msgspec.json.encode(run_beside(task, stop)).decode(), flush=True)


if __name__ == "__main__":
    main()
