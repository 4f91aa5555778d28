"""The environment worker on a real broker: every trajectory ends once under any kill or fault."""

import itertools
import random
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest
from confluent_kafka import OFFSET_BEGINNING

from rose.pipeline.audit import audit_log
from rose.schemas import wire
from rose.schemas.arrays import pack_tokens, unpack_tokens
from rose.schemas.errors import UsageError
from rose.schemas.progress import EnvSnapshot, Group, GroupState, TrajectoryProgress
from rose.schemas.prompts import Prompt, PromptSampling
from rose.schemas.record import Record
from rose.schemas.samples import Ending, Sample
from rose.schemas.turns import Refusal, TurnOutcome, TurnRequest, TurnResult
from rose.schemas.wire import encode
from rose.topics.catalog import COMPLETED, ENVIRONMENT_GROUP, ENVIRONMENT_TRANSACTIONAL_PREFIX, PROMPTS, home_partition
from rose.topics.errors import BrokerUnreachable, BusError
from rose.topics.log_reader import await_transactions, read_to_end
from rose.topics.reader import Reader
from rose.topics.records import Envelope, InvalidMessage, RawMessage
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.environments import metrics
from rose.workers.environments.config import EnvironmentConfig
from rose.workers.environments.home import Home
from rose.workers.environments.main import run_environment_worker
from rose.workers.environments.outbox import PendingTransition, fence
from rose.workers.environments.prompt_decisions import ResetResult
from tests.support.brokers import EMBEDDED, AnyBroker, any_broker, kafka_first
from tests.support.environment_worker_fixtures import (
    GROUPS,
    PARTITIONS,
    SIZE,
    dead_letters,
    finish,
    groups,
    homes_of_members,
    once,
    prompt_of,
    submit_all,
)
from tests.support.roles import kill
from tests.support.scripted_executors import (
    CHARACTERS,
    END,
    FIRST_CHARACTER,
    ScriptedExecutors,
    results_of,
    worker_process,
)
from tests.support.trajectory_fixtures import RULES, live, result_of, stepped

MOODY = '''
import asyncio
from rose.workers.environments.calculator import Calculator

class Moody(Calculator):
    """The calculator, except that a seed can make it fail."""

    async def reset(self, seed, arguments):
        self.seed = seed
        if seed == 1:
            raise OSError("no container left")
        return await super().reset(seed, arguments)

    async def snapshot(self):
        return bytes([self.seed]) + await super().snapshot()

    async def restore(self, state):
        self.seed = state[0]
        await super().restore(state[1:])

    async def step(self, action):
        if self.seed == 2:
            raise ValueError("boom")
        if self.seed == 3:
            await asyncio.Event().wait()
        return await super().step(action)
'''


@kafka_first
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_kill_and_restart_of_a_worker_changes_no_trajectory(
    executors: ScriptedExecutors, undisturbed: dict[str, Sample], model: str, seed: int
) -> None:
    """The seed determines the times of the kills; it is printed to repeat a run."""
    draw = random.Random(seed)
    submit_all(executors)
    for _ in range(3):
        until = executors.requested + draw.randint(1, 60)
        with worker_process(executors.settings, 0, {"model_folder": model, "window_groups": 5}) as worker:
            executors.pump_until(lambda: executors.requested >= until, what=f"{until} requests")  # noqa: B023
            kill(worker)
    with worker_process(executors.settings, 0, {"model_folder": model, "max_live_environments": 3}):
        finish(executors)
    assert once(executors) == undisturbed


@kafka_first
@pytest.mark.slow
@pytest.mark.parametrize("seed", [3])
def test_groups_end_without_their_slow_surplus_trajectories_over_kills(
    executors: ScriptedExecutors, model: str, seed: int
) -> None:
    """One trajectory of each group never gets a result. The seed determines the times of the kills."""
    draw = random.Random(seed)
    launched = SIZE + SIZE // 2
    executors.answers = lambda request: not request.trajectory_id.endswith(":1")
    submit_all(executors)
    config = {"model_folder": model, "window_groups": 5, "members_ratio": 1.5}
    for _ in range(3):
        until = executors.requested + draw.randint(1, 60)
        with worker_process(executors.settings, 0, config) as worker:
            executors.pump_until(lambda: executors.requested >= until, what=f"{until} requests")  # noqa: B023
            kill(worker)
    with worker_process(executors.settings, 0, config):
        finish(executors, GROUPS * launched)
        executors.pump(0.5)
        for number in range(GROUPS):
            members = [executors.samples[f"g{number}:{index}"] for index in range(launched)]
            assert [len(samples) for samples in members] == [1] * launched
            (unanswered,) = members[1]
            assert (unanswered.ended, unanswered.reward, unanswered.group_size) == (Ending.SURPLUS, None, launched)
            assert sum(sample.reward is not None for (sample,) in members) == SIZE
            assert any(name == unanswered.trajectory_id for name, _ in executors.withdrawn)
        executors.pump_until(
            lambda: {group.state for group in groups(executors.settings).values()} == {GroupState.SETTLED},
            what="settled groups",
        )
    audit = audit_log(executors.settings)
    assert audit.clean and audit.requested == GROUPS * launched
    assert audit.trained == GROUPS * SIZE and audit.surplus == GROUPS * (launched - SIZE)


@kafka_first
@pytest.mark.slow
@pytest.mark.parametrize("seed", [4])
def test_deferred_groups_end_as_if_undisturbed_over_kills(
    executors: ScriptedExecutors, undisturbed: dict[str, Sample], model: str, seed: int
) -> None:
    """A third of the groups gets no result before it was deferred. The seed determines the times of the kills."""
    draw = random.Random(seed)

    def is_answered(request: TurnRequest) -> bool:
        return int(request.group_id[1:]) % 3 != 0 or request.trajectory_id in executors.holds

    executors.answers, executors.step_samples = is_answered, SIZE
    submit_all(executors)
    config = {"model_folder": model, "window_groups": 4, "groups_ratio": 1.5}
    for _ in range(3):
        until = executors.requested + draw.randint(1, 60)
        with worker_process(executors.settings, 0, config) as worker:
            executors.pump_until(lambda: executors.requested >= until, what=f"{until} requests")  # noqa: B023
            kill(worker)
    with worker_process(executors.settings, 0, config):
        finish(executors)
    assert once(executors) == undisturbed
    assert {name.partition(":")[0] for name in executors.holds} >= {f"g{number}" for number in range(0, GROUPS, 3)}
    assert audit_log(executors.settings).clean


@pytest.mark.slow
def test_two_workers_share_the_homes_and_one_takes_over_from_the_other(
    executors: ScriptedExecutors, undisturbed: dict[str, Sample], model: str, broker_kind: str
) -> None:
    if broker_kind == EMBEDDED:
        pytest.skip("never evicts a member: tests/conformance/test_groups.py")
    settings, config = executors.settings, {"model_folder": model, "window_groups": 3}
    with worker_process(settings, 0, config), worker_process(settings, 1, config) as other:
        executors.pump_until(lambda: sorted(map(len, homes_of_members(settings))) == [2, 2], what="two members")
        submit_all(executors)
        executors.pump_until(lambda: executors.requested >= 80, what="80 requests")
        kill(other)
        finish(executors)
    assert once(executors) == undisturbed


@pytest.mark.slow
def test_fenced_writer_is_recreated_without_loss(
    executors: ScriptedExecutors, undisturbed: dict[str, Sample], model: str
) -> None:
    submit_all(executors)
    with worker_process(executors.settings, 0, {"model_folder": model}) as worker:
        for requests in (30, 90):
            executors.pump_until(lambda: executors.requested >= requests, what=f"{requests} requests")  # noqa: B023
            with suppress(BusError):  # the writer fences at once, and may be fenced before it becomes the owner
                Writer(executors.settings, "intruder", transactional_id="environment.environment-0")
        finish(executors)
        assert worker.poll() is None
    assert once(executors) == undisturbed


def test_redecided_prompt_of_an_aborted_transaction_is_counted_once(executors: ScriptedExecutors) -> None:
    settings, refused = executors.settings, "rose_environment_prompts_refused_total"
    with closing(Reader(settings, "w0", group=ENVIRONMENT_GROUP)) as reader:
        refused_before = metrics.ENVIRONMENT.get_sample_value(refused)
        assert refused_before is not None
        for fenced in (True, False):
            outbox = fence(settings, "w0", reader, rules=RULES, clock=time.time)
            outbox.on_recovered({(PROMPTS, 0): 0, (COMPLETED, 0): 0}, {0: 0})
            home = Home(0, homes=PARTITIONS.home)
            home.on_prompt(InvalidMessage(PROMPTS, 0, 0, RawMessage(None, b"none", ()), "it is none"))
            home.decide(has_room=True, outcomes_from=0)
            if fenced:
                Writer(settings, "intruder", transactional_id=f"{ENVIRONMENT_TRANSACTIONAL_PREFIX}w0").close()
                with pytest.raises(BusError):
                    outbox.commit({0: home}, [])
                assert metrics.ENVIRONMENT.get_sample_value(refused) == refused_before
            else:
                outbox.commit({0: home}, [])
        assert metrics.ENVIRONMENT.get_sample_value(refused) == refused_before + 1


def test_written_record_is_encoded_once(executors: ScriptedExecutors, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, encoded = executors.settings, Counter[type[Record]]()

    def count_encode(record: Record) -> bytes:
        encoded[type(record)] += 1
        return encode(record)

    monkeypatch.setattr(wire, "encode", count_encode)
    with closing(Reader(settings, "w0", group=ENVIRONMENT_GROUP)) as reader:
        outbox = fence(settings, "w0", reader, rules=RULES, clock=time.time)
        outbox.on_recovered({(PROMPTS, 0): 0, (COMPLETED, 0): 0}, {0: 0})
        home, prompt = Home(0, homes=1), prompt_of(0)
        home.on_prompt(Envelope(prompt, PROMPTS, 0, 0, prompt.group_id, 0.0, RawMessage(None, encode(prompt))))
        decision = home.decide(has_room=True, outcomes_from=0)
        assert decision is not None
        reset_result = ResetResult(pack_tokens([5, 6]), b"start")
        decision.awaited, decision.reset_results = 0, dict.fromkeys(range(SIZE), reset_result)
        outbox.commit({0: home}, [])
        assert encoded == {Group: 1, EnvSnapshot: SIZE, TurnRequest: SIZE, TrajectoryProgress: SIZE}
        encoded.clear()
        trajectory = next(iter(home.trajectories.values()))
        written = live(trajectory, result_of(trajectory), stepped(done=True))
        outbox.commit({0: home}, [PendingTransition(home, trajectory.trajectory_id, written, None)])
        assert encoded == {Sample: 1}


@kafka_first
@pytest.mark.slow
def test_worker_with_a_taken_name_ends_with_one_sentence(
    executors: ScriptedExecutors, undisturbed: dict[str, Sample], model: str, tmp_path: Path
) -> None:
    submit_all(executors)
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    with worker_process(executors.settings, 0, {"model_folder": model}, logs[0]) as first:
        executors.pump_until(lambda: executors.requested >= 30, what="30 requests")
        with worker_process(executors.settings, 0, {"model_folder": model}, logs[1]) as second:
            more = itertools.count(GROUPS)

            def one_has_ended() -> bool:
                executors.submit(prompt_of(next(more)))
                return any(one.poll() is not None for one in (first, second))

            executors.pump_until(one_has_ended, what="the end of one of them")
            ended = logs[0 if first.poll() is not None else 1].read_text()
            assert "another environment worker was started as 'environment-0'" in ended
            finish(executors, next(more) * SIZE)
    samples = once(executors)
    assert {name: samples[name] for name in undisturbed} == undisturbed


def test_new_owner_waits_for_open_transactions_of_the_previous_owner(executors: ScriptedExecutors) -> None:
    place, other = (PROMPTS, 1), Writer(executors.settings, "other", transactional_id="other")
    other.begin()
    other.write(PROMPTS, prompt_of(1), key="g1", partition=1)
    other.flush()
    with pytest.raises(BusError, match="waiting for a transaction"):
        await_transactions(executors.settings, [place], seconds=0.2)
    other.commit()
    await_transactions(executors.settings, [place])
    assert [envelope.key for envelope in read_to_end(executors.settings, {place: OFFSET_BEGINNING})] == ["g1"]


@kafka_first
@pytest.mark.slow
def test_stop_and_restart_of_a_worker_changes_no_trajectory(
    executors: ScriptedExecutors, undisturbed: dict[str, Sample], model: str
) -> None:
    submit_all(executors)
    for until in (20, 60, 120):
        with worker_process(executors.settings, 0, {"model_folder": model, "window_groups": 5}):
            executors.pump_until(lambda: executors.requested >= until, what=f"{until} requests")  # noqa: B023
    with worker_process(executors.settings, 0, {"model_folder": model, "max_live_environments": 3}):
        finish(executors)
    assert once(executors) == undisturbed


@pytest.mark.slow
def test_unopenable_prompts_are_dead_lettered_and_the_worker_continues(
    executors: ScriptedExecutors, model: str
) -> None:
    settings = executors.settings
    here = iter(name for name in map("p{}".format, itertools.count()) if home_partition(name, PARTITIONS.home) == 0)
    first, second, third, fourth, fifth, sixth, seventh = (prompt_of(1, group_id=next(here)) for _ in range(7))
    bad = [
        msgspec.structs.replace(second, environment="chess"),
        msgspec.structs.replace(third, environment="os:getcwd"),
        msgspec.structs.replace(fourth, arguments={"max_operands": 99}),
        first,
        msgspec.structs.replace(sixth, sampling=PromptSampling(temperature=0)),
        msgspec.structs.replace(seventh, sampling=PromptSampling(top_p=0.5)),
    ]
    for prompt in [first, *bad, msgspec.structs.replace(fourth, max_turns=fourth.max_turns + 1)]:
        executors.submit(prompt, partition=0)
    known = "this worker has calculator, frozenlake, sandbox"
    same = f"{known}; all workers of a namespace need the same environment.environments"
    reasons = (
        f"unknown environment 'chess': {same}",
        "unknown environment",
        "max_operands",
        "before",
        "temperature",
        "top_p",
    )
    with worker_process(settings, 0, {"model_folder": model}):
        finish(executors, 2 * SIZE)
        executors.pump_until(lambda: len(dead_letters(settings)) == len(bad), what="dead letters")
    found = dead_letters(settings)
    assert [(dead_letter.partition, dead_letter.offset) for dead_letter in found] == [
        (0, offset) for offset in range(1, 7)
    ]
    assert [msgspec.msgpack.decode(dead_letter.raw.value or b"", type=Prompt) for dead_letter in found] == bad
    for dead_letter, reason in zip(found, reasons, strict=True):
        assert reason in dead_letter.reason
    executors.submit(msgspec.structs.replace(fourth, max_turns=fourth.max_turns + 2), partition=0)
    executors.submit(fifth, partition=0)
    with worker_process(settings, 0, {"model_folder": model}):
        finish(executors, 3 * SIZE)
        executors.pump_until(lambda: len(dead_letters(settings)) == len(bad) + 1, what="another dead letter")
    assert [dead_letter.offset for dead_letter in dead_letters(settings)] == [1, 2, 3, 4, 5, 6, 8], (
        "a restart knows what was opened"
    )
    opened = {f"{prompt.group_id}:{index}" for prompt in (first, fourth, fifth) for index in range(SIZE)}
    assert set(once(executors)) == opened
    states = {group_id: group.state for group_id, group in groups(settings).items()}
    refused = {prompt.group_id: GroupState.REFUSED for prompt in (second, third, sixth, seventh)}
    assert {name: state for name, state in states.items() if state is GroupState.REFUSED} == refused


@any_broker
@pytest.mark.slow
def test_failing_environment_fails_its_trajectories_without_a_reward(
    executors: ScriptedExecutors, model: str, tmp_path: Path
) -> None:
    (tmp_path / "moody.py").write_text(MOODY)
    for number in range(4):
        executors.submit(prompt_of(number, environment="moody:Moody"))
    config = {
        "model_folder": model,
        "step_timeout_seconds": 0.5,
        "import_paths": [str(tmp_path)],
        "environments": ["moody:Moody"],
    }
    with worker_process(executors.settings, 0, config):
        finish(executors, 4 * SIZE)
    samples = once(executors)
    for group, reason in {"g1": "no container left", "g2": "boom", "g3": "longer than 0.5 s"}.items():
        for index in range(SIZE):
            sample = samples[f"{group}:{index}"]
            assert sample.reward is None and reason in sample.failure
    assert all(samples[f"g0:{index}"].reward is not None for index in range(SIZE))


ENDING = '''
import asyncio, os
from rose.workers.environments.calculator import Calculator

class Ending(Calculator):
    """The calculator, except that a seed can have it end its process, or never begin."""

    async def reset(self, seed, arguments):
        self.seed = seed
        if seed == 3:
            await asyncio.Event().wait()
        return await super().reset(seed, arguments)

    async def step(self, action):
        if self.seed == 1:
            os._exit(7)
        if self.seed == 2:
            os.abort()
        return await super().step(action)

    async def snapshot(self):
        return bytes([self.seed]) + await super().snapshot()

    async def restore(self, state):
        self.seed = state[0]
        await super().restore(state[1:])
'''


@any_broker
@pytest.mark.slow
def test_environment_that_exits_or_never_starts_fails_no_other_trajectory(
    executors: ScriptedExecutors, model: str, tmp_path: Path
) -> None:
    (tmp_path / "ending.py").write_text(ENDING)
    for number in (3, *range(3), *range(4, 8)):
        executors.submit(prompt_of(number, environment="ending:Ending"))
    config = {
        "model_folder": model,
        "step_timeout_seconds": 600.0,
        "import_paths": [str(tmp_path)],
        "environments": ["ending:Ending"],
    }
    with worker_process(executors.settings, 0, config):
        finish(executors, 7 * SIZE)
        assert not any(name.startswith("g3:") for name in executors.samples), "it is still being reset"
    samples = once(executors)
    for group, reason in {"g1": "its process ended with status 7", "g2": "its process was ended by SIGABRT"}.items():
        for index in range(SIZE):
            sample = samples[f"{group}:{index}"]
            assert sample.reward is None and sample.failure.startswith("environment ending:Ending: ")
            assert reason in sample.failure and len(sample.turns) == 1, "what was sampled is kept"
    for number in (0, 4, 5, 6, 7):
        assert all(samples[f"g{number}:{index}"].reward is not None for index in range(SIZE))


@any_broker
@pytest.mark.slow
def test_malformed_or_failed_results_fail_their_trajectory(broker: AnyBroker, namespace: str, model: str) -> None:
    def results(request: TurnRequest, context: bytes) -> list[TurnResult]:
        sound = results_of(request, context)[-1]
        if request.group_id == "g1":
            return [msgspec.structs.replace(sound, logprobs=b"")]
        if request.group_id == "g2":
            return [msgspec.structs.replace(sound, outcome=TurnOutcome.FAILED, reason="nobody had room"), sound]
        return [sound]

    executors = ScriptedExecutors(broker.settings(namespace), PARTITIONS, results=results)
    for number in range(3):
        executors.submit(prompt_of(number))
    with worker_process(executors.settings, 0, {"model_folder": model}):
        finish(executors, 3 * SIZE)
    samples = once(executors)
    executors.close()
    for index in range(SIZE):
        assert samples[f"g0:{index}"].failure == ""
        assert "malformed result" in samples[f"g1:{index}"].failure and samples[f"g1:{index}"].reward is None
        assert "nobody had room" in samples[f"g2:{index}"].failure and samples[f"g2:{index}"].reward is None


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["lives", "is killed"])
def test_turn_with_missing_context_is_requested_again_with_an_anchor(
    broker: AnyBroker, namespace: str, model: str, killed: bool
) -> None:
    """Each turn with a chain is refused twice, as by two executors. A new owner repeats unfinished work."""

    def results(request: TurnRequest, context: bytes) -> list[TurnResult]:
        sound = results_of(request, context)[-1]
        if request.is_anchor:
            return [sound]
        torn = msgspec.structs.replace(sound, outcome=TurnOutcome.REFUSED, refusal=Refusal.CONTEXT, tokens=b"")
        return [torn, torn]

    executors = ScriptedExecutors(broker.settings(namespace), PARTITIONS, results=results)
    for number in range(3):
        executors.submit(prompt_of(number))
    with worker_process(executors.settings, 0, {"model_folder": model}) as worker:
        if killed:
            executors.pump_until(lambda: any(request.turn for request in executors.requests.values()), what="turns")
            kill(worker)
        else:
            finish(executors, 3 * SIZE)
    if killed:
        with worker_process(executors.settings, 0, {"model_folder": model}):
            finish(executors, 3 * SIZE)
    samples = once(executors)
    assert all(sample.failure == "" for sample in samples.values())
    assert any(len(sample.turns) > 1 for sample in samples.values())
    executors.close()


@any_broker
@pytest.mark.slow
def test_prompt_stop_token_is_left_out_of_the_action_and_closed_in_the_context(
    broker: AnyBroker, namespace: str, model: str
) -> None:
    """A new owner does the same."""
    stop = FIRST_CHARACTER + CHARACTERS.index(".")

    def results(request: TurnRequest, context: bytes) -> list[TurnResult]:
        assert request.sampling.stop_token_ids == (stop,)
        sound = results_of(request, context)[-1]
        return [msgspec.structs.replace(sound, tokens=sound.tokens.replace(pack_tokens([END]), pack_tokens([stop])))]

    executors = ScriptedExecutors(broker.settings(namespace), PARTITIONS, results=results)
    for number in range(3):
        executors.submit(prompt_of(number, sampling=PromptSampling(stop_token_ids=(stop,))))
    with worker_process(executors.settings, 0, {"model_folder": model}) as worker:
        executors.pump_until(lambda: any(request.turn for request in executors.requests.values()), what="turns")
        kill(worker)
    with worker_process(executors.settings, 0, {"model_folder": model}):
        finish(executors, 3 * SIZE)
    samples = once(executors)
    executors.close()
    for sample in samples.values():
        tokens = unpack_tokens(sample.tokens)
        for turn, end in zip(sample.turns[:-1], [turn.start for turn in sample.turns[1:]], strict=True):
            read = tokens[turn.end : end]
            assert read[0] == END and not any(sample.loss_mask[turn.end : end])
            assert "?" not in "".join(CHARACTERS[token - FIRST_CHARACTER] for token in read[1:-1]), "the tool reads it"


@kafka_first
@pytest.mark.slow
def test_open_groups_never_exceed_the_window(executors: ScriptedExecutors, model: str) -> None:
    executors.settles = False
    submit_all(executors)
    config = {"model_folder": model, "window_groups": 2}
    for settled in range(4):  # every restart knows the unsettled groups
        with worker_process(executors.settings, 0, config):
            finish(executors, (2 + settled) * SIZE)
            groups = list(dict.fromkeys(request.group_id for request in executors.requests.values()))
            assert len(groups) == 2 + settled
        for index in range(SIZE):
            executors.settle(executors.samples[f"{groups[settled]}:{index}"][0])
    executors.settles = True
    for samples in list(executors.samples.values()):
        executors.settle(samples[0])
    with worker_process(executors.settings, 0, config):
        finish(executors)
    once(executors)


def test_silent_broker_and_broken_model_folder_are_reported_in_one_sentence(tmp_path: Path, model: str) -> None:
    settings = BusSettings("127.0.0.1:9")
    with pytest.raises(BrokerUnreachable, match=r"127\.0\.0\.1:9"):
        run_environment_worker(settings, EnvironmentConfig(model_folder=Path(model)), "w0", threading.Event())
    with pytest.raises(UsageError, match=r"turn_format\.json"):
        run_environment_worker(settings, EnvironmentConfig(model_folder=tmp_path), "w0", threading.Event())
    config = EnvironmentConfig(model_folder=Path(model), environments=("nowhere:Nothing",))
    with pytest.raises(UsageError, match="nowhere"):
        run_environment_worker(settings, config, "w0", threading.Event())
