"""Finished trajectories: advantages, the load of serving, the attempts side by side, and exported files."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.samples.advantages import NOT_SETTLED, NOT_TRAINED, Advantage, GroupAdvantages
from rose.pipeline.samples.attempts import view_of
from rose.pipeline.samples.export import COLUMNS, FORMATS, TRL_COLUMNS, export_row, open_writer
from rose.pipeline.samples.log import FinishedGroup, FinishedTrajectory, SampleFilter
from rose.pipeline.samples.screen import group_page
from rose.pipeline.samples.serving_load import ServingLoads, describe_load
from rose.pipeline.samples.store import SampleStore
from rose.schemas.errors import UsageError
from rose.schemas.heartbeats import SlackHeartbeat, Tenant, WorkerClass
from rose.schemas.samples import Outcome, Sample, SampleOutcome
from rose.schemas.turns import TurnTimes
from rose.workers.trainer.algorithms.advantages import group_advantages
from rose.workers.trainer.config import TrainerConfig
from tests.golden.examples import EXAMPLES
from tests.support.sample_fixtures import sample

CONFIG = TrainerConfig(model_folder=Path("model"), run_folder=Path("run"))
HEARTBEAT = next(record for record in EXAMPLES if isinstance(record, SlackHeartbeat))


def outcome(of: Sample, name: Outcome = Outcome.TRAINED, *, step: int = 3) -> SampleOutcome:
    return SampleOutcome(
        trajectory_id=of.trajectory_id,
        group_id=of.group_id,
        outcome=name,
        step=step,
        policy_version=step - 1,
        recorded_at=9.0,
    )


def group(rewards: Sequence[float | None], *, size: int = 0, outcomes: Sequence[Outcome | None] = ()) -> FinishedGroup:
    """Return a group with these rewards; all members trained unless `outcomes` says otherwise."""
    found = []
    for index, reward in enumerate(rewards):
        one = sample(index=index, reward=reward, size=size or len(rewards))
        name = outcomes[index] if outcomes else Outcome.TRAINED
        found.append(FinishedTrajectory(one, None if name is None else outcome(one, name)))
    return FinishedGroup("g", size or len(rewards), tuple(found))


def words(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def test_advantages_of_a_whole_group_are_those_of_the_trainer() -> None:
    rewards = [1.0, 0.0, 0.0]
    found = GroupAdvantages(CONFIG).of(group(rewards))
    assert [found[f"g:{index}"].value for index in range(3)] == group_advantages(rewards, scale_by_deviation=True)


def test_advantages_compare_only_members_that_were_trained_on() -> None:
    ends = [Outcome.TRAINED, Outcome.STALE, Outcome.TRAINED]
    found = GroupAdvantages(CONFIG).of(group([1.0, 1.0, 0.0], outcomes=ends))
    assert found["g:1"] == Advantage(None, NOT_TRAINED)
    assert [found["g:0"].value, found["g:2"].value] == group_advantages([1.0, 0.0], scale_by_deviation=True)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (group([1.0, 0.0], size=4), "unknown: 2 of its 4 samples are not on the log"),
        (group([1.0, 0.0, 0.0], outcomes=[Outcome.TRAINED, Outcome.TRAINED, None]), "unknown: 1 of its 3 outcomes"),
    ],
)
def test_advantage_is_unknown_where_the_log_lacks_a_member(made: FinishedGroup, reason: str) -> None:
    found = GroupAdvantages(CONFIG).of(made)["g:0"]
    assert found.value is None
    assert found.reason.startswith(reason)


def test_advantage_without_outcome_is_not_settled() -> None:
    found = GroupAdvantages(CONFIG).of(group([1.0, 0.0], outcomes=[None, None]))
    assert set(found.values()) == {Advantage(None, NOT_SETTLED)}


def test_advantage_by_an_unknown_algorithm_is_unknown() -> None:
    config = TrainerConfig(model_folder=Path("model"), run_folder=Path("run"), algorithm="no_such_algorithm")
    found = GroupAdvantages(config).of(group([1.0, 0.0]))["g:0"]
    assert found.value is None
    assert "no_such_algorithm" in found.reason


def test_advantage_that_compares_with_the_whole_step_is_unknown() -> None:
    config = dataclasses.replace(CONFIG, algorithm="reinforce_plus_plus")
    found = GroupAdvantages(config).of(group([1.0, 0.0]))["g:0"]
    assert found == Advantage(None, "unknown: reinforce_plus_plus compares with all samples of the step")


def test_load_of_serving_is_that_of_the_executor_while_the_turn_ran() -> None:
    times = TurnTimes(requested_at=90.0, scheduled_at=100.0, finished_at=110.0)
    turn = msgspec.structs.replace(sample().turns[0], worker="lender", times=times)

    def heartbeat(at: float, running: int, waiting: int, cuts: int, worker: str = "lender") -> SlackHeartbeat:
        return msgspec.structs.replace(
            HEARTBEAT,
            worker=worker,
            worker_class=WorkerClass.SERVING,
            sent_at=at,
            serving=Tenant(running=running, waiting=waiting),
            cuts=cuts,
            frozen=False,
            prefill_headroom_seconds=0.2,
        )

    loads = ServingLoads()
    loads.add_turn("g:0", turn)
    loads.add(
        [
            heartbeat(90.0, 50, 50, 1),
            heartbeat(101.0, 2, 0, 3),
            heartbeat(105.0, 90, 90, 3, worker="other"),
            heartbeat(109.0, 1, 4, 5),
            heartbeat(111.0, 60, 60, 9),
        ]
    )
    said = describe_load(loads.of("g:0", turn))
    assert said == ("users: 2 running, 4 waiting at most, prefill headroom 200 ms at least, memory taken back 2 times")
    assert describe_load(loads.of("g:1", turn)) == "no heartbeat of that time on the log"


@given(mask=st.lists(st.integers(0, 1), min_size=1, max_size=30))
def test_view_shows_every_token_once(mask: list[int]) -> None:
    one = sample(tokens=range(len(mask)), mask=mask, size=1)
    found = FinishedGroup("g", 1, (FinishedTrajectory(one, None),))
    view = view_of(found, GroupAdvantages(CONFIG).of(found), ServingLoads(), words)
    [attempt] = view.attempts
    passages = [passage for turn in attempt.turns for passage in (turn.observation, turn.action)]
    texts = [passage.text for passage in (*passages, attempt.rest) if passage.text]
    assert " ".join(texts) == words(range(len(mask)))


def test_page_shows_texts_as_text_and_loads_nothing() -> None:
    found = group([1.0, 0.0])
    view = view_of(found, GroupAdvantages(CONFIG).of(found), ServingLoads(), lambda tokens: "<script>x</script>")
    page = group_page(view)
    assert "&lt;script&gt;x&lt;/script&gt;" in page
    assert "<script" not in page
    assert "http" not in page
    assert "+0.9998" in page


def test_view_without_tokenizer_has_the_numbers_of_tokens() -> None:
    found = group([1.0, 0.0])
    view = view_of(found, GroupAdvantages(CONFIG).of(found), ServingLoads(), None)
    assert "(2 tokens)" in group_page(view)


@pytest.mark.parametrize(
    ("wanted", "accepted"),
    [
        (SampleFilter(), True),
        (SampleFilter(outcomes=frozenset({"trained", "waiting"})), True),
        (SampleFilter(outcomes=frozenset({"stale"})), False),
        (SampleFilter(step=3), True),
        (SampleFilter(step=4), False),
        (SampleFilter(group="h"), False),
        (SampleFilter(since=1.0), False),
        (SampleFilter(until=0.0), True),
    ],
)
def test_filter_accepts_what_it_names(wanted: SampleFilter, accepted: bool) -> None:
    one = sample()
    assert wanted.accepts(FinishedTrajectory(one, outcome(one))) is accepted


def test_store_keeps_the_first_record_of_a_trajectory_and_gives_a_group_once() -> None:
    store, first = SampleStore(), sample(reward=1.0)
    assert store.add_sample(first) == 1
    assert store.add_sample(sample(reward=0.0)) == 1
    assert store.add_sample(sample(index=1)) == 2
    assert store.add_sample(sample("h")) == 1
    store.add_outcome(outcome(first, Outcome.STALE))
    store.add_outcome(outcome(first, Outcome.TRAINED))
    assert store.take_group("g")[0] == first
    assert list(store.groups()) == ["h"]
    assert store.take_group("g") == []
    assert store.outcome_of("g:0") == outcome(first, Outcome.STALE)
    assert store.outcome_of("g:1") is None
    store.close()


def exported(target: Path, format_name: str, found: FinishedGroup) -> None:
    """Write the members of a group with their advantages."""
    advantages, writer = GroupAdvantages(CONFIG).of(found), open_writer(format_name, target)
    for each in found.members:
        row = export_row(format_name, each, advantages[each.sample.trajectory_id], words)
        if row is not None:
            writer.write(row)
    writer.close()


def test_json_lines_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    found = group([1.0, 0.0, None], outcomes=[Outcome.TRAINED, Outcome.TRAINED, None])
    exported(tmp_path / "rows.jsonl", "jsonl", found)
    exported(tmp_path / "rows.parquet", "parquet", found)
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_bytes().splitlines()]
    rows = parquet.read_table(tmp_path / "rows.parquet").to_pylist(maps_as_pydicts="strict")
    assert rows == lines
    assert list(rows[0]) == list(COLUMNS)
    assert [row["outcome"] for row in rows] == ["trained", "trained", "waiting"]
    assert rows[0]["versions"] == [-1, 0, 0]
    assert (rows[0]["turns"][0]["observation"], rows[0]["turns"][0]["action"]) == ("1", "2 3")
    assert rows[2]["reward"] is None


def test_arrays_that_no_trainer_takes_are_shown_and_exported_as_far_as_they_go(tmp_path: Path) -> None:
    cut = msgspec.structs.replace(sample(size=1), tokens=sample().tokens[:-2], logprobs=sample().logprobs[:-1])
    found = FinishedGroup("g", 1, (FinishedTrajectory(cut, outcome(cut, Outcome.INFRA_FAILED)),))
    exported(tmp_path / "rows.jsonl", "jsonl", found)
    [row] = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_bytes().splitlines()]
    assert (row["tokens"], row["logprobs"]) == ([1, 2], [0.0, -0.5])
    view = view_of(found, GroupAdvantages(CONFIG).of(found), ServingLoads(), words)
    assert view.attempts[0].turns[0].action.text == "2"


def test_file_of_trl_is_a_data_set_of_prompts_and_completions(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    exported(tmp_path / "trl.parquet", "trl", group([1.0, 0.0, None]))
    rows = parquet.read_table(tmp_path / "trl.parquet").to_pylist()
    assert list(rows[0]) == list(TRL_COLUMNS)
    assert len(rows) == 2, "a trajectory without a reward is left out"
    row = rows[0]
    assert (row["step"], row["prompt"], row["completion"], row["reward"]) == (3, "1", "2 3", 1.0)
    assert (row["prompt_ids"], row["completion_ids"], row["env_mask"]) == ([1], [2, 3], [1, 1])
    assert row["logprobs"] == [-0.5, -0.5]


def test_folder_of_verl_has_a_file_of_each_step(tmp_path: Path) -> None:
    exported(tmp_path / "verl", "verl", group([1.0, 0.0, 1.0], outcomes=[Outcome.TRAINED, Outcome.STALE, None]))
    [file] = (tmp_path / "verl").iterdir()
    assert file.name == "3.jsonl"
    rows = [json.loads(line) for line in file.read_bytes().splitlines()]
    assert [(row["input"], row["output"], row["gts"], row["score"], row["step"]) for row in rows] == [
        ("1", "2 3", None, 1.0, 3),
        ("1", "2 3", None, 0.0, 3),
    ]


def test_existing_folder_is_not_written_to(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is there already"):
        open_writer("verl", tmp_path)


@pytest.mark.parametrize("format_name", FORMATS)
def test_discarded_export_leaves_no_file(tmp_path: Path, format_name: str) -> None:
    writer = open_writer(format_name, tmp_path / "target")
    found = group([1.0, 0.0]).members[0]
    row = export_row(format_name, found, Advantage(1.0), words)
    assert row is not None
    writer.write(row)
    assert not (tmp_path / "target").exists()
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pip install 'rose-rollouts\[parquet\]'"):
        open_writer("parquet", tmp_path / "rows.parquet")
