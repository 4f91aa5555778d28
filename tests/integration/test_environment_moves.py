"""Environment workers that join, leave, freeze and die with full windows on a real broker: each trajectory ends
once."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from rose.schemas.progress import GroupState
from rose.schemas.prompts import Sampling
from rose.schemas.samples import Sample
from rose.schemas.wire import encode
from rose.topics.admin import connect
from rose.topics.catalog import COMPLETED, ENVIRONMENT_GROUP, PROMPTS, REQUESTED, Retention, Topic, home_partition
from rose.topics.dead_letters import read_dead_letters
from rose.topics.reader import Reader
from rose.topics.records import Place
from rose.topics.settings import BusSettings
from rose.workers.environments.log_cleaner import LogCleaner
from rose.workers.environments.membership import RecoveryAbandoned
from rose.workers.environments.recovery import RecoveredHomes, recover_homes
from rose.workers.environments.trajectory import TrajectoryRules
from tests.support.brokers import EMBEDDED, KAFKA, any_broker, kafka_first
from tests.support.environment_worker_fixtures import (
    GROUPS,
    PARTITIONS,
    SIZE,
    dead_letters,
    finish,
    groups,
    homes_of_members,
    once,
    produce,
    prompt_of,
    settle_all,
    submit_all,
)
from tests.support.roles import freeze, kill, thaw
from tests.support.scripted_executors import ScriptedExecutors, worker_process
from tests.support.waiting import until

WINDOW = 2


def are_shared(settings: BusSettings, workers: int) -> bool:
    """Whether `count` workers own at least one home each, and all homes together."""
    homes = homes_of_members(settings)
    return len(homes) == workers and all(homes) and set().union(*homes) == set(range(PARTITIONS.home))


@kafka_first
@pytest.mark.slow
def test_workers_that_join_with_full_windows_keep_reading(
    executors: ScriptedExecutors, undisturbed: dict[str, Sample], model: str
) -> None:
    executors.settles = False
    submit_all(executors)
    config = {"model_folder": model, "window_groups": WINDOW}
    with ExitStack() as running:
        for workers in (1, 2, 3):
            running.enter_context(worker_process(executors.settings, workers, config))
            executors.pump_until(lambda: are_shared(executors.settings, workers), what=f"{workers} members")  # noqa: B023
            finish(executors, WINDOW * SIZE)  # the windows are full, so no other group opens
        settle_all(executors)
        finish(executors)
    assert once(executors) == undisturbed


@pytest.mark.slow
def test_worker_that_leaves_with_a_full_window_hands_its_homes_over(
    executors: ScriptedExecutors, undisturbed: dict[str, Sample], model: str, broker_kind: str
) -> None:
    if broker_kind == EMBEDDED:
        pytest.skip("there a member that has left is waited for by its name: tests/conformance/test_groups.py")
    executors.settles = False
    submit_all(executors)
    config = {"model_folder": model, "window_groups": WINDOW}
    with worker_process(executors.settings, 1, config):
        with worker_process(executors.settings, 2, config):
            executors.pump_until(lambda: are_shared(executors.settings, 2), what="two members")
            finish(executors, WINDOW * SIZE)
        executors.pump_until(lambda: are_shared(executors.settings, 1), what="the leaver's homes at the other")
        settle_all(executors)
        finish(executors)
    assert once(executors) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True], ids=["freezes", "dies"])
def test_frozen_or_killed_worker_with_a_full_window_is_replaced_and_returns(
    executors: ScriptedExecutors, undisturbed: dict[str, Sample], model: str, broker_kind: str, dies: bool
) -> None:
    """The frozen worker continues as a new member: its open work is refused, and the worker does not end."""
    if broker_kind == EMBEDDED:
        pytest.skip("never evicts a member: tests/conformance/test_groups.py")
    settings = executors.settings
    submit_all(executors)
    config = {"model_folder": model, "window_groups": WINDOW}
    with worker_process(settings, 1, config), ExitStack() as running:
        other = running.enter_context(worker_process(settings, 2, config))
        executors.pump_until(lambda: are_shared(settings, 2) and executors.requested >= 40, what="two members at work")
        executors.settles = False
        if dies:
            kill(other)
        else:
            freeze(other)
        executors.pump_until(lambda: are_shared(settings, 1), what="the homes at the one that lives")
        settle_all(executors)
        if dies:
            running.enter_context(worker_process(settings, 2, config))
        else:
            thaw(other)
        executors.pump_until(lambda: are_shared(settings, 2), what="its return")
        finish(executors)
        assert dies or other.poll() is None
    assert once(executors) == undisturbed


@any_broker
def test_worker_beside_a_foreign_group_member_waits_and_continues_without_it(
    executors: ScriptedExecutors, undisturbed: dict[str, Sample], model: str, tmp_path: Path
) -> None:
    settings, log = executors.settings, tmp_path / "worker.log"
    with worker_process(settings, 0, {"model_folder": model}, log=log) as worker:
        executors.pump_until(lambda: are_shared(settings, 1), what="a member")
        foreign_consumer = Consumer(settings.consumer("my-etl", ENVIRONMENT_GROUP))
        foreign_consumer.subscribe([settings.topic(PROMPTS)])

        def is_told() -> bool:
            foreign_consumer.poll(0.0)
            return "foreign_group_member" in log.read_text()

        executors.pump_until(is_told, what="the worker's warning")
        assert "my-etl" in log.read_text()
        submit_all(executors)
        foreign_consumer.close()
        finish(executors)
        assert worker.poll() is None
    assert once(executors) == undisturbed


@kafka_first
@pytest.mark.slow
def test_prompt_of_another_home_is_forwarded_and_duplicates_open_nothing(
    executors: ScriptedExecutors, undisturbed: dict[str, Sample], model: str
) -> None:
    """The prompts have no key or the key of another partitioner, and are sent twice, as honest producers may do."""
    settings, config = executors.settings, {"model_folder": model}
    wires = {prompt_of(number).group_id: encode(prompt_of(number)) for number in range(GROUPS)}
    with worker_process(settings, 0, config):
        for number, (name, wire) in enumerate(wires.items()):
            astray = (home_partition(name, PARTITIONS.home) + 1 + number % 3) % PARTITIONS.home
            produce(settings, wire, partition=astray, key=None if number % 2 else name.encode())
        finish(executors)
        for name, wire in wires.items():
            produce(settings, wire, partition=home_partition(name, PARTITIONS.home), key=b"a key of its own")
        executors.pump_until(lambda: len(dead_letters(settings)) == GROUPS, what="dead letters of the second prompts")
    assert all("submitted before" in dead_letter.reason for dead_letter in dead_letters(settings))
    assert {dead_letter.raw.key for dead_letter in dead_letters(settings)} == {b"a key of its own"}
    assert once(executors) == undisturbed


POISON = {
    "a number over 64 bits": (
        b'{"group_id":"%s","group_size":1,"environment":"calculator","seed":1,',
        b'"arguments":{"n":%d}}' % 2**70,
    ),
    "880 KB of numbers": (
        b'{"group_id":"%s","group_size":1,"environment":"calculator","seed":1,',
        b'"arguments":{"n":[' + b",".join([b"0.1"] * 220_000) + b"]}}",
    ),
    "no prompt": (b"not %s", b" at all"),
    "nothing": (b"", b""),
    "a seed over 2**63": (b'{"group_id":"%s","group_size":1,"environment":"calculator","seed":', b"%d}" % 2**63),
    "a long id": (b'{"group_id":"%s', b'%s","group_size":1,"environment":"calculator","seed":1}' % (b"x" * 120)),
    "half a character": (b'{"group_id":"%s","group_size":1,"environment":"calculator","seed":1,', b'"note":"\\ud800"}'),
    "as large as can be": (b"%s", b"x" * 985_000),
}


@kafka_first
@pytest.mark.slow
def test_undecodable_message_is_dead_lettered_once_over_worker_restarts(
    executors: ScriptedExecutors, model: str, broker_kind: str
) -> None:
    """One worker is restarted, and another starts after the offsets of the group have expired."""
    settings = executors.settings
    values = [begin % b"poison" if b"%s" in begin else begin for begin, _ in POISON.values()]
    values = [begin + end for begin, (_, end) in zip(values, POISON.values(), strict=True)]
    produce(settings, *values, partition=home_partition("poison", PARTITIONS.home))
    produce(settings, b"no result", topic=COMPLETED)
    for number in range(2):
        executors.submit(prompt_of(number))
    for start in range(3):
        with worker_process(settings, 0, {"model_folder": model, "window_groups": 1}):
            executors.submit(prompt_of(2 + start))
            finish(executors, (3 + start) * SIZE)
            executors.pump_until(lambda: len(dead_letters(settings)) >= len(POISON), what="dead letters")
        if start == 1 and broker_kind != EMBEDDED:  # the embedded broker never evicts a member
            client: AdminClient = connect(settings)
            for deleted in client.delete_consumer_groups([settings.name(ENVIRONMENT_GROUP)]).values():
                deleted.result()
    assert [dead_letter.raw.value for dead_letter in dead_letters(settings)] == values
    assert [dead_letter.raw.value for dead_letter in read_dead_letters(settings, COMPLETED)] == [b"no result"]
    once(executors)
    states = {name: group.state for name, group in groups(settings).items()}
    assert {name for name, state in states.items() if state is GroupState.REFUSED} <= {"poison"}


BLOCKS = '''
import time
from rose.workers.environments.calculator import Calculator

class Blocks(Calculator):
    """The calculator, except that a seed can make it hold its thread for good."""

    async def reset(self, seed, arguments):
        self.seed = seed
        if seed == 1:
            time.sleep(3600)
        return await super().reset(seed, arguments)

    async def step(self, action):
        if self.seed == 2:
            while True:
                pass
        return await super().step(action)

    async def snapshot(self):
        return b"%d/" % self.seed + await super().snapshot()

    async def restore(self, state):
        seed, _, state = state.partition(b"/")
        self.seed = int(seed)
        await super().restore(state)
'''


@any_broker
@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_thread_blocking_environment_fails_only_its_trajectories(
    executors: ScriptedExecutors, undisturbed: dict[str, Sample], model: str, tmp_path: Path, isolation: str
) -> None:
    (tmp_path / "blocks.py").write_text(BLOCKS)
    for number in range(4):
        size = 1 if number in (1, 2) else SIZE
        executors.submit(prompt_of(number, environment="blocks:Blocks", group_size=size))
    config = {
        "model_folder": model,
        "step_timeout_seconds": 1.0,
        "import_paths": [str(tmp_path)],
        "environments": ["blocks:Blocks"],
        "isolation": isolation,
    }
    with worker_process(executors.settings, 0, config):
        finish(executors, 2 * SIZE + 2)
    samples = once(executors)
    for name in ("g1:0", "g2:0"):
        assert samples[name].reward is None and "blocks its thread for longer than 1 s" in samples[name].failure
    for name in [f"g{number}:{index}" for number in (0, 3) for index in range(SIZE)]:
        assert samples[name].tokens == undisturbed[name].tokens and samples[name].reward == undisturbed[name].reward


@kafka_first
@pytest.mark.slow
def test_recovery_reads_live_records_and_none_of_them_is_deleted(executors: ScriptedExecutors, model: str) -> None:
    """All groups except one have ended; the trajectories of the last group wait for a turn."""
    settings = executors.settings
    submit_all(executors)
    with worker_process(settings, 0, {"model_folder": model}):
        finish(executors)
        executors.answers = lambda request: request.turn < 1
        last = prompt_of(99)
        executors.submit(last)
        names = {f"{last.group_id}:{index}" for index in range(SIZE)}
        executors.pump_until(
            lambda: {name for name, turn in executors.requests if turn == 1} >= names, what="the second turns"
        )
        executors.pump_until(
            lambda: sum(group.state is GroupState.SETTLED for group in groups(settings).values()) == GROUPS,
            what="settled groups",
        )
    home = home_partition(last.group_id, PARTITIONS.home)
    before = recovered(settings, home)
    (trajectories,) = [held.trajectories for held in before.homes.values()]
    assert set(trajectories) >= names and before.broken == []
    assert before.fetched <= 3 * SIZE < end(settings, REQUESTED, home), "the turns of what is live, not the log"
    with pytest.raises(RecoveryAbandoned):
        recovered(settings, home, on_wait=abandon)
    held = before.homes[home]
    requests, results = held.needed(before.request_ends[home])
    sweeper = LogCleaner(replace(settings, retention=Retention(prompts=-3600.0, turns=-3600.0)), "test")
    needed = {(REQUESTED, home): requests, (COMPLETED, home): results, (PROMPTS, home): before.begins[PROMPTS, home]}
    sweeper.sweep(needed)
    sweeper.join()
    assert end(settings, REQUESTED, home, first=True) == requests > 0
    after = recovered(settings, home)
    assert after.homes[home].trajectories == trajectories and after.broken == []
    executors.answers = lambda _request: True
    executors.answer([executors.requests[name, 1] for name in sorted(names)])
    with worker_process(settings, 0, {"model_folder": model}):
        finish(executors, (GROUPS + 1) * SIZE)
    assert all(sample.failure == "" for sample in once(executors).values())


@kafka_first
@pytest.mark.slow
def test_trajectories_with_deleted_unread_results_fail_with_the_reason(
    executors: ScriptedExecutors, model: str
) -> None:
    settings, prompt = executors.settings, prompt_of(0)
    executors.answers = lambda request: request.turn < 1
    executors.submit(prompt)
    home = home_partition(prompt.group_id, PARTITIONS.home)
    names = {f"{prompt.group_id}:{index}" for index in range(SIZE)}
    with worker_process(settings, 0, {"model_folder": model}):
        executors.pump_until(
            lambda: {name for name, turn in executors.requests if turn == 1} >= names, what="the second turns"
        )
    read = end(settings, COMPLETED, home)
    executors.answer([executors.requests[name, 1] for name in sorted(names)])
    executors.pump_until(lambda: end(settings, COMPLETED, home) > read, what="the unread results")
    place = TopicPartition(settings.topic(COMPLETED), home, end(settings, COMPLETED, home))
    client = connect(settings)
    client.delete_records([place])[place].result()
    found = recovered(settings, home)
    assert {lost.trajectory_id for _, lost in found.broken} == names
    assert found.begins[COMPLETED, home] == end(settings, COMPLETED, home, first=True)
    with worker_process(settings, 0, {"model_folder": model}):
        finish(executors, SIZE)
    assert all("deleted results that no worker had read" in each.failure for each in once(executors).values())


@any_broker
def test_input_with_a_committed_offset_beyond_its_end_is_read_from_its_beginning(
    executors: ScriptedExecutors,
) -> None:
    settings, prompt = executors.settings, prompt_of(0)
    executors.submit(prompt)
    home = home_partition(prompt.group_id, PARTITIONS.home)
    found = recovered(settings, home, committed=lambda places: dict.fromkeys(places, 99))
    assert found.begins == {(PROMPTS, home): 0, (COMPLETED, home): 0}


@pytest.mark.parametrize("broker_kind", [KAFKA], indirect=True)
@pytest.mark.slow
def test_offsets_moved_to_the_end_by_another_program_lose_no_prompt_and_no_result(
    executors: ScriptedExecutors, model: str
) -> None:
    settings, first = executors.settings, prompt_of(0)
    home = home_partition(first.group_id, PARTITIONS.home)
    number = next(each for each in range(1, 99) if home_partition(f"g{each}", PARTITIONS.home) == home)
    executors.answers = lambda request: request.turn < 1
    executors.submit(first)
    with worker_process(settings, 0, {"model_folder": model}):
        executors.pump_until(lambda: sum(turn == 1 for _, turn in executors.requests) >= SIZE, what="the second turns")
    before = end(settings, COMPLETED, home)
    executors.answers = lambda _request: True
    executors.answer([request for (_, turn), request in executors.requests.items() if turn == 1])
    executors.submit(prompt_of(number))
    executors.pump_until(lambda: end(settings, COMPLETED, home) >= before + SIZE, what="the unread results")
    until(lambda: moved_to_the_end(settings, home))
    with worker_process(settings, 0, {"model_folder": model}):
        finish(executors, 2 * SIZE)
    assert all(sample.failure == "" for sample in once(executors).values())


def moved_to_the_end(settings: BusSettings, home: int) -> bool:
    """Commit the ends of the home's inputs as `kafka-consumer-groups.sh` does; False while the group has a member."""
    places = [TopicPartition(settings.topic(topic), home, end(settings, topic, home)) for topic in (PROMPTS, COMPLETED)]
    client = Consumer(settings.consumer("another-program", ENVIRONMENT_GROUP))
    try:
        client.commit(offsets=places, asynchronous=False)
    except KafkaException:
        return False
    finally:
        client.close()
    return True


def end(settings: BusSettings, topic: Topic, home: int, *, first: bool = False) -> int:
    """Return the end or the beginning of a partition."""
    reader = Reader(settings, "test", group="test")
    low, high = reader.watermarks((topic, home))
    reader.close()
    return low if first else high


def abandon() -> None:
    raise RecoveryAbandoned


def recovered(
    settings: BusSettings,
    home: int,
    on_wait: Callable[[], None] = lambda: None,
    committed: Callable[[Sequence[Place]], dict[Place, int | None]] | None = None,
) -> RecoveredHomes:
    """Return the recovered state of a worker that takes this home over."""
    reader = Reader(settings, "test", group=ENVIRONMENT_GROUP)
    rules = TrajectoryRules(model_id="policy", sampling=Sampling(), turn_patience_seconds=60.0, max_context_tokens=1024)
    try:
        return recover_homes(
            settings,
            reader,
            [home],
            homes=PARTITIONS.home,
            rules=rules,
            offsets=committed or reader.committed,
            on_wait=on_wait,
        )
    finally:
        reader.close()


@pytest.mark.slow
def test_each_trajectory_ends_once_over_faults_of_workers_with_runner_processes(
    executors: ScriptedExecutors, undisturbed: dict[str, Sample], model: str, broker_kind: str
) -> None:
    if broker_kind == EMBEDDED:
        pytest.skip("never evicts a member: tests/conformance/test_groups.py")
    config = {"model_folder": model, "window_groups": WINDOW, "isolation": "process"}
    settings = executors.settings
    with ExitStack() as running:
        frozen, killed, _ = [running.enter_context(worker_process(settings, number, config)) for number in range(3)]
        executors.pump_until(lambda: are_shared(settings, 3), what="three members")
        submit_all(executors)
        executors.pump_until(lambda: executors.requested >= 40, what="40 requests")
        freeze(frozen)
        kill(killed)
        running.enter_context(worker_process(settings, 3, config))
        finish(executors)
        thaw(frozen)
        executors.pump_until(lambda: are_shared(settings, 3), what="three members again")
        assert frozen.poll() is None
    assert once(executors) == undisturbed
