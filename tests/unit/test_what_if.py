"""A recorded run is simulated from its records alone; a what-if takes as long as a run that has the change."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.accounting.cost import Usage
from rose.pipeline.accounting.prices import Prices
from rose.pipeline.simulation.fitted_engine import ComputedTurn, fit_engine
from rose.pipeline.simulation.fleet import Fleet
from rose.pipeline.simulation.recorded_run import RecordedRun
from rose.pipeline.simulation.scenario import Control
from rose.pipeline.simulation.trajectory_plans import drawn_plans
from rose.pipeline.simulation.what_if import Replica, RunSettings, changed, replica_of, simulated_figures
from rose.schemas.errors import RoseError, UsageError
from rose.schemas.heartbeats import ExecutorState, Hardware, SlackHeartbeat, WorkerClass
from rose.schemas.prompts import Sampling
from rose.schemas.record import Record
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.samples import Ending, Sample, SampleOutcome, SampleTurn
from rose.schemas.turns import TurnTimes
from rose.workers.lender.admission import Promise
from tests.support.simulation_fixtures import scenario

ORIGIN = 1.7e9
"""Unix seconds at which a simulated run begins."""

SETTINGS = RunSettings(
    name="test",
    step_tokens=8192,
    max_staleness=1,
    max_lag_versions=1,
    promise=Promise(),
    control=Control(),
    cells=1,
    heartbeat_seconds=0.2,
    prices=Prices(currency="USD", dedicated=2.0, borrowed=1.0, trainer=2.0),
)

ASYNCHRONOUS: dict[str, Any] = {
    "training": {"mode": "asynchronous", "max_staleness": 1, "steps": 4},
    "tasks": {"group_size": 6},
}
"""Groups open while others are trained on, as in a production run."""


def run(**changes: Any) -> Fleet:
    """Run a fleet until the prompts of its steps are used up, as a run does."""
    fields = scenario(**{**ASYNCHRONOUS, **changes})
    drawn = drawn_plans(fields.tasks, fields.seed)
    fleet = Fleet(fields, plans=[drawn(number) for number in range(fields.training.steps * fields.tasks.groups)])
    fleet.run()
    return fleet


def records_of(fleet: Fleet) -> Iterator[Record]:
    """Records that a run leaves that did what the fleet did."""
    turns: dict[str, list[Any]] = {}
    for turn in fleet.rollout.turns:
        turns.setdefault(turn.trajectory, []).append(turn)
    for sample, outcome, step in fleet.trainer.figures.settled:
        own = turns[sample.trajectory_id]
        mask = b"".join(
            bytes(turn.context_tokens - before) + b"\1" * turn.new_tokens
            for turn, before in zip(own, [0, *(each.context_tokens + each.new_tokens for each in own)], strict=False)
        )
        yield Sample(
            trajectory_id=sample.trajectory_id,
            group_id=sample.group_id,
            group_size=sample.group_size,
            model_id="policy",
            environment="simulated",
            seed=0,
            tokens=bytes(4 * len(mask)),
            loss_mask=mask,
            logprobs=bytes(4 * len(mask)),
            spans=(VersionSpan(0, len(mask), own[0].version),),
            turns=tuple(map(sample_turn, own)),
            reward=sample.reward,
            success=sample.success,
            completed_at=ORIGIN + sample.completed_at,
        )
        yield SampleOutcome(
            trajectory_id=sample.trajectory_id,
            group_id=sample.group_id,
            outcome=outcome,
            step=step,
            policy_version=step,
            recorded_at=ORIGIN + fleet.trainer.figures.steps[step].ended_at,
        )
    for executor in fleet.executors.values():
        for second in range(int(fleet.events.now) + 2):
            yield heartbeat(executor.name, float(second), max_turns=2, kv_tokens=executor.cost.kv_cache_tokens)


def heartbeat(worker: str, at: float, *, max_turns: int, kv_tokens: int) -> SlackHeartbeat:
    return SlackHeartbeat(
        worker=worker,
        incarnation=1,
        slot=0,
        sequence=int(at),
        worker_class=WorkerClass.DEDICATED,
        state=ExecutorState.READY,
        policy_version=0,
        hardware=Hardware(device="H800", prefill_tokens_per_second=1000.0, decode_tokens_per_second=10.0),
        kv_bytes_total=kv_tokens * 4,
        kv_bytes_free=0,
        kv_bytes_per_token=4,
        max_turns=max_turns,
        token_budget=kv_tokens,
        ttl_seconds=2.0,
        sent_at=ORIGIN + at,
    )


def sample_turn(turn: Any) -> SampleTurn:
    stations = ("requested", "queued", "dispatched", "received", "scheduled", "first_token", "finished", "applied")
    return SampleTurn(
        turn=turn.turn,
        attempt=turn.attempts - 1,
        worker=turn.worker,
        sampling=Sampling(max_tokens=600),
        start=turn.context_tokens,
        end=turn.context_tokens + turn.new_tokens,
        cached_tokens=turn.cached_tokens,
        times=TurnTimes(**{f"{each}_at": ORIGIN + getattr(turn, f"{each}_at") for each in stations}),
        environment_seconds=turn.environment_seconds,
    )


@cache
def recorded_run() -> tuple[Record, ...]:
    """Return the records of a run without changes."""
    return tuple(records_of(run()))


def replica(records: Iterable[Record], folder: Path) -> Replica:
    recorded = RecordedRun(0.0, float("inf"))
    for record in records:
        recorded.add(record)
    return replica_of(recorded, SETTINGS, Usage([], {}, [], []), folder)


def test_simulation_of_a_recorded_run_takes_as_long_as_the_run(tmp_path: Path) -> None:
    recorded = replica(recorded_run(), tmp_path)
    simulated = recorded.simulate(recorded.scenario)
    simulated.run()
    figures, log = simulated_figures(simulated), recorded.log
    assert figures.seconds == pytest.approx(log.seconds, rel=0.05)
    assert figures.step_seconds == pytest.approx(log.step_seconds, rel=0.1), "of the two steps after the warm-up"
    assert sum(figures.turns) >= sum(log.turns)
    assert figures.cached_share == pytest.approx(log.cached_share, abs=0.05)
    assert (recorded.left_out_groups, recorded.left_out_executors) == (0, 0)


@pytest.mark.parametrize(
    ("change", "really"),
    [
        ("dedicated.0.count=1", {"dedicated": [{"profile": "qwen3-8b-h800-tp1", "count": 1, "max_turns": 2}]}),
        ("dedicated.0.count=4", {"dedicated": [{"profile": "qwen3-8b-h800-tp1", "count": 4, "max_turns": 2}]}),
        ("dedicated.0.max_turns=8", {"dedicated": [{"profile": "qwen3-8b-h800-tp1", "count": 2, "max_turns": 8}]}),
        ("routing.policy=round_robin", {"routing": {"policy": "round_robin"}}),
        ("training.max_staleness=0", {"training": {**ASYNCHRONOUS["training"], "max_staleness": 0}}),
    ],
)
def test_what_if_takes_as_long_as_really_making_the_change(change: str, really: dict[str, Any], tmp_path: Path) -> None:
    recorded = replica(recorded_run(), tmp_path)
    asked = recorded.simulate(changed(recorded.scenario, [change]))
    asked.run()
    if change.startswith("training"):  # the window of open groups is another setting than the staleness
        really["training"]["window_groups"] = 8
    real = replica(records_of(run(**really)), tmp_path)
    assert simulated_figures(asked).seconds == pytest.approx(real.log.seconds, rel=0.15)


def with_failed_groups(records: Iterable[Record], groups: tuple[str, ...]) -> Iterator[Record]:
    for record in records:
        if isinstance(record, Sample) and record.group_id in groups and record.trajectory_id.endswith(":0"):
            record = msgspec.structs.replace(record, failure="its sandbox died", success=None, reward=None)
        yield record


@pytest.mark.parametrize("failed", [("g1",), ("g1", "g2", "g3", "g9")])
def test_run_whose_steps_have_different_numbers_of_whole_groups_is_simulated(
    failed: tuple[str, ...], tmp_path: Path
) -> None:
    recorded = replica(with_failed_groups(recorded_run(), failed), tmp_path)
    assert recorded.left_out_groups == len(failed) == 16 - sum(recorded.step_groups)
    assert len(set(recorded.step_groups)) > 1
    simulated = recorded.simulate(recorded.scenario)
    simulated.run()
    assert len(simulated.trainer.figures.steps) == 4
    assert simulated_figures(simulated).seconds == pytest.approx(recorded.log.seconds, rel=0.2)
    with pytest.raises(UsageError, match=r"a step of the run has 4 groups|no step would have all its groups"):
        recorded.simulate(changed(recorded.scenario, ["training.window_groups=3"]))


def test_pauses_for_new_versions_do_not_make_the_steps_of_an_engine_longer(tmp_path: Path) -> None:
    """The simulation has these pauses too, so that they would count twice."""
    pause = 3.0
    training = {**ASYNCHRONOUS["training"], "swap_seconds": pause}
    records = list(records_of(run(training=training)))
    published = sorted({record.recorded_at for record in records if isinstance(record, SampleOutcome)})
    for number, record in enumerate(records):
        if isinstance(record, SlackHeartbeat):
            version = bisect_right(published, record.sent_at)
            swap = pause if version else 0.0
            records[number] = msgspec.structs.replace(record, policy_version=version, swap_seconds=swap)
    (engine,) = replica(records, tmp_path).engines.values()
    (without,) = replica(recorded_run(), tmp_path).engines.values()
    decode = [
        each.step_seconds + each.sequence_seconds + 800 * each.context_token_seconds for each in (engine, without)
    ]
    assert decode[0] == pytest.approx(decode[1], rel=0.02)


def test_change_of_what_the_log_has_is_refused(tmp_path: Path) -> None:
    recorded = replica(recorded_run(), tmp_path)
    with pytest.raises(UsageError, match=r"tasks\.groups is what the log has"):
        changed(recorded.scenario, ["tasks.groups=3"])
    with pytest.raises(UsageError, match="names no field"):
        changed(recorded.scenario, ["dedicated.7.count=3"])
    with pytest.raises(UsageError, match="unknown field `speed`"):
        changed(recorded.scenario, ["routing.speed=3"])
    with pytest.raises(UsageError, match="write it as"):
        changed(recorded.scenario, ["routing.policy"])
    with pytest.raises(UsageError, match="Invalid enum value"):
        changed(recorded.scenario, ["routing.policy=nearest"])


def test_run_without_heartbeats_or_groups_is_refused(tmp_path: Path) -> None:
    recorded = RecordedRun(0.0, float("inf"))
    with pytest.raises(RoseError, match="no group began and ended"):
        replica_of(recorded, SETTINGS, Usage([], {}, [], []), tmp_path)
    for record in recorded_run():
        if not isinstance(record, SlackHeartbeat):
            recorded.add(record)
    with pytest.raises(RoseError, match="heartbeats_retention_seconds"):
        replica_of(recorded, SETTINGS, Usage([], {}, [], []), tmp_path)


def test_executors_that_differ_in_memory_alone_are_one_kind(tmp_path: Path) -> None:
    """A lender's largest budget depends on its users, and a GPU's KV memory on what else it holds."""
    recorded = RecordedRun(0.0, float("inf"))
    for record in recorded_run():
        if isinstance(record, SlackHeartbeat) and record.worker == "dedicated-0-0":
            record = msgspec.structs.replace(record, kv_bytes_total=record.kv_bytes_total + 400)
        recorded.add(record)
    found = replica_of(recorded, SETTINGS, Usage([], {}, [], []), tmp_path)
    (pool,), (fitted,) = found.scenario.dedicated, found.engines.values()
    assert (pool.count, found.left_out_executors) == (2, 0)
    assert fitted.rows > 200, "all engines of one device are fitted together"


@pytest.mark.parametrize("ended", [Ending.SURPLUS, Ending.STALE])
def test_group_with_a_trajectory_that_ended_early_is_left_out(ended: Ending) -> None:
    cut = next(record for record in recorded_run() if isinstance(record, Sample))
    early = msgspec.structs.replace(cut, reward=None, ended=ended, completed_at=cut.completed_at + 60.0)
    recorded = RecordedRun(0.0, float("inf"))
    for record in recorded_run():
        recorded.add(early if record is cut else record)
    groups, left_out = recorded.groups()
    assert left_out == 1 and cut.group_id not in groups


def test_evaluations_are_no_part_of_a_recorded_run(tmp_path: Path) -> None:
    group_id = "evaluation:held-out:5f3a91c0:1:0:0"
    evaluated = [
        msgspec.structs.replace(
            each, group_id=group_id, trajectory_id=each.trajectory_id.replace(each.group_id, group_id, 1)
        )
        for each in recorded_run()
        if isinstance(each, Sample | SampleOutcome) and each.group_id == "g5"
    ]
    recorded, without = replica((*recorded_run(), *evaluated), tmp_path), replica(recorded_run(), tmp_path)
    assert recorded.left_out_groups == 1 + without.left_out_groups
    assert (recorded.step_groups, recorded.plans, recorded.log) == (without.step_groups, without.plans, without.log)


def test_group_that_is_not_whole_on_the_log_is_left_out(tmp_path: Path) -> None:
    recorded, dropped = RecordedRun(0.0, float("inf")), False
    for record in recorded_run():
        if isinstance(record, Sample) and not dropped:
            dropped = True
        else:
            recorded.add(record)
    assert replica_of(recorded, SETTINGS, Usage([], {}, [], []), tmp_path).left_out_groups == 1


def test_run_with_failed_groups_is_simulated_with_as_many_groups_in_each_step(tmp_path: Path) -> None:
    first = next(record for record in recorded_run() if isinstance(record, Sample))
    recorded = replica(
        (
            msgspec.structs.replace(each, failure="its environment crashed", reward=None, success=None, turns=())
            if isinstance(each, Sample) and each.group_id == first.group_id
            else each
            for each in recorded_run()
        ),
        tmp_path,
    )
    assert (recorded.left_out_groups, recorded.step_groups) == (1, [3, 4, 4, 4])
    simulated = recorded.simulate(recorded.scenario)
    simulated.run()
    assert simulated.rollout.opened == 15 and len(simulated.trainer.figures.steps) == 4


def test_groups_of_several_sizes_are_simulated(tmp_path: Path) -> None:
    first = next(record for record in recorded_run() if isinstance(record, Sample))
    smaller = (
        msgspec.structs.replace(each, group_size=5)
        if isinstance(each, Sample) and each.group_id == first.group_id
        else each
        for each in recorded_run()
        if getattr(each, "trajectory_id", "") != f"{first.group_id}:5"
    )
    recorded = replica(smaller, tmp_path)
    simulated = recorded.simulate(recorded.scenario)
    simulated.run()
    assert simulated.rollout.finished == 16 * 6 - 1


def test_group_with_some_outcomes_on_the_log_belongs_to_no_step_yet(tmp_path: Path) -> None:
    records = list(recorded_run())
    last = max(number for number, each in enumerate(records) if isinstance(each, SampleOutcome))
    assert replica((*records[:last], *records[last + 1 :]), tmp_path).step_groups == [4, 4, 4, 3]


def test_time_of_the_bus_is_not_that_of_a_turn_that_is_queued_again(tmp_path: Path) -> None:
    """A turn is queued anew before each attempt, and a new router queues all turns anew."""

    def delayed(sample: Sample, *, attempt: int) -> Sample:
        turn = sample.turns[0]
        times = msgspec.structs.replace(turn.times, requested_at=turn.times.requested_at - 100.0)
        return msgspec.structs.replace(
            sample, turns=(msgspec.structs.replace(turn, times=times, attempt=attempt), *sample.turns[1:])
        )

    undisturbed = replica(recorded_run(), tmp_path).scenario.hop_seconds
    again = (delayed(each, attempt=1) if isinstance(each, Sample) else each for each in recorded_run())
    assert replica(again, tmp_path).scenario.hop_seconds == pytest.approx(undisturbed, rel=0.01)
    samples = (each.trajectory_id for each in recorded_run() if isinstance(each, Sample))
    one = next(samples)
    replaced = (
        delayed(each, attempt=0) if isinstance(each, Sample) and each.trajectory_id == one else each
        for each in recorded_run()
    )
    assert replica(replaced, tmp_path).scenario.hop_seconds == pytest.approx(undisturbed, rel=0.01)


def test_executor_that_moved_between_cells_belongs_to_the_fleet_in_whichever_order_the_cells_are_read(
    tmp_path: Path,
) -> None:
    """Heartbeats lie in the partition of the cell that the executor was in."""
    beats = [each for each in recorded_run() if isinstance(each, SlackHeartbeat)]
    others = [each for each in recorded_run() if not isinstance(each, SlackHeartbeat)]
    end = max(each.sent_at for each in beats)
    moved = [
        msgspec.structs.replace(each, slot=1) if ORIGIN + 40.0 < each.sent_at < end - 40.0 else each for each in beats
    ]
    in_order = sorted(moved, key=lambda each: each.slot)
    for found in (in_order, sorted(moved, key=lambda each: -each.slot)):
        assert [pool.count for pool in replica([*others, *found], tmp_path).scenario.dedicated] == [2]


def test_version_is_followed_by_its_number_when_the_clocks_differ() -> None:
    run = RecordedRun(0.0, float("inf"))
    for version, served_at in ((1, 9.9), (2, 40.2)):  # by a clock that is 0.3 s behind the trainer's
        beat = heartbeat("w0", served_at, max_turns=2, kv_tokens=100)
        run.add(msgspec.structs.replace(beat, policy_version=version))
    transfer, _ = run.version_seconds({1: ORIGIN + 10.0, 2: ORIGIN + 40.0})
    assert transfer == pytest.approx(0.1)


@given(
    step=st.floats(1e-3, 1e-1),
    sequence=st.floats(0.0, 1e-3),
    prefill=st.floats(1e-6, 1e-3),
    lengths=st.lists(
        st.tuples(st.integers(2, 200), st.integers(1, 2000)),
        min_size=20,
        max_size=40,
        unique_by=(lambda each: each[0], lambda each: each[1]),
    ),
)
def test_fit_of_turns_that_were_computed_alone_has_the_seconds_of_their_engine(
    step: float, sequence: float, prefill: float, lengths: list[tuple[int, int]]
) -> None:
    now, turns = ORIGIN, []
    for new, prompt in lengths:
        first = now + step + sequence + prefill * prompt
        end = first + (new - 1) * (step + sequence)
        turns.append(ComputedTurn("w", now, first, end, prompt, prompt, new, True))
        now = end
    fitted = fit_engine(turns, step_tokens=8192)
    assert fitted is not None
    assert fitted.p90_error < 0.01
    assert fitted.step_seconds + fitted.sequence_seconds == pytest.approx(step + sequence, rel=0.05)
