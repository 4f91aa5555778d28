"""A short window of the co-serving benchmark on a vLLM server."""

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest

from bench.coserving.arms import PRIORITIES, Arm, Requesters
from bench.coserving.figures import engine_seconds
from bench.coserving.pace import first_guess, unloaded
from bench.coserving.server import SERVED, VOCABULARY, Server, make_model, serve
from bench.coserving.windows import Budgets, Window, figures, guest_tokens, run_window
from rose.workers.loadgen.traces import BLOCK_TOKENS, Arrival, TraceScaling, TraceWindow, scale_requests
from tests.support.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]

ANY = float("inf")
"""Any lateness, because other tests may load the machine."""

BUDGETS = Budgets(ttft=ANY, tpot=ANY)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with priorities, which can host every arm."""
    folder = tmp_path_factory.mktemp("coserve")
    with serve(PRIORITIES, make_model(folder / "model", SERVED), folder / "server.log") as running:
        yield running


@pytest.fixture(scope="module")
def work() -> TraceWindow:
    """Return thirty requests in two seconds: ten conversations of three turns, each longer than the one before."""
    draw = random.Random(0)
    moments = sorted(draw.uniform(0, 2) for _ in range(30))
    arrivals = [
        Arrival(
            at=at,
            prompt_tokens=BLOCK_TOKENS * (turn + 1),
            output_tokens=draw.randint(1, 8),
            blocks=tuple(100 * talk + block for block in range(turn + 1)),
        )
        for at, (turn, talk) in zip(moments, ((turn, talk) for turn in range(3) for talk in range(10)), strict=True)
    ]
    return scale_requests(
        arrivals, TraceScaling(prompt_divisor=8, output_divisor=1, longest=512, vocabulary=VOCABULARY)
    )


def well(window: Window, work: TraceWindow) -> None:
    """Assert that every request was answered completely, with ordered timestamps."""
    assert window.thrown == ""
    assert [answer.error for answer in window.answers] == [""] * len(work.requests)
    assert [answer.due - window.start for answer in window.answers] == pytest.approx([r.at for r in work.requests])
    for answer, request in zip(window.answers, work.requests, strict=True):
        assert answer.tokens == sum(answer.counts) == request.tokens
        assert answer.due <= answer.sent < answer.moments[0] <= answer.moments[-1]
        assert answer.moments == sorted(answer.moments)
        assert 0 < engine_seconds(answer) < answer.moments[-1] - answer.sent


def test_clients_and_server_agree_on_serving_alone(server: Server, work: TraceWindow) -> None:
    hits = []
    for number in range(2):
        window = run_window(Arm("alone"), server, work, number=number, most_late=ANY)
        well(window, work)
        cached = sum(answer.cached_tokens for answer in window.answers)
        assert cached == window.server["vllm:prefix_cache_hits"] > 0
        assert sum(answer.prompt_tokens for answer in window.answers) == window.server["vllm:prompt_tokens"]
        found = figures(window, BUDGETS)
        assert 0 < found["busy"] <= 1
        assert found["ttft_attainment"] == 1.0
        assert found["guest_tokens_per_second"] == 0
        hits.append(found["prefix_hit_rate"])
    assert max(hits) < 0.7, "a window finds nothing in the cache that another left"


def test_rollouts_beside_serving_are_counted_separately(server: Server, work: TraceWindow) -> None:
    window = run_window(Arm("priority", guests=Requesters(8, priority=10)), server, work, number=0, most_late=ANY)
    well(window, work)
    assert 0 < guest_tokens(window) < sum(window.rolled.counts)
    assert window.server["vllm:generation_tokens"] > sum(answer.tokens for answer in window.answers)


def test_rollouts_without_serving_have_a_window_without_users(server: Server, work: TraceWindow) -> None:
    window = run_window(Arm("rollouts", users=False, guests=Requesters(8)), server, work, number=0, most_late=ANY)
    assert window.thrown == ""
    assert not window.answers
    assert guest_tokens(window) > 0


def refusals(server: Server) -> int:
    return server.log.read_text().count('/v1/completions HTTP/1.1" 400')


def test_refused_rollout_is_reported(server: Server, work: TraceWindow) -> None:
    before = refusals(server)
    with Requesters(1, priority=2**70).run_with(server) as rolled:
        until(lambda: refusals(server) > before + 1)  # the sender of the next request has the first answer
    assert rolled.errors
    assert rolled.errors[0].startswith("status 400")


def test_first_request_rate_comes_from_sequential_requests(server: Server, work: TraceWindow) -> None:
    answers = unloaded(server, work)
    assert not any(answer.error for answer in answers)
    assert all(later.sent >= one.moments[-1] for one, later in pairwise(answers))
    assert first_guess(answers, work) > 0
