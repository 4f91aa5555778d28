"""Elasticity: woken and parked lenders, granted and renewed leases, and the invariants of any history."""

import math
import pickle
from collections import defaultdict
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.pipeline.control.elasticity import GRACE_SECONDS, SETTLE_SECONDS, STALE_SECONDS, ElasticityCore
from rose.pipeline.control.rebalancing import FORGET_SECONDS
from rose.schemas.cells import CellSummary, ExecutorLine
from rose.schemas.grants import CapacityGrant, GrantSource
from rose.schemas.heartbeats import ExecutorState
from tests.support.control_fixtures import (
    CONFIG,
    DEDICATED,
    JOB,
    OTHER,
    ControlSimulation,
    SimulatedLender,
    at_work,
    changed,
    fleet,
    line,
    summary,
)


def test_waiting_work_wakes_the_least_loaded_lenders_and_its_end_parks_them() -> None:
    simulation = fleet("a", "b", "c")
    simulation.lenders["a"].busy = 5
    written = simulation.seconds(10, waiting=200)
    woken = [grant for grant in written if grant.lend]
    assert {grant.worker for grant in woken} == simulation.lending == {"b", "c"}, "two may, and the third is busier"
    assert "turns wait: done in" in woken[0].reason
    written = simulation.seconds(20, waiting=0)
    assert simulation.lending == set()
    assert {(each.worker, each.reason) for each in written if not each.lend} == {
        ("b", "of no use for 4 s"),
        ("c", "of no use for 4 s"),
    }
    assert (simulation.control.woken, simulation.control.parked) == (2, 2)


def test_no_lender_is_woken_for_work_that_ends_before_its_start() -> None:
    simulation = fleet("a")
    simulation.control.estimates.wake.fleet.value = 60.0
    assert not any(grant.lend for grant in simulation.seconds(20, waiting=30))
    assert any(grant.lend for grant in simulation.seconds(20, waiting=3000))


def test_one_lender_is_woken_for_a_single_turn_that_no_other_executor_runs() -> None:
    control = ElasticityCore(CONFIG, JOB)
    for now in range(8):
        control.on_summary(summary(line("a"), line("b"), waiting=1), now)
        control.tick(now)
    assert control.woken == 1


def test_large_fleet_wakes_as_many_lenders_as_have_work() -> None:
    control = ElasticityCore(changed(most_lenders=0), JOB)
    dedicated = [
        at_work(f"d{number}", serving=False, by_grant=False, free_turns=0, load_seconds=60.0) for number in range(100)
    ]
    parked = [line(f"l{number}") for number in range(100)]
    for now in range(8):
        control.on_summary(summary(*dedicated, *parked, waiting=150), now)
        control.tick(now)
    assert 30 < control.woken < 70, "each has two seconds of work, of some three turns"


def test_wake_time_of_a_lender_is_learned_and_expected_of_other_lenders() -> None:
    simulation = fleet("a", wakes_in=7.0)
    simulation.seconds(20, waiting=500)
    assert simulation.control.estimates.wake.expected("a") == pytest.approx(7.0)
    assert simulation.control.estimates.wake.expected("another") == pytest.approx(7.0)


def test_leases_are_renewed_only_while_summaries_arrive() -> None:
    simulation = fleet("a")
    simulation.seconds(60, waiting=500)
    assert simulation.lending == {"a"}, "longer than any lease"
    assert not simulation.seconds(40, waiting=500, silent=True)[int(STALE_SECONDS) :]
    assert simulation.lending == set()
    simulation.seconds(2, waiting=500)
    assert simulation.lending == {"a"}


def test_renewed_grant_has_the_current_reason() -> None:
    simulation = fleet("a")
    waits = simulation.seconds(30, waiting=500)
    assert "with it, in" in waits[0].reason, "what it was woken for"
    assert len(waits) > 3 and all("500 turns wait" in each.reason for each in waits)
    fewer = simulation.seconds(20, waiting=300)
    assert fewer and all("300 turns wait" in each.reason for each in fewer)
    lender = simulation.control.lenders["a"]
    simulation.seconds(2, waiting=0)
    assert lender.lends and lender.reason == "of no use for 1 s, and not for long enough"


def test_lender_with_a_manual_grant_is_left_alone_until_its_release() -> None:
    simulation = fleet("a", "b")
    simulation.seconds(10, waiting=500)
    by_hand = CapacityGrant(worker="a", lend=False, kv_bytes=0, token_budget=0, granted_at=0.0)
    simulation.control.on_grant("a", by_hand, simulation.now, source=GrantSource.BY_HAND)
    simulation.lenders["a"].hand = False
    assert {grant.worker for grant in simulation.seconds(30, waiting=500)} == {"b"}
    simulation.control.on_grant("a", None, simulation.now, source=GrantSource.BY_HAND)
    simulation.lenders["a"].hand = None
    simulation.seconds(10, waiting=500)
    assert simulation.lending == {"a", "b"}


def test_drained_lender_does_not_count_toward_the_cap_and_keeps_its_manual_grant() -> None:
    simulation = ControlSimulation(
        changed(most_lenders=1), lenders={"a": SimulatedLender(), "b": SimulatedLender(busy=1)}
    )
    for grant_source, lend in ((GrantSource.BY_HAND, True), (GrantSource.DRAIN, False)):
        grants = CapacityGrant(worker="a", lend=lend, kv_bytes=0, token_budget=0, granted_at=0.0)
        simulation.control.on_grant("a", grants, simulation.now, source=grant_source)
    simulation.lenders["a"].hand = False
    simulation.seconds(30, waiting=400)
    assert simulation.control.lending_workers(simulation.now) == ["b"], "it takes up no place of the cap"
    simulation.control.on_grant("a", None, simulation.now, source=GrantSource.DRAIN)
    assert "a" in simulation.control.lending_workers(simulation.now)


def test_manually_granted_lender_counts_toward_the_cap() -> None:
    simulation = fleet("a", "b", "c")
    by_hand = CapacityGrant(worker="c", lend=True, kv_bytes=0, token_budget=0, granted_at=0.0)
    simulation.control.on_grant("c", by_hand, simulation.now, source=GrantSource.BY_HAND)
    simulation.lenders["c"].hand = True
    simulation.seconds(30, waiting=500)
    assert len(simulation.lending) == 2


def test_woken_lender_that_does_not_start_is_replaced() -> None:
    simulation = ControlSimulation(
        changed(most_lenders=1), lenders={"a": SimulatedLender(wakes_in=1e9), "b": SimulatedLender(busy=1)}
    )
    simulation.seconds(int(SETTLE_SECONDS) + 2, waiting=500)
    assert simulation.lending == {"a"}
    simulation.seconds(100, waiting=500)
    assert simulation.lending == {"b"}
    assert any("it did not come" in grant.reason for grant in simulation.log)


def test_lender_closed_for_long_is_replaced() -> None:
    simulation = ControlSimulation(
        changed(most_lenders=1), lenders={"a": SimulatedLender(), "b": SimulatedLender(busy=1)}
    )
    simulation.seconds(20, waiting=500)
    assert simulation.lending == {"a"}
    simulation.lenders["a"].comes_at = math.inf
    simulation.seconds(50, waiting=500)
    assert simulation.lending == {"a"}, "it may come back"
    simulation.seconds(850, waiting=500)
    assert simulation.lending == {"b"}
    assert any("it has taken no turns for 60 s; it is paused" in grant.reason for grant in simulation.log)
    assert simulation.control.lenders["a"].backoff.failures == 1


def test_briefly_closed_busy_or_silent_lender_is_not_replaced() -> None:
    control, now = ElasticityCore(changed(most_lenders=1), JOB), 0.0
    control.estimates.wake.fleet.value = 5.0

    def given_up(seconds: float, *lines: ExecutorLine) -> bool:
        nonlocal now
        grants: list[CapacityGrant] = []
        for _ in range(int(seconds)):
            now += 1.0
            if lines:
                control.on_summary(summary(*lines, waiting=500), now)
                grants += control.tick(now)
        return any(not grant.lend for grant in grants)

    swaps = line("a", state=ExecutorState.READY, lag_versions=1)
    for _ in range(4):
        assert not given_up(10, at_work("a")) and not given_up(50, swaps), "a policy version, a burst of its users"
    full = at_work("a", open=False, free_turns=0, free_tokens=0, held_turns=8, held_tokens=800, load_seconds=99.0)
    assert not given_up(300, full), "it does its turns"
    assert not given_up(5, at_work("a")) and not given_up(2, swaps)
    given_up(100)
    assert not given_up(50, swaps), "of a router that was away, or an app, nobody knows what was meanwhile"
    assert given_up(15, swaps)


def test_restarted_control_app_resumes_from_the_log() -> None:
    simulation = fleet("a", "b")
    simulation.seconds(20, waiting=500)
    before = simulation.lending
    simulation.control = ElasticityCore(CONFIG, JOB)
    newest = {grant.worker: grant for grant in simulation.log}
    for name, grant in newest.items():
        simulation.control.on_grant(name, grant, simulation.now)
    written = simulation.seconds(8, waiting=500)
    assert all(grant.lend for grant in written) and simulation.lending == before
    assert simulation.control.woken == simulation.control.parked == 0


def test_unexpired_lease_of_a_silent_lender_counts_after_a_restart() -> None:
    for drained in (False, True):
        control, since = ElasticityCore(changed(most_lenders=1), JOB), None
        control.on_grant("a", granted("a", job=JOB, lend=True, lease_seconds=30.0), 0.0)
        if drained:
            control.on_grant("a", granted("a", lease_seconds=0.0), 0.0, source=GrantSource.DRAIN)
        for now in range(60):
            control.on_summary(summary(line("b"), waiting=500), now)
            if any(grant.lend for grant in control.tick(now)):
                since = now if since is None else since
        assert since == (SETTLE_SECONDS if drained else 30.0 + GRACE_SECONDS)


def test_lease_of_a_lender_silent_since_the_restart_parks_no_lender() -> None:
    """The grantor kept the cap; the lender may be of a pod that is gone."""
    control = ElasticityCore(changed(most_lenders=1), JOB)
    for name in ("a", "b"):
        control.on_grant(name, granted(name, job=JOB, lend=True, lease_seconds=30.0), 0.0)
    for now in range(60):
        control.on_summary(summary(at_work("b"), waiting=500), now)
        assert all(grant.lend for grant in control.tick(now))


def test_fleet_lending_without_grants_is_brought_within_the_cap() -> None:
    control = ElasticityCore(CONFIG, JOB)
    lines = [at_work(name, serving_running=busy) for name, busy in (("a", 3), ("b", 0), ("c", 1))]
    for now in range(10):
        control.on_summary(summary(*lines), now)
        written = {grant.worker: grant for grant in control.tick(now)}
        if written:
            break
    assert {name: grant.lend for name, grant in written.items()} == {"a": False, "b": True, "c": True}
    assert "more than 2" in written["a"].reason


def test_endpoints_get_no_grants_and_their_capacity_counts() -> None:
    control = ElasticityCore(CONFIG, JOB)
    helper = at_work("e", by_grant=False, lanes=800)
    for now in range(20):
        control.on_summary(summary(DEDICATED, helper, line("a"), waiting=100), now)
        assert not any(grant.worker == "e" or grant.lend for grant in control.tick(now))


def test_gone_lender_is_forgotten() -> None:
    simulation = fleet("a", "b")
    simulation.seconds(10, waiting=500)
    del simulation.lenders["b"]
    simulation.seconds(int(FORGET_SECONDS + CONFIG.lease_seconds + GRACE_SECONDS) + 10, waiting=500)
    assert set(simulation.control.lenders) == {"a"}
    assert not simulation.control.estimates.wake.workers.keys() - {"a"}
    assert simulation.deleted == [("b", GrantSource.LEASED)] and set(simulation.control.leases) == {"a"}


def test_grants_of_a_gone_lender_are_deleted_once_for_every_job() -> None:
    control, now = ElasticityCore(CONFIG, JOB), 0.0
    for name, job in (("gone", JOB), ("others", OTHER), ("back", JOB)):
        control.on_grant(name, granted(name, job=job), now)
        control.on_grant(name, granted(name, job=job, cell=1), now, source=GrantSource.CELL)
    control.on_grant("alive", granted("alive", job=OTHER), now)
    control.on_grant("gone", granted("gone", job=JOB, lease_seconds=0.0), now, source=GrantSource.BY_HAND)

    def deletions_after(*cells: int) -> list[tuple[str, GrantSource]]:
        for cell in cells:
            control.on_summary(summary(*([line("back")] if cell else [DEDICATED]), cell=cell, cells=2), now)
        control.tick(now)
        return control.expired_grants(now)

    for _ in range(int(FORGET_SECONDS)):
        assert deletions_after(0, 1) == []
        now += 1.0
    control.on_grant("alive", granted("alive", job=OTHER, reason="renewed"), now)
    assert set(deletions_after(0, 1)) == {("gone", GrantSource.CELL), ("others", GrantSource.CELL)}
    for _ in range(int(9.0 + GRACE_SECONDS)):
        assert deletions_after(0, 1) == [], "it ran out only lately"
        now += 1.0
    assert set(deletions_after(0, 1)) == {("gone", GrantSource.LEASED), ("others", GrantSource.LEASED)}
    assert deletions_after(0, 1) == []
    assert set(control.leases) == {"alive", "back"} and set(control.manual_grants) == {"gone"}


def test_no_lender_is_gone_until_all_cells_were_heard_after_a_silence() -> None:
    """The first summary of a new router names no executor, because the router has heard none yet."""
    control, now = ElasticityCore(CONFIG, JOB), 0.0
    control.on_grant("a", granted("a", job=JOB), now)
    control.on_grant("a", granted("a", job=JOB, cell=1), now, source=GrantSource.CELL)

    def seconds(count: float, *summaries: CellSummary) -> list[tuple[str, GrantSource]]:
        nonlocal now
        deleted: list[tuple[str, GrantSource]] = []
        for _ in range(int(count)):
            now += 1.0
            for each in summaries:
                control.on_summary(each, now)
            control.tick(now)
            deleted += control.expired_grants(now)
        return deleted

    seen, unseen, other = summary(line("a"), cells=2), summary(cells=2), summary(cell=1, cells=2)
    seconds(5, seen, other)
    assert not seconds(2 * FORGET_SECONDS, other), "it may be there"
    assert not seconds(3, unseen, other)
    assert not seconds(3, seen, other)
    assert set(seconds(2 * FORGET_SECONDS + 5, unseen, other)) == {("a", GrantSource.LEASED), ("a", GrantSource.CELL)}


def granted(name: str, **other: object) -> CapacityGrant:
    fields: dict[str, object] = {"lend": False, "kv_bytes": 0, "token_budget": 0, "lease_seconds": 9.0, **other}
    return CapacityGrant(worker=name, granted_at=0.0, **fields)  # type: ignore[arg-type]


def test_no_state_is_kept_of_lenders_with_ever_new_names() -> None:
    control, sizes = ElasticityCore(CONFIG, JOB), []
    for number in range(240):
        now = 10.0 * number
        dedicated = at_work(f"dedicated-{number:04}", serving=False, by_grant=False)
        control.on_summary(summary(dedicated, at_work(f"lender-{number:04}", by_grant=False)), now)
        control.tick(now)
        sizes.append(len(pickle.dumps(control)))
    assert sizes[-1] <= sizes[119] * 1.1, "both in one cell, of which nobody moves to another"


WAITING = st.integers(0, 400)
STEP = st.tuples(
    WAITING,
    st.booleans(),
    st.sampled_from(["nothing", "by hand", "release", "another job", "other busy", "restart"]),
    st.integers(0, 4),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.lists(STEP, max_size=60))
def test_grants_keep_the_cap_and_skip_lenders_with_manual_grants_or_other_jobs(
    cap: int, steps: list[tuple[int, bool, str, int]]
) -> None:
    names = [f"w{number}" for number in range(5)]
    simulation = ControlSimulation(changed(most_lenders=cap), lenders={name: SimulatedLender() for name in names})
    others: dict[str, float] = {}
    """Expiry of the grant of another job, by worker."""
    for waiting, silent, event, which in steps:
        name = names[which]
        lender = simulation.lenders[name]
        if event == "by hand":
            lender.hand = False
            grant = CapacityGrant(worker=name, lend=False, kv_bytes=0, token_budget=0, granted_at=0.0)
            simulation.control.on_grant(name, grant, simulation.now, source=GrantSource.BY_HAND)
        elif event == "release":
            lender.hand = None
            simulation.control.on_grant(name, None, simulation.now, source=GrantSource.BY_HAND)
        elif event == "another job":
            grant = CapacityGrant(
                worker=name,
                lend=True,
                kv_bytes=0,
                token_budget=0,
                granted_at=simulation.now,
                lease_seconds=9.0,
                job=OTHER,
            )
            simulation.control.on_grant(name, grant, simulation.now)
            lender.read(grant, simulation.now)
            others[name] = simulation.now + 9.0
        elif event == "other busy":
            lender.busy = (lender.busy + 3) % 7
        elif event == "restart":
            old, simulation.control = simulation.control, ElasticityCore(simulation.config, JOB)
            for each, grants in old.leases.items():
                simulation.control.on_grant(each, grants.grant, simulation.now)
            for each, told_by_hand in old.manual_grants.items():
                simulation.control.on_grant(each, told_by_hand, simulation.now, source=GrantSource.BY_HAND)
        for written in simulation.seconds(2, waiting, silent=silent):
            assert written.worker not in simulation.control.manual_grants
            assert simulation.now >= others.get(written.worker, 0.0), "it lends to another job"
        assert len(simulation.lending) <= cap


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.floats(1.0, 200.0), st.floats(0.0, 20.0)), min_size=1, max_size=6),
    st.integers(0, 3000),
    st.none() | st.integers(0, 3),
)
def test_number_of_lenders_settles_under_constant_load(
    workers: list[tuple[int, float, float]], waiting: int, held: int | None
) -> None:
    """The workers are unequal, loaded, and with or without a dedicated executor of some turns."""
    config = changed(most_lenders=4)
    control = ElasticityCore(config, JOB)
    changes: defaultdict[str, list[float]] = defaultdict(list)
    newest: dict[str, CapacityGrant] = {}
    for now in range(400):
        lines = [
            at_work(f"w{number}", serving_running=busy, decode_tokens_per_second=rate, load_seconds=load)
            if (grant := newest.get(f"w{number}")) is not None and grant.lend
            else line(f"w{number}", serving_running=busy)
            for number, (busy, rate, load) in enumerate(workers)
        ]
        others = [] if held is None else [msgspec.structs.replace(DEDICATED, held_turns=held, free_turns=4)]
        control.on_summary(summary(*others, *lines, waiting=waiting), now)
        for grant in control.tick(now):
            if grant.worker in newest and newest[grant.worker].lend != grant.lend:
                changes[grant.worker].append(now)
            newest[grant.worker] = grant
    for times in changes.values():
        assert all(after - before >= config.dwell_seconds for before, after in pairwise(times))
        assert times[-1] < 300, f"still changing: {times}"


def test_grace_time_is_positive_and_shorter_than_a_lease() -> None:
    assert 0 < GRACE_SECONDS < CONFIG.lease_seconds
