"""KV memory of a server under a guest: blocks are lent, and taken back in the pass in which serving needs them.

All tests share one server of each kind of scheduling and run in file order.
"""

import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rose.schemas.arrays import unpack_tokens
from rose.schemas.prompts import Sampling
from rose.workers.executor.ipc.engine_client import write_tensors
from rose.workers.executor.ipc.messages import (
    ABORTED,
    ActivateWeights,
    EngineStatus,
    LendingStats,
    StageWeights,
    WeightsActivated,
    WeightsStaged,
)
from rose.workers.lender.admission import Promise
from rose.workers.lender.config import MemoryConfig
from tests.support.lender_server_fixtures import (
    MODEL,
    SERVERS,
    VOCABULARY,
    Answer,
    ScriptedSidecar,
    Server,
    lending_server,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]

SERVING_BYTES, GUEST_BYTES = 32 << 20, 24 << 20
BLOCK_TOKENS, GUEST_BLOCK = 64, 64 << 10
"""Sizes of the shipped policy in bfloat16, in blocks of a server in float32 with 32 tokens a block."""

TURNS, CONTEXT, SAMPLED = 48, 64, 440
"""Turns of the guest, which together fill almost all of its memory. They sample for much longer than their sequential
prefills take, so that all of them run at once."""

PROMPT = 320
"""Tokens of a request: with its answer it holds twelve blocks."""

ALL_AT_ONCE = Promise(yield_seconds=0.2)
"""A step may take as long as a step of all turns, also on a slow machine."""

NEVER = MemoryConfig(quiet_seconds=3600.0)
"""A freeze lasts until the next version."""


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--kv-cache-memory-bytes", str(SERVING_BYTES), "--max-num-seqs", "64")
    sizes: dict[str, Any] = {
        "max_turns": TURNS,
        "max_model_len": 512,
        "kv_cache_bytes": GUEST_BYTES,
        "step_tokens": 256,
    }
    sizes |= {"promise": ALL_AT_ONCE, "memory": NEVER, "scheduling": request.param}
    with lending_server(tmp_path_factory.mktemp("memory"), *flags, **sizes) as running:
        yield running
        print(running.log.read_text()[-4000:])


@pytest.fixture(scope="module")
def alone(server: Server) -> list[Answer]:
    for number in range(3):
        server.complete(prompt(number))
    return [server.complete(prompt(number)) for number in range(3)]


@pytest.fixture(scope="module")
def sidecar(server: Server, alone: list[Answer]) -> ScriptedSidecar:
    sidecar = ScriptedSidecar(server.config)
    sidecar.awake()
    return sidecar


def prompt(number: int, tokens: int = PROMPT) -> list[int]:
    return [3 + (number * 31 + place * (number % 7 + 2)) % (VOCABULARY - 3) for place in range(tokens)]


def burst(server: Server, requests: int, first: int = 100, tokens: int = 64) -> list[Answer]:
    """Send requests with new prompts all at once."""
    answers: list[Answer] = []
    clients = [
        threading.Thread(target=lambda number=number: answers.append(server.complete(prompt(number), tokens)))
        for number in range(first, first + requests)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert len(answers) == requests
    return answers


def lent(sidecar: ScriptedSidecar) -> list[LendingStats]:
    return [tick.lending for tick in sidecar.wait_for_reports(EngineStatus) if tick.lending is not None]


def grown(sidecar: ScriptedSidecar) -> int:
    """Return the budget once a test can use it."""
    sidecar.awake()
    until(lambda: bool(stats := lent(sidecar)) and stats[-1].budget_bytes > GUEST_BYTES // 2)
    sidecar.forget()
    sidecar.wait_for_reports(EngineStatus, 2)
    return lent(sidecar)[-1].budget_bytes


def next_version(sidecar: ScriptedSidecar, version: int) -> None:
    torch.manual_seed(version)
    tensors = load_file(MODEL / "model.safetensors")
    sidecar.forget()
    buffer = version % 2
    sidecar.send(StageWeights(version, buffer, write_tensors(sidecar.end.channel.weight_buffers[buffer], tensors)))
    sidecar.wait_for_reports(WeightsStaged)
    sidecar.send(ActivateWeights(version))
    sidecar.wait_for_reports(WeightsActivated)


@dataclass
class Turn:
    name: str
    context: list[int]
    most: int


def fill(sidecar: ScriptedSidecar, version: int, name: str) -> list[Turn]:
    """Give the guest turns until its memory is full, and let the turns run for a while."""
    turns = [Turn(f"{name} {number}", prompt(1000 + number, CONTEXT), SAMPLED) for number in range(TURNS)]
    begin(sidecar, turns, version)
    until(lambda: sidecar.wait_for_reports(EngineStatus)[-1].kv_bytes_free < GUEST_BYTES // 3)
    return turns


def begin(sidecar: ScriptedSidecar, turns: Sequence[Turn], version: int) -> None:
    sidecar.forget()
    for turn in turns:
        sampling = Sampling(max_tokens=turn.most, temperature=1.0, seed=1)
        sidecar.take(turn.name, turn.context, sampling, version)


def test_guest_grows_into_memory_left_by_serving(server: Server, sidecar: ScriptedSidecar) -> None:
    budget = grown(sidecar)
    assert 0.9 * GUEST_BYTES < budget < GUEST_BYTES
    tick = sidecar.wait_for_reports(EngineStatus)[-1]
    assert tick.kv_bytes_total == budget == tick.kv_bytes_free and not lent(sidecar)[-1].frozen


def test_cut_turns_return_completely_and_continue_from_their_prefix(
    server: Server, alone: list[Answer], sidecar: ScriptedSidecar
) -> None:
    budget = grown(sidecar)
    turns = fill(sidecar, -1, "cut")
    burst(server, 9)
    assert [server.complete(prompt(number)).text for number in range(3)] == [answer.text for answer in alone]
    ended = sidecar.done(TURNS)
    cuts = lent(sidecar)
    assert sum(each.cuts for each in cuts) == 1 and cuts[-1].frozen
    assert cuts[-1].budget_bytes == budget // 2 // GUEST_BLOCK * GUEST_BLOCK
    given_up = {name: done for name, done in ended.items() if done.turn.finish_reason == ABORTED}
    assert 0 < len(given_up) < TURNS and {done.reason for done in given_up.values()} == {"cut"}
    assert len(given_up) == sum(each.preempted for each in cuts)

    rest = [
        Turn(turn.name, turn.context + unpack_tokens(given_up[turn.name].turn.sampled.tokens), SAMPLED)
        for turn in turns
        if turn.name in given_up
    ]
    for turn in rest:
        turn.most -= len(turn.context) - CONTEXT
    begin(sidecar, rest, -1)
    resumed = sidecar.done(len(rest))
    reusable = sum((len(turn.context) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for turn in rest)
    found = sum(done.turn.cached_tokens for done in resumed.values())
    assert found >= 0.8 * reusable
    assert all(done.turn.finish_reason != ABORTED for done in resumed.values())
    for turn in rest:
        assert len(resumed[turn.name].turn.sampled.tokens) // 4 <= turn.most, "what was sampled is not sampled again"
    tell(f"{len(given_up)} of {TURNS} turns were cut; resumed, they found {found} of {reusable} tokens", cuts)


def test_freeze_ends_with_the_next_version(server: Server, sidecar: ScriptedSidecar) -> None:
    assert lent(sidecar)[-1].frozen
    next_version(sidecar, 1)
    until(lambda: not lent(sidecar)[-1].frozen)
    assert grown(sidecar) > GUEST_BYTES // 2


def test_serving_answers_as_alone_from_blocks_of_a_guest_whose_sidecar_has_left(
    server: Server, alone: list[Answer], sidecar: ScriptedSidecar
) -> None:
    fill(sidecar, 1, "left")
    sidecar.end.close()
    assert [server.complete(prompt(number)).text for number in range(3)] == [answer.text for answer in alone]
    other = ScriptedSidecar(server.config)
    sidecar.end, sidecar.commands, sidecar.reports, sidecar.received = (
        other.end,
        other.commands,
        other.reports,
        other.received,
    )
    assert grown(sidecar) > GUEST_BYTES // 2


def test_serving_gets_all_lent_memory_at_once(server: Server, sidecar: ScriptedSidecar) -> None:
    fill(sidecar, 1, "all")
    answers: list[Answer] = []
    client = threading.Thread(target=lambda: answers.extend(burst(server, 40, 300)))
    client.start()
    until(lambda: lent(sidecar)[-1].frozen)
    at_once = sidecar.wait_for_reports(EngineStatus)
    client.join()
    ended = sidecar.done(TURNS)
    assert len(answers) == 40 and all(
        done.reason == "cut" for done in ended.values() if done.turn.finish_reason == ABORTED
    )
    sidecar.wait_for_reports(EngineStatus, len(at_once) + 3)
    assert lent(sidecar)[-1].budget_bytes == 0
    tell("a burst took all memory back", lent(sidecar))


def test_turn_that_can_never_fit_returns_at_once(sidecar: ScriptedSidecar) -> None:
    begin(sidecar, [Turn("too late", prompt(7, 40), 10)], 1)
    done = sidecar.done(1)["too late"]
    assert (done.turn.finish_reason, done.reason, done.turn.sampled.tokens) == (ABORTED, "cut", b"")


def test_server_log_has_no_error(server: Server, sidecar: ScriptedSidecar) -> None:
    errors = [line for line in server.log.read_text().splitlines() if "ERROR" in line or "Traceback" in line]
    assert not errors


def tell(what: str, figures: Sequence[LendingStats]) -> None:
    """Print the direction of an effect, not a measurement."""
    looks, cuts = sum(each.looks for each in figures), sum(each.cuts for each in figures)
    cut = sum(each.cut_seconds for each in figures)
    others = sum(each.look_seconds for each in figures) - cut
    costs = f"{1e6 * others / max(1, looks - cuts):.0f} µs a look, {cuts} cuts of {1e6 * cut / max(1, cuts):.0f} µs"
    print(f"{what}; {costs}, {sum(each.preempted for each in figures)} preempted", file=sys.__stderr__)
