"""A strict guest beside the kinds of servers that production uses: no visible effect on serving, and nothing is left.

All tests share one server of each kind and run in file order. Serving leaves no headroom to itself, so each of its
steps depends on the blocks that were foreseen.
"""

import threading
from collections.abc import Iterator

import pytest

from rose.schemas.prompts import Sampling
from rose.workers.executor.ipc.messages import ABORTED, EngineStatus, TurnFinished
from rose.workers.lender.admission import Promise
from rose.workers.lender.config import MemoryConfig
from rose.workers.lender.vllm.guest_build import build_engine
from tests.support.guest_runs import run_guest, run_standalone, wake_and_park
from tests.support.lender_server_fixtures import VOCABULARY, Answer, ScriptedSidecar, Server, lending_server
from tests.support.serving_kinds import KINDS, Fields, ServingKind
from tests.support.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = [[3 + (7 * number + place) % (VOCABULARY - 3) for place in range(80 + 40 * number)] for number in range(3)]
"""Prompts of several blocks, in which n-grams repeat."""

TURNS, CONTEXT, SAMPLED = 48, 360, 100
"""Turns that together fill the memory of the guest."""

BURST, BURST_PROMPT, BURST_TOKENS = 16, 320, 64
"""Requests at once, which need more memory than such a guest leaves."""

Made = list[tuple[bytes, bytes]]
"""Tokens and logprobs of the guest's turns."""


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> ServingKind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def server(kind: ServingKind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("kind")
    (folder / "files").mkdir()
    flags = (*kind.flags(folder / "files"), "--scheduler-cls", "tests.support.lending_probe.LendingProbe")
    with lending_server(
        folder,
        *flags,
        module=kind.module,
        max_turns=TURNS,
        max_model_len=512,
        kv_cache_bytes=24 << 20,
        step_tokens=256,
        promise=Promise(yield_seconds=0.2),
        memory=MemoryConfig(headroom=0.0, quiet_seconds=0.5),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def alone(server: Server, kind: ServingKind) -> list[str]:
    """Answers before any sidecar connects; the first round warms up."""
    answers(server, kind)
    return answers(server, kind)


@pytest.fixture(scope="module")
def steps_alone(server: Server, alone: list[str]) -> int:
    """Number of serving's steps before any sidecar connects."""
    return len(server.step_notes())


@pytest.fixture(scope="module")
def sidecar(server: Server, steps_alone: int) -> ScriptedSidecar:
    sidecar = ScriptedSidecar(server.config)
    sidecar.awake()
    return sidecar


@pytest.fixture(scope="module")
def standalone(server: Server) -> Made:
    """Return the turns of an engine like the guest's without a host."""
    engine = build_engine(server.config)
    made = run_standalone(engine)
    engine.close()
    return made


def answers(server: Server, kind: ServingKind) -> list[str]:
    """Send the requests of the kind for each prompt, in sequence. Return the texts."""
    return [server.complete(prompt, 40, **fields).text for prompt in PROMPTS for fields in kind.requests]


def burst(server: Server, fields: Fields, first: int) -> None:
    """Send greedy requests with prompts of their own, numbered from `first`, all at once.

    vLLM's runner for CPUs fails in a chunked prefill of a request with a seed, and vLLM's example connector fails when
    it loads a prompt that was stored in chunks.
    """
    served: list[Answer] = []

    def ask(number: int) -> None:
        step = number % 7 + 2
        prompt = [3 + (number * 31 + place * step + number // 90) % (VOCABULARY - 3) for place in range(BURST_PROMPT)]
        served.append(server.complete(prompt, BURST_TOKENS, **fields | {"temperature": 0, "seed": None}))

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(first, first + BURST)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert len(served) == BURST and all(answer.text for answer in served)


def fill(sidecar: ScriptedSidecar, round_name: str) -> None:
    """Give the guest turns until its budget is used."""
    until(lambda: sidecar.wait_for_reports(EngineStatus)[-1].kv_bytes_total > 16 << 20)
    sidecar.forget()
    for number in range(TURNS):
        context = [3 + (number * 13 + place) % (VOCABULARY - 3) for place in range(CONTEXT)]
        sidecar.take(f"{round_name} {number}", context, Sampling(max_tokens=SAMPLED, seed=number))
    until(lambda: sidecar.wait_for_reports(EngineStatus)[-1].kv_bytes_free < 8 << 20)


def test_answers_are_unchanged_while_a_guest_lends_and_is_cut(
    server: Server, kind: ServingKind, alone: list[str], sidecar: ScriptedSidecar
) -> None:
    fill(sidecar, "cut")
    for place, fields in enumerate(kind.requests):
        receives = "receive" in fields.get("kv_transfer_params", {})  # the prompts that the burst before has sent
        burst(server, fields, first=(place - receives) * BURST)
    until(lambda: any(done.reason == "cut" for done in sidecar.wait_for_reports(TurnFinished)))
    assert answers(server, kind) == alone
    ended = sidecar.done(TURNS)
    assert {done.reason for done in ended.values() if done.turn.finish_reason == ABORTED} == {"cut"}
    fill(sidecar, "beside")
    assert answers(server, kind) == alone
    assert len(sidecar.done(TURNS)) == TURNS


def test_serving_preempts_no_request_for_blocks_of_the_guest(server: Server, sidecar: ScriptedSidecar) -> None:
    notes = server.step_notes()
    assert max(note["preemptions"] for note in notes) == 0
    assert min(note["free"] for note in notes) < 0.5 * notes[0]["free"], "no block was lent in a step of serving"


def test_guest_computes_the_same_as_a_dedicated_engine(
    server: Server, kind: ServingKind, alone: list[str], sidecar: ScriptedSidecar, standalone: Made
) -> None:
    assert run_guest(sidecar) == standalone
    assert answers(server, kind) == alone


def test_process_globals_are_unchanged_in_every_serving_step(
    server: Server, steps_alone: int, sidecar: ScriptedSidecar
) -> None:
    notes = server.step_notes()
    states = {note["seen"]: note["state"] for note in notes if "state" in note}
    for state in states.values():
        state.pop("generators")  # serving itself draws numbers in a step with a seeded request
    before = states[notes[steps_alone - 1]["seen"]]
    assert [states[note["seen"]] for note in notes[steps_alone:] if states[note["seen"]] != before] == []


def test_suspended_guest_leaves_no_block_thread_or_descriptor(
    server: Server, kind: ServingKind, alone: list[str], sidecar: ScriptedSidecar
) -> None:
    for _ in range(2):
        wake_and_park(sidecar)
    threads, descriptors = server.core.num_threads(), server.core.num_fds()
    for _ in range(3):
        wake_and_park(sidecar)
    assert server.core.num_threads() <= threads and server.core.num_fds() <= descriptors
    before = len(server.step_notes())
    assert answers(server, kind) == alone
    notes = server.step_notes()
    assert notes[before]["free"] == notes[0]["free"], "all blocks are free before the first request"


def test_server_log_has_no_error(server: Server, sidecar: ScriptedSidecar) -> None:
    log = server.log.read_text()
    assert [line for line in log.splitlines() if "ERROR" in line or "Traceback" in line] == []
    assert "guest_built kv_cache=shared" in log
