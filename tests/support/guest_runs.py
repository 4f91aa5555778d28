"""Serving traffic and guest turns for tests of a guest: the same prompts and turns, in sequence or together."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import methodcaller
from typing import Any

from rose.schemas.prompts import Sampling
from rose.workers.executor.ipc.messages import Resume, Suspend
from rose.workers.executor.vllm.engine import Engine
from tests.support.lender_server_fixtures import VOCABULARY, Answer, ScriptedSidecar, Server

PROMPTS = [[3 + (7 * prompt + place) % (VOCABULARY - 3) for place in range(10 + prompt)] for prompt in range(6)]
SHORT = ([3, 4, 5], Sampling(max_tokens=4, temperature=0.0))
"""A first turn so short that torch does not request AMX tiles from the kernel, which the bfloat16 attention of vLLM
then uses."""

TURNS = [
    SHORT,
    *((prompt * 4, Sampling(max_tokens=12, temperature=0.0)) for prompt in PROMPTS[:3]),
    (PROMPTS[5], Sampling(max_tokens=12, seed=7)),
]


Ask = Callable[[Server], Answer]
"""Sends one request to a server and returns the answer."""

GREEDY: list[Ask] = [methodcaller("complete", prompt) for prompt in PROMPTS]


@contextmanager
def traffic(
    server: Server, pause_seconds: float = 0.05, requests: Sequence[Ask] = GREEDY
) -> Iterator[list[tuple[int, Answer]]]:
    """Send serving requests in sequence during the block. Collect the number and the answer of each."""
    answers: list[tuple[int, Answer]] = []
    stop = threading.Event()
    errors: list[BaseException] = []

    def ask() -> None:
        number = 0
        try:
            while not stop.wait(pause_seconds):
                answers.append((number % len(requests), requests[number % len(requests)](server)))
                number += 1
        except BaseException as trouble:
            errors.append(trouble)
            raise

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield answers
    finally:
        stop.set()
        client.join()
    assert not errors


def same(answers: Sequence[tuple[int, Answer]], alone: Sequence[Answer]) -> bool:
    return all(answer.text == alone[prompt].text for prompt, answer in answers)


def state_changes(notes: Sequence[dict[str, Any]]) -> list[tuple[str, Any, Any]]:
    """Return how the state of the process differed in serving's steps, by the probe's notes without the first one."""
    states = [note["state"] for note in notes if "state" in note]
    return [
        (name, before, after)
        for name in states[0]
        for before, after in [(states[0][name], state[name]) for state in states[1:]]
        if before != after
    ]


def run_guest(sidecar: ScriptedSidecar, version: int = -1) -> list[tuple[bytes, bytes]]:
    """Run TURNS in sequence; return tokens and logprobs."""
    made = []
    sidecar.awake()
    for number, (context, sampling) in enumerate(TURNS):
        sidecar.forget()
        sidecar.take(f"turn {number}", context, sampling, version)
        done = sidecar.done(1)[f"turn {number}"]
        made.append((done.turn.sampled.tokens, done.turn.sampled.logprobs))
    return made


def run_standalone(engine: Engine) -> list[tuple[bytes, bytes]]:
    made = []
    for number, (context, sampling) in enumerate(TURNS):
        engine.add(str(number), context, sampling, policy_version=engine.version)
        finished = []
        while len(engine):
            finished += engine.step().finished
        made.append((finished[0].sampled.tokens, finished[0].sampled.logprobs))
    return made


def wake_and_park(sidecar: ScriptedSidecar) -> None:
    sidecar.send(Resume())
    sidecar.awake()
    sidecar.send(Suspend())
    assert sidecar.parked()
    sidecar.forget()
