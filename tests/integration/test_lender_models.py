"""A guest beside servers of other kinds: layers with and without a window, recurrent layers, and images.

All tests share one server of each kind and run in file order. The guest is a text model with layers of one kind.
"""

import base64
import io
import sys
import threading
from collections.abc import Iterator, Sequence
from operator import methodcaller
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rose.schemas.prompts import Sampling
from rose.workers.executor.ipc.messages import EngineStatus, LendingStats
from rose.workers.executor.vllm.engine import Engine
from rose.workers.lender.admission import Promise
from rose.workers.lender.vllm.guest_build import build_engine
from tests.support.guest_runs import (
    GREEDY,
    PROMPTS,
    Ask,
    run_guest,
    run_standalone,
    same,
    state_changes,
    traffic,
    wake_and_park,
)
from tests.support.host_models import MODELS
from tests.support.lender_server_fixtures import VOCABULARY, Answer, ScriptedSidecar, Server, lending_server
from tests.support.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1800)]

SERVING_BYTES, GUEST_BYTES = 8 << 20, 4 << 20
TURNS = 16
SHARING = ("window", "image")
"""Kinds of servers whose cache the guest shares. Beside the others the guest has a cache of its own."""


@pytest.fixture(scope="module", params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def server(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(kind)
    MODELS[kind](folder / "model")
    flags = ("--model", str(folder / "model"), "--kv-cache-memory-bytes", str(SERVING_BYTES))
    probe = ("--scheduler-cls", "tests.support.lending_probe.LendingProbe")
    promise = Promise(yield_seconds=0.2)  # a step may take as long as a step of all turns, also on a slow machine
    sizes: dict[str, Any] = {"kv_cache_bytes": GUEST_BYTES, "max_turns": TURNS, "max_model_len": 512}
    with lending_server(folder, *flags, *probe, promise=promise, **sizes) as running:
        yield running
        print(running.log.read_text()[-4000:])


def picture(seed: int) -> str:
    """Return a data URL of a random image."""
    colours = np.random.default_rng(seed).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def requests(kind: str) -> list[Ask]:
    """Greedy and seeded requests, also with images if the server takes images."""
    seeded: list[Ask] = [methodcaller("complete", prompt * 5, 40, temperature=1.0, seed=3) for prompt in PROMPTS[:3]]
    images: list[Ask] = [methodcaller("describe", picture(seed)) for seed in range(3)]
    images += [methodcaller("describe", picture(3), temperature=1.0, seed=5)]
    return [*GREEDY[:3], *seeded, *(images if kind == "image" else [])]


@pytest.fixture(scope="module")
def alone(server: Server, requests: list[Ask]) -> list[Answer]:
    """Answers of serving before any sidecar connects; the first of each request warms up."""
    for ask in requests:
        ask(server)
    return [ask(server) for ask in requests]


@pytest.fixture(scope="module")
def burst_requests(kind: str) -> list[Ask]:
    """Requests that together take most of the cache."""
    long: list[Ask] = [methodcaller("complete", prompt(100 + number, 200), 64) for number in range(16)]
    return long + ([methodcaller("describe", picture(seed)) for seed in range(7, 9)] if kind == "image" else [])


@pytest.fixture(scope="module")
def burst_alone(server: Server, alone: list[Answer], burst_requests: list[Ask]) -> list[Answer]:
    return [ask(server) for ask in burst_requests]


@pytest.fixture(scope="module")
def sidecar(server: Server, alone: list[Answer], burst_alone: list[Answer]) -> ScriptedSidecar:
    return ScriptedSidecar(server.config)


@pytest.fixture(scope="module")
def standalone(server: Server) -> Iterator[Engine]:
    """An engine like the guest's, without a host."""
    engine = build_engine(server.config)
    yield engine
    engine.close()


def prompt(number: int, tokens: int) -> list[int]:
    return [3 + (number * 31 + place * (number % 7 + 2)) % (VOCABULARY - 3) for place in range(tokens)]


def lent(sidecar: ScriptedSidecar) -> list[LendingStats]:
    return [tick.lending for tick in sidecar.wait_for_reports(EngineStatus) if tick.lending is not None]


def ask_all(server: Server, requests: Sequence[Ask]) -> list[Answer]:
    """Send all requests at once. Return their answers."""
    answers: dict[int, Answer] = {}
    clients = [
        threading.Thread(target=lambda number=number: answers.update({number: requests[number](server)}))
        for number in range(len(requests))
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return [answers[number] for number in range(len(requests))]


def test_answers_depend_on_the_image(kind: str, alone: list[Answer]) -> None:
    if kind == "image":
        assert len({answer.text for answer in alone[-4:-1]}) == 3


def test_serving_and_guest_compute_as_each_would_alone(
    server: Server, requests: list[Ask], alone: list[Answer], standalone: Engine, sidecar: ScriptedSidecar
) -> None:
    with traffic(server, requests=requests) as answers:
        made = run_guest(sidecar)
        assert len(answers) > 0, "no request was served while the guest was built"
        until(lambda: len(answers) > 2 * len(requests))
        assert run_guest(sidecar) == made
    assert same(answers, alone)
    assert made == run_standalone(standalone)


def test_guest_has_a_cache_of_its_own_only_beside_states(kind: str, server: Server, sidecar: ScriptedSidecar) -> None:
    sidecar.awake()
    assert server.has_logged("kv_cache=shared") is (kind in SHARING)
    assert server.has_logged("guest_cache_not_shared") is (kind not in SHARING)


def test_burst_cuts_a_shared_cache_and_is_answered_as_alone(
    kind: str, server: Server, sidecar: ScriptedSidecar, burst_requests: list[Ask], burst_alone: list[Answer]
) -> None:
    until(lambda: lent(sidecar)[-1].budget_bytes > 0.9 * GUEST_BYTES)  # serving's last peak is forgotten
    sidecar.forget()
    for number in range(TURNS):
        sidecar.take(f"long {number}", prompt(number, 64), Sampling(max_tokens=440, seed=1))
    until(lambda: sidecar.wait_for_reports(EngineStatus)[-1].kv_bytes_free < GUEST_BYTES // 2)
    answers = ask_all(server, burst_requests)
    assert [answer.text for answer in answers] == [answer.text for answer in burst_alone]
    done = sidecar.done(TURNS)
    cuts, preempted = (sum(getattr(each, name) for each in lent(sidecar)) for name in ("cuts", "preempted"))
    print(f"{kind}: {cuts} cuts, {preempted} of {TURNS} turns preempted", file=sys.__stderr__)
    assert (cuts > 0) is (preempted > 0) is (kind in SHARING)
    assert preempted == sum(each.reason == "cut" for each in done.values())
    assert not any(note["preemptions"] for note in server.step_notes()), "serving waited for a block of the guest"


def test_process_globals_are_unchanged_in_every_serving_step(server: Server, sidecar: ScriptedSidecar) -> None:
    """Serving itself draws from torch's generator for a request that is not greedy."""
    steps = server.step_notes()[1:]
    assert {name for name, _, _ in state_changes(steps)} == {"generators"}
    assert any(note["building"] for note in steps) and any(note["within"] for note in steps)


def test_suspended_guest_leaves_all_blocks_and_no_memory(
    kind: str, server: Server, requests: list[Ask], alone: list[Answer], sidecar: ScriptedSidecar
) -> None:
    held = {note["held blocks"] for note in server.step_notes()}
    for _ in range(2):
        wake_and_park(sidecar)
    threads, memory = server.core.num_threads(), server.core.memory_info().rss
    for _ in range(5):
        wake_and_park(sidecar)
    grown = server.core.memory_info().rss - memory
    print(f"{kind}: five wakes and parks: {grown / 1024:.0f} KiB more", file=sys.__stderr__)
    assert server.core.num_threads() <= threads and grown < 2 * GUEST_BYTES
    before = len(server.step_notes())
    assert [ask(server).text for ask in requests] == [answer.text for answer in alone]
    assert server.step_notes()[before]["held blocks"] == 0 < max(held)
    assert not server.has_logged("guest_dropped") and not server.has_logged("lending_disabled")
