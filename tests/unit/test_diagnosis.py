"""Diagnosis of stalls: every kind of stall has a sentence, and a progressing run has none."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.monitor.diagnosis import STALLED_SECONDS, STANDSTILL_SECONDS, Finding, Severity, diagnose, headline
from rose.pipeline.monitor.facts import ExecutorFacts, Facts, Patience, RecentFailures, RoleFacts
from rose.schemas.heartbeats import ExecutorState

READY, STARTING = ExecutorState.READY, ExecutorState.STARTING


def executor(name: str = "executor-0", **changes: object) -> ExecutorFacts:
    well = ExecutorFacts(worker=name, state=READY, version=3, silent_seconds=0.1, ttl_seconds=2.0, max_turns=8)
    return dataclasses.replace(well, **changes)  # type: ignore[arg-type]


WELL = Facts(
    executors=(executor(held=4),),
    newest_version=3,
    max_lag_versions=4,
    environment_workers=1,
    homes=8,
    homes_owned=8,
    routers=1,
    prompts_waiting=5,
    open_groups=2,
    window_groups=2,
    in_a_turn=4,
)
STILL = {"applied_seconds": 12.0, "dispatched_seconds": 12.0, "settled_seconds": 12.0}
"""Facts of a run without progress for 12 s."""


def diagnosis_of(**changes: object) -> tuple[list[str], str | None]:
    facts = dataclasses.replace(WELL, **changes)  # type: ignore[arg-type]
    found = diagnose(facts)
    return [each.sentence for each in found if each.severity is Severity.UNWELL], headline(facts, found)


def test_progressing_run_is_healthy_and_has_no_headline() -> None:
    assert diagnosis_of() == ([], None)


WIRE = "float32 on the wire, the engine holds bfloat16"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"executors": ()}, "no executor is there"),
        ({"executors": (executor(silent_seconds=14.0),)}, "executor-0 has been silent for 14 s"),
        (
            {
                "executors": [
                    executor(f"executor-{n}", state=STARTING, version=-1, refused_version=0, refused_reason=WIRE)
                    for n in range(2)
                ]
            },
            f"executor-0 and executor-1 refuse version 0: {WIRE}",
        ),
        (
            {"executors": (executor(version=1, refused_version=3, refused_reason="a digest is wrong"),)},
            "executor-0 refuses version 3, and serves version 1: a digest is wrong",
        ),
        (
            {"executors": (executor(version=1), executor("executor-1", version=9)), "newest_version": 9},
            "executor-0 serves version 1, another serves version 9: it gets no turns",
        ),
        ({"routers": 0}, "no router is there: 4 trajectories ask for turns"),
        (
            {"executors": (executor(),), "routers": None},
            "4 trajectories ask for turns and executor-0 could run them, but no turn was sent out for 12 s: "
            "does a router serve?",
        ),
        ({"environment_workers": 0}, "no environment worker is there"),
        (
            {"environment_workers": 0, "role_starts": (RoleFacts(role="environment-0", times=1),)},
            "no environment worker is there: environment-0 started, and may still load environments (see the log)",
        ),
        (
            {"foreign_clients": ("my-etl",)},
            "the consumer group of the environment workers has members that are other programs and take homes: "
            "my-etl; give them another group.id",
        ),
        (
            {"failures": RecentFailures(failed=40, settled=64, reason="KeyError: 'API_KEY'")},
            "40 of the last 64 trajectories failed: KeyError: 'API_KEY'",
        ),
        ({"homes_owned": 5}, "3 of 8 homes have no environment worker"),
        ({"results_waiting": 4}, "4 results wait for an environment worker, and none was applied for 12 s"),
        (
            {"open_groups": 1},
            "5 prompts wait and the window has room, but no group was opened for 12 s: "
            "see the logs of the environment workers",
        ),
        (
            {"in_a_turn": 0, "prompts_waiting": 0},
            "the log does not say why nothing has moved for 12 s: see the logs of the roles",
        ),
        (
            {"role_starts": (RoleFacts(role="trainer", times=7, reason="Invalid timestamp"),)},
            "trainer restarts again and again, 7 times within 120 s: Invalid timestamp",
        ),
    ],
)
def test_fault_is_unhealthy_and_in_the_headline(changes: dict[str, object], sentence: str) -> None:
    unwell, why = diagnosis_of(**changes, **STILL)
    assert sentence in unwell
    assert why is not None
    assert why.startswith("nothing moves: ")
    assert sentence in why


def many(count: int, **changes: object) -> tuple[ExecutorFacts, ...]:
    return tuple(executor(f"executor-{number}", **changes) for number in range(count))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"in_a_turn": 0, "waiting_for_trainer": 8},
            "nothing moves: every group of the window waits for the trainer, which has settled nothing for 12 s",
        ),
        (
            {"executors": many(6, state=STARTING, version=-1), "newest_version": -1},
            "nothing moves: 6 executors wait for a first policy version: the trainer has published none yet",
        ),
        (
            {"executors": many(1, state=STARTING, version=-1)},
            "nothing moves: executor-0 waits to take up version 3",
        ),
        ({}, "nothing moves: 4 turns are being run, none has ended"),
        (
            {"executors": many(1, max_turns=0)},
            "nothing moves: 4 trajectories ask for turns, and no executor has room",
        ),
        (
            {"open_groups": 0, "in_a_turn": 0, "prompts_waiting": 0, "executors": many(1)},
            "nothing moves: no prompts left",
        ),
    ],
)
def test_waiting_is_explained_if_no_part_is_faulty(changes: dict[str, object], why: str) -> None:
    assert diagnosis_of(**changes, **STILL) == ([], why)


def test_prompts_behind_an_open_transaction_are_named_and_finally_unhealthy() -> None:
    held = {"held_homes": (1, 4), "prompts_waiting": 0}
    assert diagnosis_of(**held, held_seconds=9.0) == ([], None), "its producer may be about to end it"
    [sentence] = diagnosis_of(**held, held_seconds=10.0)[0]
    assert "the prompts of homes 1, 4 cannot be read, because they lie behind an open transaction" in sentence


def test_version_without_executor_does_not_block_turns() -> None:
    """The version may be of another run, or forged: the router trusts only versions that executors serve."""
    facts = dataclasses.replace(WELL, newest_version=2**53)
    found = diagnose(facts)
    assert not [each for each in found if each.severity is Severity.UNWELL]
    sentence = f"executor-0 serves version 3, the newest on the log is {2**53}"
    assert Finding(Severity.NOTE, "executors", sentence) in found


def test_paused_executor_is_shown_with_its_reason() -> None:
    paused = executor("lender-0", state=ExecutorState.PAUSED, paused_reason="a grant parked it: night")
    findings = diagnose(dataclasses.replace(WELL, executors=(executor(held=4), paused)))
    sentences = {each.sentence: each.severity for each in findings}
    assert sentences["lender-0 is paused, and takes no turns: a grant parked it: night"] is Severity.WAITS


def test_minor_findings_are_notes() -> None:
    dead_letters_by_topic = {"rose.prompts.submitted.v1": 2}
    facts = dataclasses.replace(
        WELL,
        dead_letters=dead_letters_by_topic,
        executors=(executor(held=1, clock_off_seconds=-90.0), executor("lender-0", cuts=3, frozen=True)),
    )
    notes = [each.sentence for each in diagnose(facts)]
    assert "the clock of executor-0 is 90 s behind ours" in notes
    assert "lender-0 lends no more than it does now: serving took room back 3 times since it started" in notes
    assert "2 dead letters (2 of rose.prompts.submitted.v1): see `rose dlq list`" in notes
    assert "the window is full: 2 groups are open, 5 prompts wait" in notes


def some_executors() -> st.SearchStrategy[ExecutorFacts]:
    return st.builds(
        ExecutorFacts,
        worker=st.sampled_from(["a", "b", "c"]),
        state=st.sampled_from(ExecutorState),
        version=st.integers(-1, 3),
        refused_version=st.integers(-1, 3),
        refused_reason=st.sampled_from(["", "why"]),
        silent_seconds=st.floats(0, 30),
        ttl_seconds=st.just(2.0),
        held=st.integers(0, 2),
        max_turns=st.integers(0, 2),
        frozen=st.booleans(),
        cuts=st.integers(0, 2),
    )


few = st.integers(0, 3)


MOMENTS = st.floats(0, 60)


def some_facts(moments: st.SearchStrategy[float] = MOMENTS) -> st.SearchStrategy[Facts]:
    return st.builds(
        Facts,
        executors=st.lists(some_executors(), max_size=3),
        newest_version=st.integers(-1, 3),
        environment_workers=st.none() | few,
        homes=st.just(3),
        homes_owned=st.none() | few,
        routers=st.none() | few,
        prompts_waiting=few,
        open_groups=few,
        window_groups=st.none() | few,
        in_a_turn=few,
        waiting_for_trainer=few,
        results_waiting=few,
        applied_seconds=moments,
        dispatched_seconds=moments,
        settled_seconds=moments,
    )


@pytest.mark.parametrize(
    ("starting", "sentence"),
    [
        (["executor-0"], "starting: executor-0 loads the engine"),
        (["executor-0", "executor-1"], "starting: executor-0 and executor-1 load the engine"),
        ([f"executor-{n}" for n in range(9)], "starting: 9 executors load the engine"),
        ([], "starting: no router is there"),
        (None, "nothing moves: no router is there"),
    ],
)
def test_headline_of_a_starting_run_names_the_starting_roles(starting: list[str] | None, sentence: str) -> None:
    facts = dataclasses.replace(WELL, routers=0, **STILL)  # type: ignore[arg-type]
    found = headline(facts, diagnose(facts), starting=starting)
    assert found is not None and found.startswith(sentence)


def test_headline_of_a_healthy_run_without_starting_roles_is_empty() -> None:
    assert headline(WELL, diagnose(WELL), starting=[]) is None


@given(some_facts())
def test_stalled_run_has_one_headline_and_a_progressing_run_has_none(facts: Facts) -> None:
    findings = diagnose(facts)
    why = headline(facts, findings)
    assert (why is None) == (facts.applied_seconds < STALLED_SECONDS)
    if why is not None:
        assert why.startswith("nothing moves")
        assert "\n" not in why
    severities = [each.severity for each in findings]
    assert severities == sorted(severities, key=list(Severity).index)


@given(some_facts(st.floats(STALLED_SECONDS, 10_000)))
def test_stalled_work_always_has_a_waiting_and_finally_an_unhealthy_part(facts: Facts) -> None:
    worst = [each.severity for each in diagnose(facts)][:1]
    if facts.work_left:
        assert worst in ([Severity.WAITS], [Severity.UNWELL])
        if facts.moved_seconds >= STANDSTILL_SECONDS:
            assert worst == [Severity.UNWELL]


@given(some_facts(st.floats(0, 10_000)))
def test_run_without_remaining_work_is_never_stalled(facts: Facts) -> None:
    idle = dataclasses.replace(facts, prompts_waiting=0, open_groups=0)
    assert not [each for each in diagnose(idle) if each.who == "run"]


PATIENT = Patience(step_seconds=200.0, turn_seconds=300.0, training_seconds=900.0)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 300.0),
        ({"in_a_turn": 0, "waiting_for_trainer": 8}, 900.0),
        ({"results_waiting": 4}, 200.0),
        ({"open_groups": 1, "in_a_turn": 0}, 200.0),
    ],
)
def test_work_in_progress_is_awaited_for_its_allowed_time(changes: dict[str, object], seconds: float) -> None:
    for still, unwell in ((seconds - 1.0, False), (seconds + 1.0, True)):
        since = {"applied_seconds": still, "dispatched_seconds": still, "settled_seconds": still}
        assert bool(diagnosis_of(**changes, **since, patience=PATIENT)[0]) == unwell


def test_time_without_executor_room_counts_against_no_part() -> None:
    asking: dict[str, object] = {"executors": (executor(),), **STILL}
    assert not diagnosis_of(**asking, able_seconds=2.0)[0]
    [sentence], _ = diagnosis_of(**asking, able_seconds=11.0)
    assert "no turn was sent out for 11 s" in sentence


def test_time_without_worker_or_prompt_counts_against_no_part() -> None:
    waiting: dict[str, object] = {"open_groups": 1, "in_a_turn": 4, **STILL}
    assert not diagnosis_of(**waiting, workers_seconds=2.0)[0]
    assert not diagnosis_of(**waiting, opened_seconds=2.0)[0]
    assert not diagnosis_of(**waiting, openable=0)[0]
    assert diagnosis_of(**waiting, workers_seconds=11.0, opened_seconds=11.0, openable=2)[0]
