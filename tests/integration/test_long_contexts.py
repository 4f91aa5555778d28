"""A trajectory of more than 200,000 tokens: through the bus, kills and anchors included, into a training step."""

import json
from pathlib import Path
from threading import Event

import msgspec
import pytest

from rose.pipeline.audit import audit_log
from rose.schemas.arrays import count, pack_logprobs, pack_tokens, unpack_tokens
from rose.schemas.limits import MAX_CONTEXT_TOKENS, MAX_RECORD_BYTES
from rose.schemas.prompts import Prompt, Sampling
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.samples import Outcome, Sample
from rose.schemas.turns import TurnOutcome, TurnRequest, TurnResult
from rose.schemas.wire import encode
from rose.topics.admin import create_topics
from rose.topics.catalog import Partitions
from rose.workers.trainer.main import run_trainer
from tests.support.brokers import AnyBroker, any_broker, flags
from tests.support.roles import kill, role_process, rose
from tests.support.router_process_fixtures import PARTITIONS, RouterHarness, router_process
from tests.support.scripted_executors import END, FIRST_CHARACTER, ScriptedExecutors
from tests.support.trainer_fixtures import config_of, make_policy, make_samples, result_of, write_samples

pytestmark = pytest.mark.slow

TURNS = 66
"""More turns than a chain may have, so that one request is an anchor of nearly the whole context."""

OBSERVED, SAMPLED = 3_100, 500
TURN_TOKENS = 32_768

READER = f'''
from rose.workers.environments.protocol import Step


class Reader:
    """Shows pages of text."""

    def __init__(self):
        self.page = 0

    async def reset(self, seed, arguments):
        return "p" * {OBSERVED}

    async def step(self, action):
        self.page += 1
        done = self.page == {TURNS}
        reward = float(action[0] == "a")
        return Step(observation="p" * {OBSERVED}, reward=reward if done else 0.0, done=done)

    async def snapshot(self):
        return str(self.page).encode()

    async def restore(self, state):
        self.page = int(state)

    async def close(self): ...
'''


def turn_of(request: TurnRequest, _context: bytes) -> list[TurnResult]:
    """Return a turn of text. The two members of the group write other letters, and so have other rewards."""
    letter = FIRST_CHARACTER + ord("a") - 32 + int(request.trajectory_id[-1])
    tokens = [*[letter] * (SAMPLED - 1), END]
    return [
        TurnResult(
            trajectory_id=request.trajectory_id,
            group_id=request.group_id,
            home=request.home,
            turn=request.turn,
            attempt=0,
            outcome=TurnOutcome.COMPLETED,
            worker="scripted",
            tokens=pack_tokens(tokens),
            logprobs=pack_logprobs([-1.0] * SAMPLED),
            finish_reason="stop",
            spans=(VersionSpan(0, SAMPLED, 0),),
            context_tokens=request.context_tokens,
        )
    ]


@any_broker
def test_long_trajectory_survives_kills_and_is_replayed(
    broker: AnyBroker, namespace: str, model: str, tmp_path: Path
) -> None:
    (tmp_path / "pages.py").write_text(READER)
    executors = ScriptedExecutors(broker.settings(namespace), Partitions(home=1, slots=1, samples=1), results=turn_of)
    config = {
        "model.folder": model,
        "trainer.groups_per_step": 1,
        "environment.environments": json.dumps(["pages:Reader"]),
        "environment.import_paths": json.dumps([str(tmp_path)]),
        "environment.max_context_tokens": MAX_CONTEXT_TOKENS,
        "executor.max_model_len": MAX_CONTEXT_TOKENS,
    }
    prompt = Prompt(group_id="g", group_size=2, environment="pages:Reader", seed=1, max_turns=TURNS)
    for until in (20, 2 * TURNS - 10):
        with role_process("environment", executors.settings, 0, config) as worker:
            if not executors.requested:
                executors.submit(prompt)
            executors.pump_until(lambda: executors.requested >= until, what=f"{until} requests")  # noqa: B023
            kill(worker)
    with role_process("environment", executors.settings, 0, config):
        executors.pump_until(lambda: len(executors.samples) == 2, what="two samples")
    for name, samples in executors.samples.items():
        (sample,) = samples
        assert not sample.failure and len(sample.turns) == TURNS
        assert sample.reward == float(name == "g:0")
        assert 235_000 < count(sample.tokens) <= MAX_CONTEXT_TOKENS
        assert sum(sample.loss_mask) == TURNS * SAMPLED
        letters = [token for token, mask in zip(unpack_tokens(sample.tokens), sample.loss_mask, strict=True) if mask]
        assert set(letters) == {FIRST_CHARACTER + ord("a") - 32 + int(name[-1]), END}
        assert len(encode(sample)) < 9.2 * count(sample.tokens)
    anchors = [request for (_, turn), request in executors.requests.items() if turn and request.is_anchor]
    assert max(len(encode(request)) for request in anchors) > MAX_RECORD_BYTES
    executors.close()
    assert audit_log(executors.settings).clean
    shown = rose("replay", "g:0", *flags(executors.settings))
    assert shown.returncode == 0 and f"turn {TURNS - 1}" in shown.stdout, shown.stderr


@any_broker
def test_long_turn_that_is_preempted_twice_loses_no_token(broker: AnyBroker, namespace: str) -> None:
    settings = broker.settings(namespace)
    create_topics(settings, PARTITIONS)
    bus = RouterHarness(settings)
    context = MAX_CONTEXT_TOKENS - TURN_TOKENS
    with router_process(settings, 0):
        bus.beat(0, token_budget=2 * MAX_CONTEXT_TOKENS, max_turns=1)
        bus.ask("g:0", context=context, sampling=Sampling(max_tokens=TURN_TOKENS))
        for attempt, sampled in enumerate((11_000, 20_000)):
            bus.until(lambda: len(bus.inboxes) == attempt + 1)  # noqa: B023
            bus.answer_with(sampled, TurnOutcome.PREEMPTED)
        bus.until(lambda: len(bus.inboxes) == 3)
        last = bus.inboxes[-1]
        assert last.partial is not None and count(last.partial.tokens) == 31_000
        assert last.request.context_tokens == context
        bus.answer_with(TURN_TOKENS - 31_000, TurnOutcome.COMPLETED)
    bus.close()
    assert [count(one.tokens) for one in bus.results()] == [11_000, 31_000, TURN_TOKENS]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_trainer_learns_from_a_sample_of_200000_tokens(broker: AnyBroker, namespace: str, tmp_path: Path) -> None:
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    folder = make_policy(tmp_path / "policy", **small, max_position_embeddings=MAX_CONTEXT_TOKENS)
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=1))
    write_samples(settings, [long_sample(tokens, index) for index, tokens in enumerate((2_000, 200_000))])
    trained = config_of(
        folder, tmp_path / "run", groups_per_step=1, total_groups=1, minibatches=1, recompute_activations=True
    )
    run_trainer(settings, trained, Event())
    assert result_of(settings).counts == {Outcome.TRAINED: 2}


def long_sample(tokens: int, index: int) -> Sample:
    (short,) = [one for one in make_samples(groups=[0]) if one.trajectory_id.endswith(f":{index}")]
    turn = msgspec.structs.replace(short.turns[0], start=tokens - 1_000, end=tokens)
    return msgspec.structs.replace(
        short,
        group_size=2,
        tokens=pack_tokens([3 + place % 30 for place in range(tokens)]),
        loss_mask=bytes(tokens - 1_000) + bytes([1]) * 1_000,
        logprobs=pack_logprobs([0.0] * (tokens - 1_000) + [-3.7] * 1_000),
        spans=(VersionSpan(tokens - 1_000, tokens, 0),),
        turns=(turn,),
    )
