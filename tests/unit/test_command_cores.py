"""Pure cores of the command: prompt files, restarts, tasks, and the live view."""

import bz2
import codecs
import gzip
import json
import lzma
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.cli.roles import number_of
from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.pipeline.config.settings import TasksSection
from rose.pipeline.local.demo import training_prompts
from rose.pipeline.local.run import lending_server_roles, roles_of
from rose.pipeline.local.submit import BadPrompts, read_prompts
from rose.pipeline.local.supervisor import QUICK_SECONDS, restart_backoff
from rose.pipeline.monitor.facts import RecentFailures
from rose.pipeline.monitor.run_state import RECENT_OUTCOMES, RunState
from rose.pipeline.routing.liveness import FORGET_SECONDS
from rose.schemas.errors import UsageError
from rose.schemas.heartbeats import ExecutorState, RoleBegun, SlackHeartbeat, Tenant
from rose.schemas.progress import Group, GroupState
from rose.schemas.prompts import Prompt
from rose.schemas.samples import Outcome, Sample, SampleOutcome
from rose.workers.environments.registry import BUILT_IN
from tests.golden.examples import EXAMPLES

OUTCOME = next(record for record in EXAMPLES if isinstance(record, SampleOutcome))


def line(**changes: object) -> bytes:
    return msgspec.json.encode({"group_id": "g1", "group_size": 2, "environment": "calculator", "seed": 1} | changes)


def test_valid_prompt_file_is_read_completely(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"\n".join([line(), b"", line(group_id="g2", arguments={"max_operands": 3})]))
    prompts = read_prompts(file, BUILT_IN)
    assert [prompt.group_id for prompt in prompts] == ["g1", "g2"]
    assert prompts[1].arguments == {"max_operands": 3}


def test_prompt_larger_as_json_than_as_msgpack_is_read(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    fields = {"group_id": "g1", "group_size": 2, "environment": "calculator", "arguments": {"text": "\u8bed" * 160_000}}
    file.write_text(json.dumps(fields))
    assert file.stat().st_size > Prompt.MAX_BYTES
    assert read_prompts(file, BUILT_IN) == [msgspec.convert(fields, Prompt)]


def test_every_invalid_line_is_named_with_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    bad = {
        2: (b"not json", "begin with {"),
        3: (line(group_id="g3", group_size=0), "group_size"),
        4: (line(group_id="g4", groupsize=4), "no field `groupsize`"),
        5: (line(), "is that of line 1"),
        6: (
            line(group_id="g6", environment="calculater"),
            "the configuration here names calculator, frozenlake, sandbox",
        ),
        7: (b'{"group_id": "g7"}', "missing required field"),
        8: (line(group_id="a b"), "group_id"),
        9: (line(group_id="g9", arguments={"text": "x" * 1_000_000}), "over the limit"),
        10: (b"[1]", "begin with {"),
        11: (b"\xff\xfe", "line 11"),
        12: (line(group_id="g12", sampling={"temperature": 0}), "temperature 0"),
        13: (line(group_id="g13", note="?").replace(b"?", b"\\ud83d"), "\\ud83d alone, half of a surrogate pair"),
        14: (line(group_id="g14", note="?").replace(b"?", b"\\ud83d\\ude00 \\udE00."), "\\ude00 alone, half of"),
    }
    file.write_bytes(b"\n".join([line(), *(text for text, _ in bad.values())]))
    with pytest.raises(BadPrompts) as refused:
        read_prompts(file, BUILT_IN)
    first, *named = str(refused.value).splitlines()
    assert "13 of 14 lines" in first
    assert "nothing was sent" in first
    for told_line, (number, (_, reason)) in zip(named, bad.items(), strict=True):
        assert told_line.startswith(f"  line {number}: ")
        assert reason in told_line.lower(), told_line


BOM = codecs.BOM_UTF8


def test_prompt_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    """The mark is at the beginning of a file, or within a file that was joined from several."""
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(BOM + line() + b"\r\n" + BOM + line(group_id="g2") + b"\r\n" + BOM)
    assert [prompt.group_id for prompt in read_prompts(file, BUILT_IN)] == ["g1", "g2"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (gzip.compress(line()), r"is packed by gzip: unpack it first \(gunzip\)"),
        (bz2.compress(line()), "is packed by bzip2"),
        (lzma.compress(line()), "is packed by xz"),
        (b"PK\x03\x04" + bytes(30), "is packed by zip"),
        (b"\x28\xb5\x2f\xfd" + bytes(30), "is packed by zstd"),
        (b"PAR1" + bytes(30), "is a Parquet file: write its prompts as JSON objects, one a line"),
        (b"SQLite format 3\0" + bytes(30), "is an SQLite database: write its prompts"),
        (line().decode().encode("utf-16"), "UTF-16 or UTF-32: save it in UTF-8"),
        (line().decode().encode("utf-16-be"), "UTF-16 or UTF-32: save it in UTF-8"),
        (line().decode().encode("utf-32"), "UTF-16 or UTF-32: save it in UTF-8"),
        (BOM + b"[\n" + line() + b"]", "is a JSON array: write its prompts one a line"),
        (msgspec.json.format(line(), indent=2), r"has prompts of several lines each: .* \(jq -c \.\)"),
        (BOM + b"{\r\n" + line()[1:], r"has prompts of several lines each: .* \(jq -c \.\)"),
    ],
)
def test_prompt_file_of_another_format_is_refused_in_one_sentence(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=rf"{says}.*; nothing was sent") as refused:
        read_prompts(file, BUILT_IN)
    assert "\n" not in str(refused.value)


def test_empty_or_missing_prompt_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="no prompt in it"):
        read_prompts(tmp_path / "empty.jsonl", BUILT_IN)
    with pytest.raises(UsageError, match="cannot read"):
        read_prompts(tmp_path / "missing.jsonl", BUILT_IN)


def test_settled_groups_are_left_out_of_a_prompt_file(tmp_path: Path) -> None:
    file, metrics = tmp_path / "prompts.jsonl", tmp_path / "metrics.jsonl"
    file.write_bytes(b"\n".join(line(group_id=f"g{number}") for number in range(5)))
    unknown = {"reward_mean": None, "success_rate": None, "staleness_mean": None, "staleness_max": None}
    counts = {"step": 1, "version": 1, "groups": 1, "groups_filtered": 0, "outcomes": {}}
    steps = [counts | unknown | {"group_ids": [name]} for name in ("g1", "g3")]
    metrics.write_bytes(b"".join(msgspec.json.encode(step) + b"\n" for step in steps))
    assert [prompt.group_id for prompt in read_prompts(file, BUILT_IN, without=metrics)] == ["g0", "g2", "g4"]
    with metrics.open("ab") as crashed:
        crashed.write(b"\r\n\n")
    assert [prompt.group_id for prompt in read_prompts(file, BUILT_IN, without=metrics)] == ["g0", "g2", "g4"]
    with metrics.open("ab") as crashed:
        crashed.write(b'{"step":3,"vers')
    with pytest.raises(UsageError, match=r"line 5 is no step .*cut short"):
        read_prompts(file, BUILT_IN, without=metrics)
    with pytest.raises(UsageError, match="is no metrics"):
        read_prompts(file, BUILT_IN, without=file)
    with pytest.raises(UsageError, match="cannot read"):
        read_prompts(file, BUILT_IN, without=tmp_path / "missing.jsonl")


def test_each_lending_server_has_its_own_name_and_users() -> None:
    settings = ["run.executors=1", "run.lenders=2", "topics.inbox_slots=1", 'serving.flags=["--seed", "0"]']
    config = load(Common(settings=settings))
    roles = {role.name: role.arguments for role in lending_server_roles(config)}
    assert list(roles) == ["lender-1", "loadgen-1", "lender-2", "loadgen-2"]
    names = [role.arguments[2] for role in roles_of(config) if role.name.startswith("executor-")]
    assert names == ["executor-0"]
    for number in (1, 2):
        lend, flags = roles[f"lender-{number}"], roles[f"lender-{number}"].index("--")
        assert lend[lend.index("--name") + 1] == f"executor-{number}"
        assert lend[flags + 1 : flags + 5] == ("--seed", "0", "--host", "127.0.0.1")
        assert roles[f"loadgen-{number}"][:2] == ("loadgen", f"http://127.0.0.1:{lend[-1]}")
    assert roles["lender-1"][-1] != roles["lender-2"][-1]


def test_executor_number_is_the_suffix_of_a_local_name_and_otherwise_0() -> None:
    names = ("executor-0", "executor-12", "gpu-7", "executor-", "executor-x", "executor-\u0663")
    assert [number_of(name) for name in names] == [0, 12, 0, 0, 0, 0]


@pytest.mark.parametrize("name", ["port", "router", "control", "trainer", "environment", "executor"])
def test_invalid_port_is_refused_in_one_sentence(name: str) -> None:
    for port in (-1, 65536):
        with pytest.raises(UsageError, match=rf"metrics\.{name} \({port}\) must be a port"):
            load(Common(settings=[f"metrics.{name}={port}"]))
    for port in (0, 65535):
        assert getattr(load(Common(settings=[f"metrics.{name}={port}"])).settings.metrics, name) == port


@pytest.mark.parametrize("name", ["router", "a b", "a/b", "x" * 129, "a\n", "\u00e4"])
def test_invalid_executor_name_is_refused_in_one_sentence(name: str) -> None:
    with pytest.raises(UsageError, match=r"executor\.name"):
        _ = load(Common(overrides=(("--name", "executor.name", name),))).settings.executor.worker


def test_unnamed_executor_has_the_host_name() -> None:
    executor = load(Common()).settings.executor
    assert (executor.worker, executor.slot) == (socket.gethostname(), None)


@given(seed=st.integers(0, 5000), groups=st.integers(1, 300))
def test_training_tasks_and_held_out_tasks_are_disjoint(seed: int, groups: int) -> None:
    tasks = TasksSection()
    held_out = range(tasks.held_out_seed, tasks.held_out_seed + tasks.held_out)
    try:
        prompts = training_prompts(tasks, run="r", seed=seed, groups=groups)
    except UsageError:
        return
    assert not any(prompt.task_seed in held_out for prompt in prompts)
    assert len({prompt.group_id for prompt in prompts}) == groups


def test_groups_of_one_trajectory_are_refused_before_a_demo_begins() -> None:
    with pytest.raises(UsageError, match=r"tasks\.group_size is 1, .* set at least 2"):
        training_prompts(TasksSection(group_size=1), run="r", seed=0, groups=4)


@given(st.lists(st.integers(0, 1000), max_size=40))
def test_only_consecutive_quick_crashes_end_a_run(runs: list[int]) -> None:
    restarts, now, row = restart_backoff(), 0.0, 0
    for seconds in runs:
        now = restarts.until + seconds
        row = row + 1 if row and seconds < QUICK_SECONDS else 1
        assert (restarts.failed(now), restarts.failures) == (0.5 * 2 ** (row - 1), row)


def beat(**changes: object) -> SlackHeartbeat:
    found = next(record for record in EXAMPLES if isinstance(record, SlackHeartbeat))
    return msgspec.structs.replace(found, **changes)


def test_view_shows_recent_records() -> None:
    view = RunState(began=0.0)
    for record in EXAMPLES:
        view.on_record(record, 10.0)
    assert (view.settled, view.step, view.version, view.solved, view.turns_each) == (1, 5, 5, 1.0, 1.0)
    assert list(view.curve) == [1.0]
    assert view.turns_per_second(10.0) == 0.1
    assert view.turns_per_second(30.0) == 0.0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 1000.0)), max_size=12))
def test_view_forgets_an_executor_after_a_long_silence_among_live_ones(
    heartbeats: list[tuple[str, float]],
) -> None:
    view = RunState(began=0.0)
    last: dict[str, float] = {}
    now = 0.0
    for worker, later in heartbeats:
        now += later
        view.on_record(beat(worker=worker, ttl_seconds=2.0), now)
        last[worker] = now
        kept = {name for name, at in last.items() if now < at + 2.0 + FORGET_SECONDS}
        assert {each.worker for each in view.present_executors(now + 10_000.0)} == kept, (
            "nobody heard is nobody forgotten"
        )
        last = {name: at for name, at in last.items() if name in kept}


def test_view_counts_failures_among_its_newest_outcomes() -> None:
    view = RunState(began=0.0)
    trained = next(record for record in EXAMPLES if isinstance(record, SampleOutcome))
    failed = msgspec.structs.replace(trained, outcome=Outcome.INFRA_FAILED, reason="no key")
    for record in (
        failed,
        *[trained] * RECENT_OUTCOMES,
        failed,
        msgspec.structs.replace(failed, reason="away"),
        failed,
    ):
        view.on_record(record, 1.0, fresh=False)
    assert view.failures == RecentFailures(failed=3, settled=RECENT_OUTCOMES, reason="no key")


def test_view_keeps_no_samples() -> None:
    """A sample may hold a whole context: a view that is open for weeks keeps only what it shows."""
    view = RunState(began=0.0)
    sample = next(record for record in EXAMPLES if isinstance(record, Sample))
    before = sys.getrefcount(sample)
    view.on_record(sample, 1.0)
    assert view.solved == 1.0
    assert sys.getrefcount(sample) == before


@given(st.floats(-1e6, 1e6))
def test_silence_is_measured_by_local_arrival_of_heartbeats(off: float) -> None:
    view = RunState(began=0.0)
    view.on_record(beat(sent_at=1000.0 + off, ttl_seconds=2.0), 10.0, wall=1000.0)
    [fresh], [old] = view.present_executors(12.0), view.present_executors(12.1)
    assert (fresh.silent, old.silent) == (False, True)
    assert fresh.clock_off_seconds == pytest.approx(off)


def test_records_older_than_the_view_prove_no_liveness() -> None:
    view = RunState(began=5.0)
    view.on_record(beat(), 9.0, fresh=False, wall=9.0)
    view.on_progress("g:0", 9.0, live=True, fresh=False)
    assert view.present_executors(9.0)[0].silent_seconds == 4.0
    assert view.applied_at < view.began
    view.on_record(beat(state=ExecutorState.STOPPING), 9.0)
    assert view.present_executors(10.0)
    assert not view.present_executors(20.0)


def test_stall_of_a_stage_is_measured_between_broker_timestamps() -> None:
    view = RunState(began=50.0)
    opened = Group(group_id="g", group_size=3, state=GroupState.OPEN, offset=0, changed_at=0.0)
    view.on_record(opened, 50.0, fresh=False, stamp=1000.0)
    view.on_progress("g:0", 50.0, live=True, fresh=False, stamp=1100.0)
    assert view.opened_seconds(53.0, None) == 3.0, "no stamp came while looking"
    view.on_record(beat(sent_at=7.0), 54.0, stamp=1200.0)
    assert (view.opened_seconds(55.0, None), view.applied_seconds(55.0), view.settled_seconds(55.0)) == (201, 101, 101)
    assert view.opened_seconds(55.0, 1198.0) == 3.0, "the prompt that waits longest came later"
    view.on_progress("g:0", 56.0, live=True, stamp=1202.0)
    assert view.applied_seconds(57.0) == 1.0


def test_full_window_opens_no_group_before_an_outcome() -> None:
    view = RunState(began=0.0)
    view.on_record(Group(group_id="g", group_size=1, state=GroupState.OPEN, offset=0, changed_at=0.0), 10.0)
    assert view.opened_seconds(400.0, None) == 390.0
    outcome = next(record for record in EXAMPLES if isinstance(record, SampleOutcome))
    view.on_record(msgspec.structs.replace(outcome, group_id="g", trajectory_id="g:0"), 400.0)
    assert (view.open_groups, view.opened_seconds(401.0, None)) == (0, 1.0)


def test_resumed_run_counts_stalls_from_its_first_new_process() -> None:
    view = RunState(began=50.0)
    for stamp in (900.0, 50_000.0, 50_003.0):
        view.on_record(RoleBegun(role="router-0"), 50.0, fresh=False, stamp=stamp)
    view.on_progress("g:0", 50.0, live=True, fresh=False, stamp=1000.0)
    assert view.applied_seconds(53.0) == 3.0, "no stamp came while looking"
    view.on_record(beat(), 54.0, stamp=50_010.0)
    assert view.applied_seconds(55.0) == 11.0
    assert view.opened_seconds(55.0, 980.0) == 5.0
    view.on_record(RoleBegun(role="trainer"), 56.0, stamp=50_012.0)
    assert view.applied_seconds(57.0) == 13.0


def test_executor_room_counts_from_unbroken_readiness() -> None:
    view = RunState(began=0.0)
    could = {"policy_version": 1, "max_turns": 4, "rollout": Tenant(), "ttl_seconds": 20.0}
    view.on_record(beat(state=ExecutorState.STARTING, **could), 10.0)
    assert view.able_seconds(20.0) == 0.0
    for at in (30.0, 40.0):
        view.on_record(beat(state=ExecutorState.READY, **could), at)
    assert view.able_seconds(41.0) == 11.0
    assert view.able_seconds(100.0) == 0.0, "it is silent by then"
    view.on_record(beat(state=ExecutorState.READY, **could | {"rollout": Tenant(running=4)}), 51.0)
    assert view.able_seconds(52.0) == 0.0


def test_recent_starts_are_counted_by_role_and_broker_clock() -> None:
    view = RunState(began=0.0)
    for stamp in (100.0, 950.0, 960.0):
        view.on_record(RoleBegun(role="router-0", times=2, reason="away"), 0.0, fresh=False, stamp=stamp)
    assert view.recent_role_starts(1.0) == [], "how long ago that was nobody knows yet"
    view.on_record(RoleBegun(role="trainer"), 1.0, stamp=1001.0)
    router, trainer = view.recent_role_starts(2.0)
    assert (router.role, router.times, router.reason) == ("router-0", 4, "away")
    assert (trainer.role, trainer.times, trainer.reason) == ("trainer", 1, "")
    assert not view.recent_role_starts(200.0)


@given(
    st.lists(st.tuples(st.sampled_from(["", "node-1/0", "node-1/1", "node-2/0"]), st.integers(1, 5)), min_size=1),
    st.booleans(),
)
def test_starts_are_counted_by_partition_and_the_largest_count_is_shown(
    beginnings: list[tuple[str, int]], fresh: bool
) -> None:
    view = RunState(began=0.0)
    counts: Counter[str] = Counter()
    for place, times in beginnings:
        view.on_record(RoleBegun(role="router-0", times=times, place=place), 1.0, fresh=fresh, stamp=1000.0)
        counts[place] += times
    view.on_record(beat(), 2.0, stamp=1001.0)
    [router] = view.recent_role_starts(3.0)
    assert router.times == max(counts.values())


def test_unobserved_time_counts_in_no_timestamp_duration() -> None:
    view = RunState(began=50.0)
    view.on_progress("g:0", 50.0, live=True, fresh=False, stamp=1100.0)
    view.on_record(RoleBegun(role="trainer", times=4), 50.0, fresh=False, stamp=1000.0)
    view.on_record(beat(), 54.0, stamp=1110.0)
    assert (view.applied_seconds(54.0), view.opened_seconds(54.0, 1105.0)) == (10.0, 4.0)
    view.add_absence(30.0)
    assert (view.applied_seconds(85.0), view.opened_seconds(85.0, 1105.0)) == (11.0, 5.0)
    view.on_record(beat(), 86.0, stamp=1142.0)
    assert (view.applied_seconds(86.0), view.settled_seconds(86.0)) == (12.0, 12.0)
    assert view.opened_seconds(86.0, 1141.0) == 1.0, "what came once somebody looked again is told as ever"
    assert view.recent_role_starts(90.0), "the absence is none of the two minutes"


def test_unobserved_time_is_not_silence() -> None:
    view = RunState(began=0.0)
    view.on_record(beat(ttl_seconds=2.0), 10.0)
    view.on_progress("g:0", 10.0, live=True)
    view.add_absence(30.0)
    [executor] = view.present_executors(41.0)
    assert (executor.silent_seconds, 41.0 - view.applied_at) == (1.0, 1.0)
    [executor] = view.present_executors(42.5)
    assert executor.silent, "what is not heard once somebody looks again is silent"


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["live", "ended", "settled"])), max_size=30))
def test_every_trajectory_of_an_open_group_is_in_a_turn_or_waits_for_the_trainer(
    events: list[tuple[int, str]],
) -> None:
    view = RunState(began=0.0)
    view.on_record(Group(group_id="g", group_size=3, state=GroupState.OPEN, offset=0, changed_at=0.0), 0.0)
    live: set[int] = set()
    settled: set[int] = set()
    for index, event in events:
        name = f"g:{index}"
        if event == "settled":
            settled.add(index)
            view.on_record(msgspec.structs.replace(OUTCOME, group_id="g", trajectory_id=name), 1.0)
        else:
            (live.add if event == "live" else live.discard)(index)
            view.on_progress(name, 1.0, live=event == "live")
    assert view.in_a_turn == len(live - settled)
    assert view.waiting_for_trainer == 3 - len(live | settled)
    assert view.open_groups == (len(settled) < 3)
    view.on_record(Group(group_id="g", group_size=3, state=GroupState.SETTLED, offset=0, changed_at=0.0), 2.0)
    assert (view.open_groups, view.in_a_turn, view.waiting_for_trainer) == (0, 0, 0)


def test_refused_prompt_is_not_expected_until_a_corrected_prompt_opens_its_group() -> None:
    view = RunState(began=0.0)
    for state, refused in ((GroupState.REFUSED, 3), (GroupState.OPEN, 0), (GroupState.SETTLED, 0)):
        view.on_record(Group(group_id="g", group_size=3, state=state, offset=0, changed_at=0.0), 0.0)
        assert view.refused == refused


def test_garbage_collector_of_a_role_ignores_imported_objects() -> None:
    program = (
        "import gc; from rose.pipeline.cli.roles import freeze_imports; freeze_imports();print(len(gc.get_objects()))"
    )
    looked_at = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert int(looked_at) < 100, "tens of thousands were imported"
