"""A lease: the grant, its source, and its duration by the executor's own clock."""

from dataclasses import replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rose.schemas.grants import CapacityGrant, GrantSource, grant_key, parse_grant_key
from rose.workers.executor.grants import UNRESTRICTED, Lease

JOB = "ns.:run"


def grant(
    *, lend: bool = True, lease: float = 30.0, at: float = 0.0, job: str = JOB, reason: str = ""
) -> CapacityGrant:
    return CapacityGrant(
        worker="e",
        lend=lend,
        kv_bytes=7,
        token_budget=8,
        granted_at=at,
        reason=reason,
        lease_seconds=lease,
        job=job,
    )


def of(*taken: CapacityGrant, needed: bool = False, seen: bool = True, now: float = 0.0) -> Lease:
    lease = Lease(JOB, grant_required=needed)
    for each in taken:
        lease.on_grant(each, now, source=GrantSource.LEASED if each.lease_seconds else GrantSource.BY_HAND, live=seen)
    return lease


def test_lender_without_grant_lends_fully_unless_a_grant_is_required() -> None:
    assert of().permission(0.0) == UNRESTRICTED
    assert "needs one" in str(of(needed=True).permission(0.0).denied_reason)


def test_lease_expires_by_the_clock_of_the_lender_and_is_renewed() -> None:
    lease = of(grant(at=1e9), now=100.0)
    assert not lease.permission(129.9).denied_reason and lease.permission(129.9).kv_bytes == 7
    assert "its grant ran out" in str(lease.permission(130.0).denied_reason)
    renewed = grant(at=1e9 + 10, reason="fewer turns wait")
    assert not lease.on_grant(renewed, 125.0, source=GrantSource.LEASED, live=True), "it says nothing new"
    assert not lease.permission(154.9).denied_reason
    assert lease.permission(155.0).denied_reason


def test_lease_read_back_is_not_valid_before_its_renewal() -> None:
    lease = of(grant(), seen=False)
    assert "not renewed" in str(lease.permission(0.0).denied_reason)
    lease.on_grant(grant(at=1.0), 5.0, source=GrantSource.LEASED, live=True)
    assert not lease.permission(5.0).denied_reason


def test_grants_read_again_after_an_error_neither_start_nor_end_a_lease() -> None:
    lease = of(grant(), now=0.0)
    lease.on_grant(grant(), 20.0, source=GrantSource.LEASED, live=False)
    assert not lease.permission(29.0).denied_reason
    lease.on_grant(grant(), 29.0, source=GrantSource.LEASED, live=True)
    assert lease.permission(30.0).denied_reason


def test_unseen_renewal_neither_ends_nor_extends_a_lease() -> None:
    lease = of(grant(), now=0.0)
    lease.on_grant(grant(at=10.0), 10.0, source=GrantSource.LEASED, live=False)
    assert not lease.permission(29.9).denied_reason
    assert "its grant ran out" in str(lease.permission(30.0).denied_reason)
    lease.on_grant(grant(at=20.0, lease=5.0), 20.0, source=GrantSource.LEASED, live=False)
    assert not lease.permission(24.9).denied_reason and lease.permission(25.0).denied_reason, "a shorter one is shorter"


def test_unseen_changed_grant_is_not_valid() -> None:
    lease = of(grant(), now=0.0)
    lease.on_grant(msgspec.structs.replace(grant(at=10.0), token_budget=9), 10.0, source=GrantSource.LEASED, live=False)
    assert "not renewed" in str(lease.permission(10.0).denied_reason)


def test_manual_grant_survives_restarts_and_overrides_until_deleted() -> None:
    lease = of(grant(lend=False, lease=0.0, reason="night"), seen=False)
    lease.on_grant(grant(), 0.0, source=GrantSource.LEASED, live=True)
    assert lease.permission(1.0).denied_reason == "a grant parked it: night"
    lease.on_grant(None, 2.0, source=GrantSource.BY_HAND, live=True)
    assert not lease.permission(2.0).denied_reason
    lease.on_grant(grant(lease=0.0, job=""), 2.0, source=GrantSource.BY_HAND, live=True)
    assert not lease.permission(1e6).denied_reason, "it does not run out"


def test_lender_with_deleted_leases_lends_nothing_before_a_new_grant() -> None:
    for new_grant in (grant(), grant(lend=False)):
        for seen in (True, False):
            lease = of(new_grant, seen=seen, now=0.0)
            assert lease.on_grant(None, 5.0, source=GrantSource.LEASED, live=seen)
            assert lease.permission(5.0).denied_reason and lease.permission(1e6).denied_reason
            lease.on_grant(grant(at=6.0), 6.0, source=GrantSource.LEASED, live=True)
            assert not lease.permission(6.0).denied_reason


def test_grant_for_another_job_parks_the_lender() -> None:
    refused = str(of(grant(job="ns.:other")).permission(0.0).denied_reason)
    assert "ns.:other" in refused and JOB in refused


# An equal grant with an equal timestamp is the same grant, read again.
@given(st.lists(st.tuples(st.floats(0.01, 20.0), st.booleans(), st.floats(1.0, 30.0)), max_size=20), st.floats(0, 100))
def test_lending_ends_one_lease_after_the_last_seen_renewal(
    renewals: list[tuple[float, bool, float]], after: float
) -> None:
    lease, now, until = Lease(JOB, grant_required=False), 0.0, 0.0
    for gap, seen, seconds in renewals:
        now += gap
        lease.on_grant(grant(lease=seconds, at=now), now, source=GrantSource.LEASED, live=seen)
        until = now + seconds if seen else min(until, now + seconds)
    if renewals:
        assert bool(lease.permission(now + after).denied_reason) == (now + after >= until)


def drain(seconds: float = 0.0) -> CapacityGrant:
    return CapacityGrant(
        worker="e", lend=False, kv_bytes=0, token_budget=0, granted_at=0.0, reason="disk", finish_seconds=seconds
    )


def test_drain_overrides_grants_gives_its_time_once_and_keeps_the_grants() -> None:
    lease = of(grant(lease=0.0, job=""), now=0.0)
    assert lease.on_grant(drain(60.0), 10.0, source=GrantSource.DRAIN, live=True)
    lease.on_grant(drain(60.0), 50.0, source=GrantSource.DRAIN, live=False)  # read again after a bus error
    permissions = [lease.permission(now) for now in (10.0, 69.9, 70.0)]
    assert {each.denied_reason for each in permissions} == {"it is drained: disk"}
    assert [each.may_finish for each in permissions] == [True, True, False]
    lease.on_grant(None, 80.0, source=GrantSource.DRAIN, live=True)
    assert (lease.permission(80.0).denied_reason, lease.permission(80.0).kv_bytes) == (None, 7)


def test_dedicated_executor_follows_only_drains() -> None:
    lease = Lease()
    for grant_source in (GrantSource.LEASED, GrantSource.BY_HAND):
        lease.on_grant(grant(lend=False), 0.0, source=grant_source, live=True)
    assert lease.permission(0.0) == UNRESTRICTED
    lease.on_grant(drain(), 0.0, source=GrantSource.DRAIN, live=False)
    assert lease.permission(0.0).denied_reason and not lease.permission(0.0).may_finish


def test_newest_cell_grant_applies_to_every_executor_kind_and_changes_only_the_cell() -> None:
    for lease in (Lease(), of(grant(lend=False, lease=0.0, reason="night"))):
        before = lease.permission(0.0)
        for cell in (3, 1):
            named = CapacityGrant(worker="e", lend=True, kv_bytes=0, token_budget=0, granted_at=0.0, cell=cell)
            assert lease.on_grant(named, 0.0, source=GrantSource.CELL, live=False)
            assert lease.permission(1e6) == replace(before, cell=cell)
        lease.on_grant(drain(), 0.0, source=GrantSource.DRAIN, live=True)
        assert (lease.permission(0.0).denied_reason, lease.permission(0.0).cell) == ("it is drained: disk", 1)


@given(st.sampled_from(GrantSource), st.from_regex(r"[A-Za-z0-9._:-]{1,128}", fullmatch=True))
def test_grant_key_names_source_and_executor(grant_source: GrantSource, worker: str) -> None:
    assert parse_grant_key(grant_key(worker, grant_source)) == (worker, grant_source)
    assert parse_grant_key(f"{worker}/else") == (worker, None)
