"""`rose up` restarted, and started twice at once: known prompts are not sent again, and a folder belongs to one run."""

import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.pipeline.local.run import open_run
from rose.pipeline.local.submit import remaining_work
from rose.pipeline.monitor.screen import Screen
from rose.schemas.errors import UsageError
from rose.schemas.progress import Group, GroupState
from rose.schemas.prompts import Prompt
from rose.topics.admin import create_topics
from rose.topics.catalog import GROUPS, OUTCOMES, PROMPTS, Partitions, Retention, home_partition
from rose.topics.errors import TopicMissing
from rose.topics.log_reader import read_whole_topics
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from tests.support.brokers import AnyBroker, any_broker, flags
from tests.support.rose_command import Rose
from tests.support.waiting import until

HOMES = 2
GROUP_SIZE = 3


def prompt(name: str, **fields: Any) -> Prompt:
    return msgspec.convert(
        {"group_id": name, "group_size": GROUP_SIZE, "environment": "calculator", "seed": 1, **fields}, Prompt
    )


def group_of(submitted: Prompt, state: GroupState, offset: int) -> Group:
    return Group(
        group_id=submitted.group_id,
        group_size=submitted.group_size,
        state=state,
        offset=offset,
        prompt=submitted if state is GroupState.OPEN else None,
        changed_at=1.0,
    )


@pytest.fixture
def settings(broker: AnyBroker, namespace: str) -> BusSettings:
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(HOMES, 2, 1, 1))
    return settings


def submit(settings: BusSettings, *prompts: Prompt) -> None:
    writer = Writer(settings, "test")
    for each in prompts:
        writer.write(PROMPTS, each, key=each.group_id, partition=home_partition(each.group_id, HOMES))
    writer.flush()


def decide(settings: BusSettings, *groups: Group) -> None:
    writer = Writer(settings, "test")
    for each in groups:
        writer.write(GROUPS, each, key=each.group_id, partition=home_partition(each.group_id, HOMES))
    writer.flush()


def names(prompts: list[Prompt]) -> list[str]:
    return [each.group_id for each in prompts]


@any_broker
def test_only_refused_prompts_are_sent_again(settings: BusSettings, tmp_path: Path) -> None:
    waits, settled, refused, new = (prompt(name) for name in ("waits", "settled", "refused", "new"))
    submit(settings, waits, refused)
    places = {each.key: each.offset for each in read_whole_topics(settings, [PROMPTS])}
    decide(
        settings,
        group_of(settled, GroupState.SETTLED, 0),
        group_of(refused, GroupState.REFUSED, places["refused"]),
    )
    work = remaining_work(settings, [waits, settled, refused, new], tmp_path)
    assert names(work.prompts) == ["refused", "new"]
    assert (work.known, work.trajectories) == (2, 4 * GROUP_SIZE)


@any_broker
def test_run_resumed_without_prompts_knows_its_requested_groups(settings: BusSettings, tmp_path: Path) -> None:
    submit(settings, prompt("waits"))
    decide(settings, group_of(prompt("settled"), GroupState.SETTLED, 0))
    assert remaining_work(settings, [], tmp_path).trajectories == 2 * GROUP_SIZE
    assert remaining_work(settings, [], tmp_path, members_ratio=2.0).trajectories == 3 * GROUP_SIZE


@any_broker
@pytest.mark.parametrize("state", [None, GroupState.OPEN, GroupState.SETTLED])
def test_prompt_changed_after_sending_is_refused_in_any_state(
    settings: BusSettings, tmp_path: Path, state: GroupState | None
) -> None:
    """The prompt is also refused after its records are gone. A changed note or order of arguments is no change."""
    same, changed = prompt("same", arguments={"low": 1, "high": 2}), prompt("changed")
    remaining_work(settings, [same, changed], tmp_path)
    if state is None:
        submit(settings, same, changed)
    else:
        decide(settings, group_of(same, state, 0), group_of(changed, state, 1))
    again = [prompt("same", note="told anew", arguments={"high": 2, "low": 1}), prompt("changed", max_turns=2)]
    with pytest.raises(UsageError, match=r"1 of 2 prompts .* under their group_id \(changed\): give .* of its own"):
        remaining_work(settings, again, tmp_path)
    assert remaining_work(settings, again[:1], tmp_path).prompts == []


def test_shown_total_counts_opened_and_omits_refused_trajectories() -> None:
    """Other producers may submit during the run."""

    class Watched:
        class run_state:
            refused, opened, settled = 1, 30, 24

    screens = [Screen(Watched, None, title="", total=total) for total in (22, 100, 0)]  # type: ignore[arg-type]
    assert [screen._total_text() for screen in screens] == [" of 30", " of 99", ""]


def opened(settings: BusSettings) -> set[str]:
    try:
        return {each.key for each in read_whole_topics(settings, [GROUPS])}
    except TopicMissing:  # the run has not created it yet
        return set()


def ended(process: subprocess.Popen[str]) -> str:
    """Stop the process; return its output."""
    process.send_signal(signal.SIGHUP)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    return output


@any_broker
def test_run_on_topics_made_with_other_settings_names_the_differences(
    broker: AnyBroker, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = broker.settings(namespace)
    create_topics(replace(settings, retention=Retention(outcomes=4 * 3600.0)), Partitions())
    config = load(Common(overrides=overrides(settings, tmp_path)))
    with open_run(config):
        printed = capsys.readouterr().out.splitlines()
    assert printed[-3:] == [
        f"not changed: {namespace}{OUTCOMES.name}: retention.ms is 14400000, the catalog says 2592000000",
        f"not changed: {namespace}{OUTCOMES.name}: segment.ms is 1800000, the catalog says 324000000",
        "`rose topics check` says what to do about these topics",
    ]


def overrides(settings: BusSettings, folder: Path) -> tuple[tuple[str, str, object], ...]:
    values = {
        "run.folder": str(folder),
        "broker.bootstrap_server": settings.bootstrap,
        "broker.namespace": settings.namespace,
        "broker.embedded": settings.embedded,
        "broker.properties": dict(settings.properties),
    }
    return tuple(("test", name, value) for name, value in values.items())


@any_broker
@pytest.mark.slow
def test_run_locks_its_folder_and_a_restart_sends_no_prompt_twice(
    broker: AnyBroker, namespace: str, tmp_path: Path
) -> None:
    rose, settings = Rose("embedded", tmp_path), broker.settings(namespace)
    prompts = [prompt(f"g{number}") for number in range(3)]
    (tmp_path / "prompts.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, prompts)))
    common = ("--name", "mine", "--set", "run.executors=0", "--set", "topics.home_partitions=2", *flags(settings))
    up = ("up", "--prompts", "prompts.jsonl", *common)
    lock = tmp_path / "runs" / "mine" / "trainer.lock"
    with rose.start(*up) as first:
        until(lambda: first.poll() is not None or len(opened(settings)) == 3)
        until(lambda: first.poll() is not None or lock.exists())
        assert refused(rose, *up) == (2, "rose: another `rose up` is at work in runs/mine: ")
        trainer = ("trainer", "--set", "run.name=mine", *flags(settings))
        assert refused(rose, *trainer) == (2, "rose: another trainer is at work in runs/mine: ")
        ended(first)
    with rose.start(*up) as again:
        assert again.stdout is not None
        lines = iter(again.stdout.readline, "")
        assert any("3 of 3 prompts are on the log already, and are not sent again" in line for line in lines)
        assert any(" of 9 trajectories settled" in line for line in lines)
        ended(again)
    assert len(list(read_whole_topics(settings, [PROMPTS]))) == 3


@pytest.mark.slow
def test_run_with_closed_output_ends_with_summary_and_report(tmp_path: Path) -> None:
    """Ctrl-C also ends `tee` in `rose up | tee`, at once."""
    rose, run = Rose("embedded", tmp_path), tmp_path / "runs" / "mine"
    with rose.start("up", "--name", "mine", "--set", "run.executors=0") as process:
        until(lambda: process.poll() is not None or (run / "trainer.lock").exists())
        assert process.stdout is not None
        process.stdout.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    assert (run / "summary.json").exists() and (run / "report.html").exists()


def refused(rose: Rose, *arguments: str) -> tuple[int, str]:
    with rose.start(*arguments) as process:
        output = process.communicate(timeout=120)[0]
    return process.returncode, output[: output.index(": ", len("rose: ")) + 2]
