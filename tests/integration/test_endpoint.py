"""A lender over HTTP requests, between a real broker and a scripted endpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rose.schemas.arrays import unpack_logprobs, unpack_tokens
from rose.schemas.heartbeats import TTL_SECONDS, ExecutorState, WorkerClass
from rose.schemas.turns import Refusal, TurnOutcome, TurnResult
from rose.topics.admin import create_topics
from rose.topics.catalog import Partitions
from rose.topics.settings import BusSettings
from rose.workers.lender.config import EndpointConfig
from rose.workers.lender.endpoint.versions import PAUSED
from tests.support.brokers import AnyBroker, any_broker, kafka_first
from tests.support.endpoint_fixtures import MOST_TOKENS, Fault, Lending, ScriptedEndpoint, lending
from tests.support.executor_fixtures import Router
from tests.support.policy_folders import logprobs_of, new_policy, save_policy
from tests.support.waiting import until

pytestmark = pytest.mark.slow

CONTEXT = [3, 4, 5, 6] * 5


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=2, slots=2, samples=1, chunks=2))
    return settings


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return save_policy(tmp_path / "policy", new_policy(0, tied=False))


@pytest.fixture
def endpoint(policy: Path) -> Iterator[ScriptedEndpoint]:
    endpoint = ScriptedEndpoint(policy, new_policy(0, tied=False))
    endpoint.start()
    yield endpoint
    endpoint.end()


@pytest.fixture
def config(endpoint: ScriptedEndpoint, tmp_path: Path) -> EndpointConfig:
    return EndpointConfig(url=endpoint.url, folder=tmp_path / "versions", ttft_seconds=5.0, tpot_seconds=0.5)


@pytest.fixture
def lender(settings: BusSettings, policy: Path, config: EndpointConfig) -> Iterator[Lending]:
    with lending(settings, policy, config) as lender:
        yield lender


@pytest.fixture
def router(settings: BusSettings, lender: Lending) -> Router:
    return Router(settings, lender)


def prove(result: TurnResult, model: Any, version: int) -> None:
    """Assert that the result is the output of this model after the context, under this version."""
    tokens = unpack_tokens(result.tokens)
    assert result.outcome is TurnOutcome.COMPLETED
    assert [(span.start, span.end, span.version) for span in result.spans] == [(0, len(tokens), version)]
    expected = logprobs_of(model, CONTEXT, tokens).numpy()
    assert np.abs(unpack_logprobs(result.logprobs) - expected).max() < 1e-3


@torch.no_grad()
def greedy(model: Any, count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        tokens.append(int(model(input_ids=torch.tensor([[*CONTEXT, *tokens]])).logits[0, -1].argmax()))
    return tokens


@kafka_first
def test_turns_are_answered_under_proven_versions(
    router: Router, endpoint: ScriptedEndpoint, lender: Lending, tmp_path: Path
) -> None:
    models = [new_policy(seed, tied=False) for seed in range(4)]
    router.until(lambda: bool(router.heartbeats))
    beat = router.heartbeats[-1]
    assert (beat.state, beat.policy_version) == (ExecutorState.STARTING, -1)
    assert (beat.worker_class, beat.hardware.device) == (WorkerClass.SERVING, "request-level")

    router.publish(models[1], 1)
    router.until(lambda: router.serves(1))
    router.dispatch("greedy", CONTEXT, temperature=0.0, stop=())
    prove(router.result("greedy"), models[1], 1)
    assert unpack_tokens(router.result("greedy").tokens) == greedy(models[1], 8)

    endpoint.loads = False
    router.publish(models[2], 2)
    router.until(lambda: router.heartbeats[-1].refused_version == 2)
    assert "off by" in router.heartbeats[-1].refused_reason and router.serves(1)
    assert endpoint.loaded == ["version-1", "version-2", "version-1"]
    router.dispatch("still", CONTEXT)
    prove(router.result("still"), models[1], 1)

    endpoint.loads = True
    for number in range(12):
        router.dispatch(f"across-{number}", CONTEXT, max_tokens=20)
    router.publish(models[3], 3)
    router.until(lambda: router.serves(3))
    for number in range(12):
        result = router.result(f"across-{number}")
        if result.outcome is TurnOutcome.COMPLETED:
            version = result.spans[0].version
            prove(result, models[version], version)
        else:
            assert result.refusal is Refusal.ROOM
    assert [path.name for path in (tmp_path / "versions").glob("*/version-*")] == ["version-3"]

    router.dispatch("seeded", CONTEXT, seed=4)
    assert "seeded" in router.result("seeded").reason
    assert not router.heartbeats[-1].seeded, "a router would not have sent it"
    router.dispatch("strange", [*CONTEXT, 48])
    assert "vocabulary" in router.result("strange").reason
    assert router.result("strange").refusal is Refusal.ENGINE

    router.executor = None
    assert lender.end() == 0
    router.until(lambda: router.heartbeats[-1].state is ExecutorState.STOPPING)


@any_broker
def test_endpoint_silent_to_a_probe_proves_no_version(router: Router, endpoint: ScriptedEndpoint) -> None:
    endpoint.answers_probes = False
    router.until(lambda: bool(router.heartbeats))
    router.publish(new_policy(1, tied=False), 1)
    router.until(lambda: router.heartbeats[-1].refused_version == 1 or router.serves(1))
    assert "answered with 0" in router.heartbeats[-1].refused_reason and not router.serves(1)


@any_broker
def test_partial_turn_of_a_lost_endpoint_returns_and_the_endpoint_recovers(
    router: Router, endpoint: ScriptedEndpoint
) -> None:
    model = new_policy(1, tied=False)
    router.publish(model, 1)
    router.until(lambda: router.serves(1))
    endpoint.token_seconds = 0.1
    router.dispatch("broken-off", CONTEXT, max_tokens=200, stop=())
    router.until(lambda: router.heartbeats[-1].rollout.running == 1)
    before = len(router.heartbeats)
    router.until(lambda: len(router.heartbeats) > before + 10)
    endpoint.stop()
    result = router.result("broken-off")
    assert result.outcome is TurnOutcome.PREEMPTED and "away" in result.reason
    tokens = unpack_tokens(result.tokens)
    assert 0 < len(tokens) < 200
    assert np.abs(unpack_logprobs(result.logprobs) - logprobs_of(model, CONTEXT, tokens).numpy()).max() < 1e-3
    router.until(lambda: router.heartbeats[-1].state is ExecutorState.STOPPING)

    gone = router.heartbeats[-1].incarnation
    endpoint.model, endpoint.token_seconds = new_policy(0, tied=False), 0.0
    endpoint.start()
    router.until(lambda: router.heartbeats[-1].incarnation != gone and router.serves(1))
    router.dispatch("goes-on", CONTEXT, max_tokens=len(tokens) + 8, stop=(), partial=result.part)
    whole = router.result("goes-on")
    prove(whole, model, 1)
    assert unpack_tokens(whole.tokens)[: len(tokens)] == tokens and len(unpack_tokens(whole.tokens)) == len(tokens) + 8


@any_broker
def test_failed_turn_affects_no_other_turn_and_no_user(router: Router, endpoint: ScriptedEndpoint) -> None:
    model, number = new_policy(1, tied=False), 0
    router.publish(model, 1)
    router.until(lambda: router.serves(1))
    incarnation, pauses = router.heartbeats[-1].incarnation, endpoint.pauses

    def run(fault: Fault | None) -> TurnResult:
        nonlocal number
        number += 1
        if fault is not None:
            endpoint.faults[endpoint.turns + 1] = fault
        router.until(lambda: router.heartbeats[-1].max_turns > 0)
        router.dispatch(f"turn-{number}", CONTEXT, max_tokens=20, stop=())
        return router.result(f"turn-{number}")

    for status in (413, 422, 500):
        result = run(Fault(status))
        assert result.refusal is Refusal.ENGINE and f"fault {status}" in result.reason
        prove(run(None), model, 1)
    for status in (500, 400, 0):
        result = run(Fault(status, tokens=3))
        assert (result.outcome, len(unpack_tokens(result.tokens))) == (TurnOutcome.PREEMPTED, 3)
        expected = logprobs_of(model, CONTEXT, unpack_tokens(result.tokens)).numpy()
        assert np.abs(unpack_logprobs(result.logprobs) - expected).max() < 1e-3
        prove(run(None), model, 1)
    result = run(Fault(429))
    assert (result.outcome, result.tokens) == (TurnOutcome.PREEMPTED, b"") and "no room" in result.reason
    while result.refusal is not Refusal.ROOM:  # the lender lowers its limit to zero
        number += 1
        endpoint.faults[endpoint.turns + 1] = Fault(429)
        router.dispatch(f"turn-{number}", CONTEXT)
        result = router.result(f"turn-{number}")
        assert result.outcome is TurnOutcome.PREEMPTED or result.refusal is Refusal.ROOM
        before = len(router.heartbeats)
        router.until(lambda: len(router.heartbeats) > before)  # noqa: B023  called within this round
    router.until(lambda: router.heartbeats[-1].max_turns == 0)
    assert (router.heartbeats[-1].incarnation, endpoint.pauses, endpoint.loaded) == (incarnation, pauses, ["version-1"])


@any_broker
@pytest.mark.parametrize(
    ("fault", "instance"),
    [(Fault(500), "second"), (Fault(0, tokens=3), "second"), (Fault(401), "first")],
    ids=["fails, another", "breaks off, another", "answers nobody"],
)
def test_replaced_or_unresponsive_endpoint_is_started_anew(
    router: Router, endpoint: ScriptedEndpoint, fault: Fault, instance: str
) -> None:
    """The weights of a replaced endpoint are unknown."""
    model = new_policy(1, tied=False)
    router.publish(model, 1)
    router.until(lambda: router.serves(1))
    gone = router.heartbeats[-1].incarnation
    endpoint.faults[endpoint.turns + 1], endpoint.instance = fault, instance
    router.dispatch("last", CONTEXT, max_tokens=20, stop=())
    result = router.result("last")
    assert result.outcome is TurnOutcome.PREEMPTED and "away" in result.reason
    router.until(lambda: router.heartbeats[-1].incarnation != gone and router.serves(1))
    router.dispatch("first", CONTEXT)
    prove(router.result("first"), model, 1)


@any_broker
def test_hung_endpoint_is_a_silent_executor(router: Router, endpoint: ScriptedEndpoint) -> None:
    router.publish(new_policy(1, tied=False), 1)
    router.until(lambda: router.serves(1))
    endpoint.hang(True)
    router.until(lambda: not list(router.reader.read(100, TTL_SECONDS)))
    endpoint.hang(False)
    router.until(lambda: router.serves(1))
    router.dispatch("after", CONTEXT)
    assert router.result("after").outcome is TurnOutcome.COMPLETED


@any_broker
def test_lender_that_stops_during_a_weight_load_leaves_the_endpoint_serving(
    router: Router, endpoint: ScriptedEndpoint, lender: Lending
) -> None:
    endpoint.says_paused = False
    router.publish(new_policy(1, tied=False), 1)
    router.until(lambda: not endpoint.goes_on.is_set())
    router.executor = None
    assert lender.end() == 0
    assert endpoint.goes_on.is_set()


@any_broker
def test_endpoint_of_a_lender_killed_during_a_weight_load_works_with_the_next(
    settings: BusSettings, endpoint: ScriptedEndpoint, policy: Path, config: EndpointConfig
) -> None:
    mark = config.folder / config.folder_name / PAUSED
    mark.parent.mkdir(parents=True)
    mark.touch()
    endpoint.pause()
    until(lambda: not endpoint.goes_on.is_set())
    with lending(settings, policy, config):
        until(endpoint.goes_on.is_set)
        until(lambda: not mark.exists())


@any_broker
def test_late_turns_are_returned_and_no_more_are_requested(router: Router, endpoint: ScriptedEndpoint) -> None:
    router.publish(new_policy(1, tied=False), 1)
    router.until(lambda: router.serves(1))
    assert router.heartbeats[-1].max_turns == 1
    endpoint.token_seconds = 0.7
    router.dispatch("late", CONTEXT, max_tokens=200, stop=())
    result = router.result("late")
    assert result.outcome is TurnOutcome.PREEMPTED and "latency" in result.reason
    assert len(unpack_tokens(result.tokens))
    router.until(lambda: router.heartbeats[-1].max_turns == 0)
    router.dispatch("none", CONTEXT)
    assert router.result("none").refusal is Refusal.ROOM


@any_broker
def test_punctual_turns_raise_the_requested_number(router: Router, endpoint: ScriptedEndpoint) -> None:
    router.publish(new_policy(1, tied=False), 1)
    router.until(lambda: router.serves(1))
    endpoint.token_seconds = 0.05
    number = 0
    while router.heartbeats[-1].max_turns < 4:
        names = [f"more-{number + more}" for more in range(router.heartbeats[-1].max_turns)]
        number += len(names)
        for name in names:
            router.dispatch(name, CONTEXT, max_tokens=30, stop=())
        for name in names:
            router.result(name)


@any_broker
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"version": {"version": "0.33.1"}}, "is vLLM 0.33.1"),
        ({"version": ["SGLang"]}, "only a vLLM 0.32 server"),
        ({"tells_token_ids": False}, "does not tell the token ids"),
        ({"changed": {"logprobs_mode": "raw_logprobs"}}, "--logprobs-mode processed_logprobs"),
        ({"changed": {"dtype": "torch.float16"}}, "computes in float16"),
        ({"changed": {"max_model_len": MOST_TOKENS - 1}}, "longest turn"),
        ({"changed": {"max_model_len": 1025}}, "start it with --max-model-len 1024, of which"),
        ({"changed": {"model": "/nowhere"}}, "cannot be read from here"),
        ({"folder": Path(__file__).parents[2] / "workers/models/calculator"}, "are not the policy's"),
    ],
)
def test_endpoint_that_cannot_lend_is_refused_in_one_sentence(
    settings: BusSettings,
    endpoint: ScriptedEndpoint,
    policy: Path,
    config: EndpointConfig,
    wrong: dict[str, Any],
    sentence: str,
) -> None:
    for name, value in wrong.items():
        setattr(endpoint, name, value)
    with lending(settings, policy, config) as lender:
        until(lambda: lender.poll() is not None)
        assert lender.poll() == 2 and sentence in lender.message and "\n" not in lender.message


@any_broker
def test_folder_invisible_to_the_endpoint_is_reported_and_nothing_is_loaded(
    router: Router, endpoint: ScriptedEndpoint
) -> None:
    endpoint.sees_folders = False
    router.publish(new_policy(1, tied=False), 1)
    router.until(lambda: bool(router.heartbeats) and router.heartbeats[-1].refused_version == 1)
    assert "cannot read" in router.heartbeats[-1].refused_reason and endpoint.loaded == []
