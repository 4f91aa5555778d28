"""A guest within serving's slack: it computes between serving steps, and serving answers as without it."""

import threading
import time
from collections.abc import Iterator

import pytest

from rose.schemas.prompts import Sampling
from rose.workers.executor.ipc.messages import EngineStatus
from rose.workers.lender.admission import Promise
from tests.support.lender_server_fixtures import Answer, ScriptedSidecar, Server, lending_server
from tests.support.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = [[3 + (5 * prompt + place) % 90 for place in range(20)] for prompt in range(3)]
ANSWER_TOKENS = 400
STRICT_SECONDS = 5.0
"""Time for which a never idle server is watched to build no guest; a permitted build takes less than two seconds."""

GENEROUS = Promise(dial=0.5, ttft_seconds=30.0, tpot_seconds=3.0, yield_seconds=0.05)


@pytest.fixture(scope="module", params=[GENEROUS, Promise()], ids=["slo", "strict"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with lending_server(tmp_path_factory.mktemp("slo"), promise=request.param) as running:
        yield running


def answers(server: Server) -> list[Answer]:
    """Return the answers to all prompts at once."""
    found: dict[int, Answer] = {}

    def ask(number: int) -> None:
        found[number] = server.complete(PROMPTS[number], ANSWER_TOKENS)

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    return [found[number] for number in range(len(PROMPTS))]


def test_never_idle_server_wakes_its_guest_only_if_the_dial_allows(server: Server) -> None:
    """The guest starts from nothing: its build, first steps and first turn are computed between serving steps."""
    ended = threading.Event()

    def ask(number: int) -> None:
        while not ended.is_set():
            server.complete(PROMPTS[number], ANSWER_TOKENS)

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
    try:
        for client in clients:
            client.start()
        server.complete(PROMPTS[0], ANSWER_TOKENS)
        sidecar = ScriptedSidecar(server.config)
        if server.config.promise.dial > 0:
            sidecar.awake()
            sidecar.take("first", PROMPTS[0], Sampling(max_tokens=20, seed=1))
            assert len(sidecar.done(1)) == 1
        else:
            time.sleep(STRICT_SECONDS)
            assert "being built" in sidecar.parked() or "not told" in sidecar.parked()
    finally:
        ended.set()
        for client in clients:
            client.join()
    assert server.has_logged("guest_built") is (server.config.promise.dial > 0)
    sidecar.end.close()


def test_guest_computes_beside_serving_only_if_the_dial_allows(server: Server) -> None:
    """The answers of serving are unchanged, token for token."""
    alone = answers(server)
    sidecar = ScriptedSidecar(server.config)
    sidecar.awake()
    sidecar.take("warm", PROMPTS[0], Sampling(max_tokens=50, seed=1))
    sidecar.done(1)
    sidecar.forget()
    slo = server.config.promise.dial > 0
    served: list[list[Answer]] = []
    client = threading.Thread(target=lambda: served.append(answers(server)))
    client.start()
    until(
        lambda: any(
            tick.serving is not None and tick.serving.running for tick in sidecar.wait_for_reports(EngineStatus)
        )
    )
    sidecar.forget()
    for number in range(4):
        sidecar.take(f"turn {number}", PROMPTS[0], Sampling(max_tokens=100, seed=number))
    client.join()
    assert len(sidecar.done(4)) == 4
    assert [answer.text for answer in served[0]] == [answer.text for answer in alone]
    observed = [
        (tick.steps, tick.serving)
        for tick in sidecar.wait_for_reports(EngineStatus)
        if tick.serving and tick.serving.running
    ]
    assert any(slack.decode_headroom is not None for _, slack in observed)
    steps = sum(steps for steps, _ in observed)
    assert steps > 0 if slo else (steps == 0 and any(slack.held_back.get("occupancy") for _, slack in observed))
