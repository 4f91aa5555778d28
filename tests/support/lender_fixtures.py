"""A simulation of a lending server: requests arrive and are batched, and a guest always has work.

The simulation is pure and seeded. It tests a decision and measures no machine.
"""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from rose.workers.executor.ipc.messages import NextWork, WorkKind
from rose.workers.lender.admission import Admission, Promise, ServingState

STEP_TOKENS = 512
GUEST_BASE, GUEST_TOKEN = 0.004, 0.0002
"""Seconds of a guest step, and of each token in it."""

GUEST_WANTS = 64
"""Tokens that the guest would compute in a step."""


@dataclass(frozen=True, kw_only=True)
class LenderSimulation:
    """The load of a server: prompts of `prompt` tokens and answers of `answer` tokens on average."""

    rate: float = 20.0
    """Requests per second."""
    burst: float = 1.0
    """Factor on the rate in one second of five."""
    prompt: int = 64
    answer: int = 40
    base: float = 0.002
    """Seconds of a serving step."""
    token: float = 0.00002
    """Seconds for each token in it."""
    slots: int = 256
    duration: float = 40.0

    def arrivals(self, seed: int) -> Iterator[tuple[float, int]]:
        """Return the arrival times and answer lengths; they are the same for every policy."""
        draw, now = random.Random(seed), 0.0
        while (now := now + draw.expovariate(self.rate * self.burst)) < self.duration:
            if int(now) % 5 == 0 or draw.random() < 1.0 / self.burst:
                yield now, 1 + int(draw.expovariate(1.0 / self.answer))


@dataclass(slots=True)
class HeldRequest:
    """A request in the server."""

    arrived: float
    left: int
    """Tokens of the answer that are still to come."""
    last: float = 0.0


@dataclass(frozen=True)
class SimulationResult:
    """Result of a run."""

    occupancy: float
    """Average number of requests in the server over time."""
    guest_tokens: int
    longest_gap: float
    """Largest time between two tokens of an answer, in seconds."""
    served: int


def run(simulation: LenderSimulation, dial: float | None, seed: int) -> SimulationResult:
    """Serve the load beside a guest under this dial; with None serve without a guest."""
    promise = Promise(ttft_seconds=0.5, tpot_seconds=0.03, yield_seconds=0.02, dial=dial or 0.0)
    admission = Admission(promise, serving_step_tokens=STEP_TOKENS)
    coming, noise = deque(simulation.arrivals(seed)), random.Random(seed + 1)
    waiting: deque[HeldRequest] = deque()
    running: list[HeldRequest] = []
    now = stays = longest = 0.0
    guest_tokens = served = 0
    while coming or waiting or running:
        if not running and not waiting and dial is None:
            now = max(now, coming[0][0])
        while coming and coming[0][0] <= now:
            waiting.append(HeldRequest(*coming.popleft()))
            admission.on_arrival(simulation.prompt, now)
        if running or waiting:
            decoding = len(running)
            while (
                waiting
                and len(running) < simulation.slots
                and (len(running) - decoding) * simulation.prompt < STEP_TOKENS
            ):
                running.append(waiting.popleft())
            prompts = (len(running) - decoding) * simulation.prompt
            seconds = (simulation.base + simulation.token * (prompts + decoding)) * noise.uniform(0.9, 1.1)
            now += seconds
            admission.on_serving_step(prompt_tokens=prompts, decoding=decoding, held=len(running), seconds=seconds)
            for held in running:
                longest = max(longest, now - held.last if held.last else 0.0)
                held.left, held.last = held.left - 1, now
            stays += sum(now - held.arrived for held in running if held.left == 0)
            served += sum(held.left == 0 for held in running)
            running = [held for held in running if held.left]
        if dial is None:
            continue
        moment = ServingState(
            last_tokens=[held.last for held in running],
            waiting=len(waiting),
            queued=bool(coming) and coming[0][0] <= now,
        )
        allowed = admission.admit(moment, NextWork(WorkKind.STEP, admission.guest.seconds(GUEST_WANTS)), now=now)
        if allowed.hold_reason is None:
            tokens = min(allowed.tokens, GUEST_WANTS)
            seconds = (GUEST_BASE + GUEST_TOKEN * tokens) * noise.uniform(0.9, 1.1)
            now += seconds
            guest_tokens += tokens
            admission.guest.observe(tokens, seconds)
            admission.on_guest_run(held=moment.held, seconds=seconds)
    return SimulationResult(stays / now, guest_tokens, longest, served)
