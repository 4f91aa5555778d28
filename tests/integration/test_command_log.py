"""Output of commands that read a log, for a handwritten log on a real broker."""

from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from confluent_kafka import Producer

from rose.pipeline.audit import audit_log, inspect_log
from rose.pipeline.cli.dead_letters import DeadLetterRefused, list_dead_letters, retry_dead_letter, show_dead_letter
from rose.pipeline.cli.replay_trajectory import print_replay, print_why
from rose.pipeline.config.options import Common
from rose.pipeline.replay.records import UnknownTrajectory, find_group
from rose.schemas.errors import UsageError
from rose.schemas.progress import GroupState
from rose.schemas.prompts import Prompt
from rose.schemas.samples import Outcome, Sample
from rose.schemas.wire import SCHEMA_HEADER
from rose.topics.admin import connect
from rose.topics.catalog import COMPLETED, DISPATCHED, PROMPTS, REQUESTED, SAMPLES
from rose.topics.dead_letters import OFFSET, PARTITION, dead_lettered_places, read_dead_letters
from rose.topics.log_reader import read_whole_topics
from rose.topics.reader import Reader
from rose.topics.records import Envelope, InvalidMessage, RawMessage
from rose.topics.settings import BusSettings
from tests.support.brokers import AnyBroker
from tests.support.bus_fixtures import read_until
from tests.support.log_fixtures import PARTITIONS, Log

pytestmark = pytest.mark.slow


@pytest.fixture
def log(broker: AnyBroker, namespace: str) -> Log:
    return Log(broker.settings(namespace))


def common(settings: BusSettings, **more: object) -> Common:
    properties = [f"{name}={value}" for name, value in settings.properties.items()]
    return Common(
        bootstrap_server=settings.bootstrap,
        namespace=settings.namespace,
        properties=properties,
        settings=[f"broker.embedded={str(settings.embedded).lower()}"],
        **more,  # type: ignore[arg-type]
    )


def elsewhere(log: Log, group_id: str) -> int:
    return (log.home(group_id) + 1) % PARTITIONS.home


def dead_letter(log: Log, group_id: str, partition: int, offset: int, reason: str = "no such environment") -> None:
    """Dead-letter the prompt at this offset, as an environment worker does."""
    [found] = [
        each
        for each in read_whole_topics(log.settings, [PROMPTS])
        if (each.partition, each.offset) == (partition, offset)
    ]
    log.writer.dead_letter(found, reason)
    log.writer.flush()


def produce(settings: BusSettings, value: bytes, *, key: bytes | None = None, partition: int = 0) -> int:
    """Produce messages as any program may, without validation."""
    offsets: list[int] = []
    producer = Producer({"bootstrap.servers": settings.bootstrap, "linger.ms": 0})
    producer.produce(
        settings.topic(PROMPTS),
        value=value,
        key=key,
        partition=partition,
        on_delivery=lambda _, message: offsets.append(message.offset()),
    )
    assert producer.flush(30) == 0
    return offsets[0]


def test_audit_counts_by_groups_without_reading_prompts_or_turns(log: Log) -> None:
    log.group("a")
    log.progress("a:0", turn=1)
    log.sample("a:1")
    log.group("b", GroupState.SETTLED)
    for name, outcome in (("b:0", Outcome.TRAINED), ("b:1", Outcome.STALE)):
        log.sample(name)
        log.outcome(name, outcome)
    log.prompt("c")
    log.prompt("d", partition=elsewhere(log, "d"), key="anything")
    turns = [log.settings.topic(topic) for topic in (REQUESTED, COMPLETED, DISPATCHED)]
    admin = connect(log.settings)
    for deleted in admin.delete_topics(turns).values():
        deleted.result()
    found = inspect_log(log.settings)
    audit = found.audit
    assert audit.clean
    assert (audit.requested, audit.trained, audit.stale) == (8, 1, 1)
    where = audit.in_flight
    assert (where.not_opened, where.in_a_turn, where.waiting_for_trainer) == (4, 1, 1)
    assert found.since is not None
    log.progress("a:0", ended=True)
    assert audit_log(log.settings).lost == ("a:0",)


def test_forwarded_prompt_counts_once_and_not_at_all_if_its_copy_was_refused(log: Log) -> None:
    log.prompt("g", partition=elsewhere(log, "g"))
    assert audit_log(log.settings).requested == 2
    at_home = log.prompt("g", key="g")
    assert audit_log(log.settings).requested == 2
    dead_letter(log, "g", log.home("g"), at_home)
    assert audit_log(log.settings).requested == 0
    log.group("g", GroupState.REFUSED, offset=at_home)
    assert audit_log(log.settings).requested == 0


def test_dead_lettered_sample_does_not_violate_the_law(log: Log) -> None:
    log.group("g")
    log.sample("g:0")
    log.progress("g:1")
    log.sample("g:7")
    accused = audit_log(log.settings)
    assert (accused.clean, accused.unasked) == (False, ("g:7",))
    [unrequested] = [each for each in read_whole_topics(log.settings, [SAMPLES]) if named(each) == "g:7"]
    log.writer.dead_letter(unrequested, "g:7 is no trajectory of group g")
    half = msgspec.msgpack.encode({"trajectory_id": "g:0"})
    log.writer.forward(SAMPLES, RawMessage(b"g", half), partition=0, key=b"g")
    log.writer.flush()
    assert audit_log(log.settings).doubled == ("g:0",)
    [end] = [Reader(log.settings, "test", group="test").watermarks((SAMPLES, 0))[1]]
    log.writer.dead_letter(
        InvalidMessage(SAMPLES, 0, end - 1, RawMessage(b"g", half), "missing fields"), "missing fields"
    )
    log.writer.flush()
    found = inspect_log(log.settings)
    assert found.audit.clean
    assert found.dead_letters == {SAMPLES: 2}


def named(envelope: Envelope) -> str:
    return envelope.record.trajectory_id if isinstance(envelope.record, Sample) else ""


def test_foreign_dead_letter_is_listed_with_any_headers(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{log.settings.namespace}{PROMPTS.dead_letters}"
    producer = Producer({"bootstrap.servers": log.settings.bootstrap, "linger.ms": 0})
    producer.produce(name, value=b"{}", key=b"anything", headers=[(PARTITION, b"9" * 5_000), (OFFSET, b"-7")])
    assert producer.flush(30) == 0
    list_dead_letters(common(log.settings), None)
    listed = capsys.readouterr().out
    assert listed.startswith(f"{PROMPTS.name}/-1/-1  20")
    assert inspect_log(log.settings).dead_letters == {PROMPTS: 1}
    with pytest.raises(UsageError, match="does not say where its message lay"):
        retry_dead_letter(common(log.settings), f"{PROMPTS.name}/-1/-1", None, None)


def test_dead_letter_is_found_in_a_namespace_that_is_a_topic_prefix(
    broker: AnyBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Log(broker.settings("rose"))
    found = InvalidMessage(PROMPTS, 0, 5, RawMessage(b"key", b"no prompt"), "no prompt")
    log.writer.dead_letter(found, found.reason)
    log.writer.flush()
    for place in (f"{PROMPTS.name}/0/5", f"rose{PROMPTS.name}/0/5"):
        show_dead_letter(common(log.settings), place)
        assert f"place    {PROMPTS.name}/0/5" in capsys.readouterr().out


def test_prompt_with_a_too_long_id_is_dead_lettered_and_not_pending(log: Log) -> None:
    line = {"group_id": "x" * 127, "group_size": 2, "environment": "calculator", "seed": 1}
    offset = produce(log.settings, msgspec.json.encode(line))
    assert audit_log(log.settings).requested == 0
    spoiled: list[InvalidMessage] = []
    with_ends = Reader(log.settings, "test", group="test")
    with_ends.assign({(PROMPTS, 0): offset})
    while not spoiled:
        spoiled += [item for item in with_ends.read(10, 1.0) if isinstance(item, InvalidMessage)]
    with_ends.close()
    log.writer.dead_letter(spoiled[0], spoiled[0].reason)
    log.writer.flush()
    found = inspect_log(log.settings)
    assert (found.audit.requested, found.dead_letters) == (0, {PROMPTS: 1})


def test_trajectory_is_replayed_from_its_home_only(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log.prompt("g")
    log.group("g")
    log.progress("g:0", turn=1)
    first = log.request("g:0")
    log.dispatch(first)
    log.result(first)
    log.request("g:0", turn=1, at=200.0)
    log.request("g:1", at=300.0)
    print_replay(common(log.settings), "g:0", stepwise=False)
    output = capsys.readouterr().out
    for words in (
        "looked     at the log from",
        "turn 0",
        "turn 1",
        "completed  by executor-0",
        "the trajectory goes on",
    ):
        assert words in output
    assert "00:05:00" not in output, "the other trajectory's request"
    for unknown in ("g:2", "h:0", "g", "g:x"):
        with pytest.raises(UnknownTrajectory, match=f"no trajectory {unknown}"):
            print_replay(common(log.settings), unknown, stepwise=False)


def test_why_shows_a_trajectory_from_prompt_to_end(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    def why(name: str = "g:0") -> str:
        print_why(common(log.settings), name)
        return capsys.readouterr().out

    for name in ("g:0", "g:00", "g:٣", f"g:{'9' * 5_000}", "g\udce9:0", "g\udce9"):
        with pytest.raises(UnknownTrajectory):
            why(name)
    away = log.prompt("g", partition=elsewhere(log, "g"))
    assert f"its prompt lies at {PROMPTS.name}/{elsewhere(log, 'g')}/{away}" in why()
    home = log.prompt("g", key="g")
    assert f"its prompt waits at {PROMPTS.name}/{log.home('g')}/{home}, as the next of its home" in why()
    log.group("g")
    log.progress("g:0")
    log.progress("g:1")
    request = log.request("g:0")
    assert "g:0: turn 0 waits in the router since 00:01:40 UTC" in why()
    for name in ("g:00", "g:2", "g:٣", f"g:{'9' * 5_000}"):  # not lost, because no prompt requested them
        with pytest.raises(UnknownTrajectory):
            why(name)
    log.dispatch(request)
    assert "turn 0 is with executor-0 since" in why()
    log.result(request)
    assert "waits for its environment worker to apply it" in why()
    log.progress("g:0", ended=True)
    log.sample("g:0")
    assert "waits for its group: 1 of 2 are under way (g:1)" in why()
    assert "group g is open: 0 of its 2 trajectories are settled, 1 under way (g:1), 1 wait for the others" in why("g")
    log.progress("g:1", ended=True)
    log.sample("g:1")
    assert "waits for the trainer: its group is complete" in why()
    log.outcome("g:0")
    assert "g:0: ended as trained at step 1" in why()


def test_why_shows_a_group_and_a_trajectory_of_one_name(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("g", "g:1"):
        log.prompt(name, key=name)
        log.group(name)
    print_why(common(log.settings), "g:1")
    of_group, of_trajectory = capsys.readouterr().out.splitlines()
    assert of_group.startswith("group g:1 is open") and of_trajectory.startswith("g:1: ")


@pytest.mark.parametrize("spelt", [rb"math\/1", rb"math\u002f1"])
def test_why_finds_a_json_prompt_with_an_escaped_id(log: Log, capsys: pytest.CaptureFixture[str], spelt: bytes) -> None:
    line = b'{"group_id": "%s", "group_size": 2, "environment": "calculator"}' % spelt
    offset = produce(log.settings, line, key=b"math/1", partition=log.home("math/1"))
    produce(log.settings, rb'{"group_id": "math\/2", "group_size": 2}', key=b"math/2", partition=log.home("math/2"))
    print_why(common(log.settings), "math/1:0")
    assert f"its prompt waits at {PROMPTS.name}/{log.home('math/1')}/{offset}" in capsys.readouterr().out


def test_why_shows_a_reason_of_several_lines_on_one_line(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    log.group("g")
    log.outcome("g:0", Outcome.INFRA_FAILED, reason="ValueError: one\ntwo")
    print_why(common(log.settings), "g:0")
    assert capsys.readouterr().out == "g:0: ended as infra failed at step 1 because ValueError: one\\ntwo\n"


def test_why_reports_a_refused_prompt(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    offset = log.prompt("g")
    dead_letter(log, "g", log.home("g"), offset)
    log.group("g", GroupState.REFUSED, offset=offset)
    print_why(common(log.settings), "g:1")
    assert "was refused: no such environment" in capsys.readouterr().out


def test_why_reports_no_dead_letter_of_another_group(log: Log) -> None:
    dead_letter(log, "math.10", log.home("math.10"), log.prompt("math.10"))
    offset = produce(log.settings, b"math.1", key=b"math.1", partition=log.home("math.1"))
    found = InvalidMessage(PROMPTS, log.home("math.1"), offset, RawMessage(b"math.1", b"math.1"), "no object")
    log.writer.dead_letter(found, found.reason)
    log.writer.flush()
    assert [letter.reason for letter in find_group(log.settings, "math.1").dead_letters] == ["no object"]
    assert [letter.reason for letter in find_group(log.settings, "math.10").dead_letters] == ["no such environment"]


@pytest.fixture
def spoiled_place(log: Log) -> str:
    """Dead-letter an invalid prompt; return its location."""
    line = {"group_id": "mended", "group_size": 0, "environment": "calculator", "seed": 1}
    away = elsewhere(log, "mended")
    offset = produce(log.settings, msgspec.json.encode(line), key=b"\x00key", partition=away)
    raw_value = msgspec.json.encode(line)
    found = InvalidMessage(
        PROMPTS, away, offset, RawMessage(b"key", raw_value, (("team", b"blue"),)), "group_size must be >= 1"
    )
    log.writer.dead_letter(found, found.reason)
    log.writer.flush()
    return f"{PROMPTS.name}/{away}/{offset}"


def prompts_of(log: Log, group_id: str) -> list[Envelope]:
    found = read_whole_topics(log.settings, [PROMPTS])
    return [each for each in found if isinstance(each.record, Prompt) and each.record.group_id == group_id]


def test_dead_letter_is_listed_shown_edited_and_resent_once(
    log: Log, spoiled_place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    connect = common(log.settings)
    list_dead_letters(connect, None)
    listed = capsys.readouterr().out
    assert listed.startswith(f"{spoiled_place}  20")
    assert "group_size must be >= 1  key key\n1 dead letters" in listed
    show_dead_letter(connect, spoiled_place)
    shown = capsys.readouterr().out
    for words in ("because  group_size must be >= 1", "key      key", "header   team = blue", '"group_size": 0'):
        assert words in shown
    with pytest.raises(DeadLetterRefused, match=r"would be refused again: .*group_size"):
        retry_dead_letter(connect, spoiled_place, None, None)
    with pytest.raises(UsageError, match=r"the fields are .*group_size"):
        retry_dead_letter(connect, spoiled_place, None, ["size=2"])
    with pytest.raises(DeadLetterRefused, match="the workers of this configuration run"):
        retry_dead_letter(connect, spoiled_place, None, ["group_size=2", "environment=nowhere"])
    with pytest.raises(DeadLetterRefused, match="would be refused again: top_p"):
        retry_dead_letter(connect, spoiled_place, None, ["group_size=2", 'sampling={"top_p": 0.5}'])
    assert prompts_of(log, "mended") == []
    retry_dead_letter(connect, spoiled_place, None, ["group_size=2"])
    [sent] = prompts_of(log, "mended")
    assert isinstance(sent.record, Prompt)
    assert (sent.record.group_size, sent.key, sent.partition) == (2, "key", log.home("mended"))
    assert sent.raw.header("team") == b"blue"
    with pytest.raises(UsageError, match=r"was sent back .*--again"):
        retry_dead_letter(connect, spoiled_place, None, ["group_size=2"])
    assert len(prompts_of(log, "mended")) == 1
    retry_dead_letter(connect, spoiled_place, None, ["group_size=2"], again=True)
    assert len(prompts_of(log, "mended")) == 2
    assert len(list(read_dead_letters(log.settings, PROMPTS))) == len(dead_lettered_places(log.settings, PROMPTS)) == 1
    capsys.readouterr()
    list_dead_letters(connect, PROMPTS.name)
    assert "(sent back 20" in capsys.readouterr().out


def test_resent_prompt_keeps_its_own_headers(log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    own = (("topic", b"math"), ("key", b"k"), ("exception", b"none"), ("offset", b"-1"), ("sent-back", b"no"))
    line = msgspec.json.encode({"group_id": "mended", "group_size": 0, "environment": "calculator", "seed": 1})
    home, connect = log.home("mended"), common(log.settings)
    log.writer.forward(PROMPTS, RawMessage(b"mended", line, own), partition=home, key=b"mended")
    log.writer.flush()
    with closing(Reader(log.settings, "test")) as reader:
        reader.assign({(PROMPTS, home): 0})
        [found] = read_until(reader, 1)
    assert isinstance(found, InvalidMessage)
    log.writer.dead_letter(found, found.reason)
    log.writer.flush()
    [dead_letter] = read_dead_letters(log.settings, PROMPTS)
    assert (dead_letter.raw, dead_letter.sent_back_at) == (RawMessage(b"mended", line, own), None)
    show_dead_letter(connect, dead_letter.place)
    assert "header   topic = math" in capsys.readouterr().out
    retry_dead_letter(connect, dead_letter.place, None, ["group_size=2"])
    [sent] = prompts_of(log, "mended")
    assert [header for header in sent.raw.headers if header[0] != SCHEMA_HEADER] == list(own)
    [dead_letter] = read_dead_letters(log.settings, PROMPTS)
    assert dead_letter.raw.headers == own and dead_letter.sent_back_at is not None


def test_dead_letter_is_edited_by_a_file_and_not_into_an_existing_group(
    log: Log, spoiled_place: str, tmp_path: Path
) -> None:
    good = Prompt(group_id="taken", group_size=2, environment="calculator", seed=1)
    file = tmp_path / "prompt.json"
    file.write_bytes(msgspec.json.encode(good) + b"\n")
    log.group("taken")
    with pytest.raises(DeadLetterRefused, match="its id is taken"):
        retry_dead_letter(common(log.settings), spoiled_place, file, None)
    retry_dead_letter(common(log.settings), spoiled_place, file, ["group_id=free"])
    [sent] = prompts_of(log, "free")
    assert sent.partition == log.home("free")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UsageError):
        retry_dead_letter(common(log.settings), spoiled_place, tmp_path / "broken.json", None, again=True)


def test_missing_offsets_and_topics_are_reported(log: Log) -> None:
    with pytest.raises(UsageError, match="no dead letter lay at"):
        show_dead_letter(common(log.settings), f"{REQUESTED.name}/0/7")
    with pytest.raises(UsageError, match="there is no topic nothing"):
        list_dead_letters(common(log.settings), "nothing")
