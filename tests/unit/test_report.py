"""The report: figures that follow from the records, and a self-contained page."""

import re
from collections.abc import Iterable

import msgspec
import pytest

from rose.pipeline.accounting.cost import Answer, Attempt, CostReport, HeldDevices, TrainerStep, Usage, cost_of
from rose.pipeline.accounting.prices import DeviceClass, Prices
from rose.pipeline.audit import Ledger
from rose.pipeline.report import charts, cost_charts
from rose.pipeline.report.history import RunHistory, fold_history
from rose.pipeline.report.summary import RunMetadata, Success, Summary, describe_machine, summarise
from rose.pipeline.report.write import cost_sentence, report_html, uncounted_sentence
from rose.schemas.heartbeats import ExecutorState, Hardware, SlackHeartbeat, WorkerClass
from rose.schemas.prompts import Sampling
from rose.schemas.record import Record
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.samples import Ending, Outcome, Sample, SampleOutcome, SampleTurn
from rose.schemas.turns import TurnTimes
from rose.schemas.weights import WeightManifest

DIGEST = b"0123456789abcdef"
START = 1_700_000_000.0


def turn(number: int, *, start: int, end: int, cached: int, at: float, worker: str = "executor-0") -> SampleTurn:
    """Return a turn of 13 ms: 1 to the router, 5 for room, 1 to the inbox, 1 queue, 2 prefill, 2 decode, 1 back."""
    stations = [at + ms / 1000 for ms in (0, 0, 1, 6, 7, 8, 10, 12, 13)]
    names = TurnTimes.__struct_fields__
    return SampleTurn(
        turn=number,
        attempt=0,
        worker=worker,
        sampling=Sampling(),
        start=start,
        end=end,
        cached_tokens=cached,
        times=TurnTimes(**dict(zip(names, stations, strict=True))),
        environment_seconds=0.0005,
    )


def sample(index: int, *, turns: Iterable[SampleTurn], versions: Iterable[int], success: bool) -> Sample:
    taken = tuple(turns)
    return Sample(
        trajectory_id=f"g:{index}",
        group_id="g",
        group_size=2,
        model_id="policy",
        environment="calculator",
        seed=1,
        tokens=b"",
        loss_mask=b"",
        logprobs=b"",
        spans=tuple(VersionSpan(each.start, each.end, version) for each, version in zip(taken, versions, strict=True)),
        turns=taken,
        reward=float(success),
        success=success,
        completed_at=START + 1,
    )


def heartbeat(version: int, at: float, *, sequence: int) -> SlackHeartbeat:
    return SlackHeartbeat(
        worker="executor-0",
        incarnation=1,
        slot=0,
        sequence=sequence,
        worker_class=WorkerClass.DEDICATED,
        state=ExecutorState.READY,
        policy_version=version,
        hardware=Hardware(prefill_tokens_per_second=1, decode_tokens_per_second=1),
        kv_bytes_total=1,
        kv_bytes_free=1,
        kv_bytes_per_token=1,
        max_turns=1,
        token_budget=1,
        ttl_seconds=2,
        sent_at=START + at,
        swap_seconds=0.02 * version,
    )


def manifest(version: int, at: float) -> WeightManifest:
    return WeightManifest(
        model_id="policy",
        run=":demo",
        epoch=0,
        version=version,
        step=version,
        tensors=(),
        slices=(),
        digest=DIGEST,
        payload_bytes=2000,
        published_at=START + at,
    )


FIRST = sample(
    0,
    turns=[turn(0, start=10, end=14, cached=0, at=START), turn(1, start=18, end=22, cached=12, at=START + 0.1)],
    versions=[0, 0],
    success=True,
)
SECOND = sample(
    1,
    turns=[turn(0, start=10, end=14, cached=8, at=START), turn(1, start=18, end=20, cached=16, at=START + 0.2)],
    versions=[0, 1],
    success=False,
)


def outcome(index: int, end: Outcome) -> SampleOutcome:
    return SampleOutcome(
        trajectory_id=f"g:{index}", group_id="g", outcome=end, step=1, policy_version=1, recorded_at=START + 2
    )


RECORDS: list[Record] = [
    FIRST,
    FIRST,
    SECOND,
    manifest(0, 0.0),
    manifest(1, 0.15),
    heartbeat(-1, 0.0, sequence=0),
    heartbeat(0, 0.05, sequence=1),
    heartbeat(0, 0.1, sequence=2),
    heartbeat(1, 0.16, sequence=3),
    outcome(0, Outcome.TRAINED),
    outcome(1, Outcome.TRAINED),
]


USAGE = Usage(
    attempts=[
        Attempt("g:0", DeviceClass.DEDICATED, "cpu", 2.0, True, START + 1),
        Attempt("g:1", DeviceClass.BORROWED, "cpu", 1.0, False, START + 1),
    ],
    answers={
        "g:0": Answer(Outcome.TRAINED, True, 1, START + 2),
        "g:1": Answer(Outcome.TRAINED, False, 2, START + 4),
    },
    held=[HeldDevices("cpu", 1, START, START + 4)],
    trainer=[TrainerStep(START + 2, 1.0, 1.0, 1), TrainerStep(START + 4, 1.0, 1.0, 1)],
)
PRICES = Prices(currency="USD", dedicated=3600.0, borrowed=1800.0, trainer=7200.0)


def summary_of(history: RunHistory, cost: CostReport | None = None) -> Summary:
    ledger = Ledger()
    ledger.on_prompt("g", 2, place=(0, 0), at_home=True)
    for record in (FIRST, SECOND):
        ledger.on_sample(record.trajectory_id)
    for index in (0, 1):
        ledger.on_outcome(outcome(index, Outcome.TRAINED))
    return summarise(
        history,
        ledger.audit(),
        RunMetadata(
            started_at=START,
            seconds=12.5,
            broker="a broker",
            success=Success(before=0.25, after=0.75, n=256),
            machine=describe_machine(),
        ),
        run="test",
        seed=3,
        cost=cost or cost_of(USAGE, PRICES),
    )


def test_run_history_does_not_depend_on_the_order_of_topics() -> None:
    assert fold_history(RECORDS) == fold_history(RECORDS[5:] + RECORDS[:5])


def test_summary_matches_the_records() -> None:
    summary = summary_of(fold_history(RECORDS))
    assert summary.trajectories == {
        "requested": 2,
        "trained": 2,
        "stale": 0,
        "filtered": 0,
        "infra_failed": 0,
        "surplus": 0,
        "superseded": 0,
        "evaluated": 0,
        "in_flight": 0,
    }
    assert (summary.lost, summary.doubled, summary.turns, summary.sampled_tokens) == (0, 0, 4, 14)
    # Another trajectory computed what the second turn of SECOND found in the cache: the version had changed.
    cache = summary.prefix_cache
    assert (cache.hit_tokens, cache.reusable_tokens, cache.cached_tokens, cache.context_tokens) == (12, 14, 36, 56)
    assert summary.bus_seconds.p50 == pytest.approx(0.003, abs=1e-6)
    assert summary.latency_seconds.room.p50 == pytest.approx(0.005, abs=1e-6)
    assert summary.latency_seconds.prefill.p99 == pytest.approx(0.002, abs=1e-6)
    assert (summary.weights.versions, summary.weights.bytes) == (2, 4000)
    assert summary.weights.swap_seconds_p99 == pytest.approx(0.02, rel=0.02)
    assert summary.turns_per_second == pytest.approx(4 / 0.213, rel=1e-3)


def test_summary_json_has_the_agreed_fields() -> None:
    plain = msgspec.json.decode(msgspec.json.encode(summary_of(fold_history(RECORDS))))
    terms = {"requested", "trained", "stale", "filtered", "infra_failed", "surplus", "superseded", "evaluated"}
    terms |= {"in_flight"}
    assert set(plain["trajectories"]) == terms
    assert set(plain["success"]) == {"before", "after", "n"}
    assert {"hit_tokens", "reusable_tokens"} <= set(plain["prefix_cache"])
    assert {"p50", "p99"} <= set(plain["bus_seconds"])
    assert {"versions", "bytes", "swap_seconds_p99"} <= set(plain["weights"])
    assert isinstance(plain["turns"], int)
    assert plain["broker"] == "a broker"
    assert plain["seconds"] == 12.5


def test_report_page_loads_no_resource_and_escapes_its_input() -> None:
    history = fold_history(RECORDS)
    page = report_html(summary_of(history), history, configuration='[run]\nname = "<script>alert(1)</script>"\n')
    assert "<script>alert(1)" not in page
    assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=", page)
    for name in ("learning", "turns", "occupancy", "timeline", "latency", "cache"):
        assert f'id="{name}"' in page
    assert "Held-out success went from 25.0 % to 75.0 % on 256 fixed tasks." in page
    assert "none was lost and none counted twice" in page


def test_charts_of_many_workers_show_some_and_sum_the_others() -> None:
    many = charts.SHOWN_WORKERS + 5
    samples = [
        sample(
            index,
            turns=[
                turn(number, start=10, end=14, cached=0, at=START + number, worker=f"executor-{index:02}")
                for number in range(1 + (index < 8))
            ],
            versions=[0] * (1 + (index < 8)),
            success=True,
        )
        for index in range(many)
    ]
    history = fold_history([*samples, manifest(0, 0.0)])
    held, lanes = charts.occupancy(history), charts.timeline(history)
    assert held is not None and lanes is not None
    busiest = [f"executor-{index:02}" for index in range(charts.SHOWN_WORKERS)]
    assert [trace.name for trace in held.data] == [*busiest, "5 others"]
    assert "the 8 busiest of 13 workers" in lanes.layout.legend.title.text


def test_run_without_turns_has_a_report() -> None:
    history = fold_history([])
    unused = cost_of(Usage([], {}, [], None), Prices())
    page = report_html(summary_of(history, unused), history, configuration="")
    assert "Plotly.newPlot" not in page.split("</script>", 1)[1]


def test_success_is_omitted_if_no_environment_reports_it() -> None:
    records = [msgspec.structs.replace(each, success=None) if isinstance(each, Sample) else each for each in RECORDS]
    history = fold_history(records)
    assert charts.learning_curve(history, Success()) is None
    turns = charts.trajectory_turns(history)
    assert turns is not None and [(bar.name, sum(bar.y)) for bar in turns.data] == [("not judged", 2)]


def test_trajectories_that_ended_early_are_in_no_distribution_of_turns() -> None:
    early = {"reward": None, "success": None, "ended": Ending.SURPLUS}
    records = [msgspec.structs.replace(each, **early) if isinstance(each, Sample) else each for each in RECORDS]
    assert charts.trajectory_turns(fold_history(records)) is None


def test_cost_of_each_fate_and_of_each_correct_answer_is_drawn() -> None:
    cost = cost_of(USAGE, PRICES)
    fates = cost_charts.cost_by_fate(cost)
    assert fates is not None
    drawn = {(bar.name, fate): x for bar in fates.data for fate, x in zip(bar.y, bar.x, strict=True) if x}
    assert drawn == pytest.approx(
        {
            ("dedicated", "trained, correct"): 2.0,
            ("dedicated", "idle"): 2.0,
            ("borrowed", "lost attempts"): 0.5,
            ("trainer", "trainer trains"): 4.0,
            ("trainer", "trainer waits"): 4.0,
        }
    )
    steps = cost_charts.cost_per_correct(cost)
    assert steps is not None
    # The second step has no correct answer, so it has no cost for each of them.
    assert [list(line.y) for line in steps.data] == [[6.5, None], [6.5, 12.5]]


def test_bars_have_the_device_time_of_every_outcome() -> None:
    answers = {f"g:{number}": Answer(outcome, True, 1, 2.0) for number, outcome in enumerate(Outcome)}
    attempts = [Attempt(name, DeviceClass.BORROWED, "H800", 3600.0, True, 1.0) for name in answers]
    fates = cost_charts.cost_by_fate(cost_of(Usage(attempts, answers, [], None), Prices()))
    assert fates is not None and sum(x for bar in fates.data for x in bar.x) == pytest.approx(len(Outcome))


def test_page_and_terminal_say_what_a_correct_answer_costs() -> None:
    history = fold_history(RECORDS)
    cost = cost_of(USAGE, PRICES)
    sentence = "12.5 USD for 0.0025 device hours. Correct answers: 1, at 12.5 USD each."
    assert cost_sentence(cost) == sentence
    page = report_html(summary_of(history, cost), history, configuration="")
    assert sentence in page
    assert 'id="cost_steps"' in page and 'id="cost_fates"' in page
    assert "<td>dedicated, cpu</td><td>0.001111 device hours, 4 USD</td>" in page
    assert uncounted_sentence(cost) == ""
    unpriced = cost_of(USAGE, Prices())
    assert cost_sentence(unpriced) == "0.0025 device hours. Correct answers: 1, at 9 device seconds each."


def test_page_says_what_the_cost_does_not_know() -> None:
    history = fold_history(RECORDS)
    answers = {"g:0": Answer(Outcome.TRAINED, None, 1, START + 2)}
    cost = cost_of(USAGE._replace(answers=answers, trainer=None, unknown_attempts=3, assumed_devices=2), PRICES)
    assert cost_sentence(cost) == "4.5 USD for 0.001389 device hours. No correct answer is known."
    sentence = uncounted_sentence(cost)
    for part in ("the time of 3 attempts", "1 of the answers", "each of 2 executors", "the time of the trainer"):
        assert part in sentence
    assert sentence in report_html(summary_of(history, cost), history, configuration="").replace("&#39;", "'")
    assert cost_charts.cost_per_correct(cost) is None
