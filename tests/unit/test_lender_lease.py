"""A lease: what was granted, by whom, for how long by the executor's own clock."""

from dataclasses import replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from schemas.capacity import CapacityGrant, Voice, key_of, spoken_in
from workers.executor.gate import FREELY
from workers.executor.lease import Lease

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
    lease = Lease(JOB, needed=needed)
    for each in taken:
        lease.take(each, now, voice=Voice.LEASED if each.lease_seconds else Voice.BY_HAND, seen=seen)
    return lease


def test_without_a_grant_it_lends_all_unless_it_needs_one() -> None:
    assert of().leave(0.0) == FREELY
    assert "needs one" in of(needed=True).leave(0.0).refused


def test_a_lease_runs_out_by_the_lenders_clock_and_is_renewed() -> None:
    lease = of(grant(at=1e9), now=100.0)
    assert not lease.leave(129.9).refused and lease.leave(129.9).kv_bytes == 7
    assert "its grant ran out" in lease.leave(130.0).refused
    renewed = grant(at=1e9 + 10, reason="fewer turns wait")
    assert not lease.take(renewed, 125.0, voice=Voice.LEASED, seen=True), "it says nothing new"
    assert not lease.leave(154.9).refused
    assert lease.leave(155.0).refused


def test_what_was_read_back_holds_nothing_before_it_is_renewed() -> None:
    lease = of(grant(), seen=False)
    assert "not renewed" in lease.leave(0.0).refused
    lease.take(grant(at=1.0), 5.0, voice=Voice.LEASED, seen=True)
    assert not lease.leave(5.0).refused


def test_what_is_read_again_after_trouble_with_the_bus_begins_no_new_lease_and_ends_none() -> None:
    lease = of(grant(), now=0.0)
    lease.take(grant(), 20.0, voice=Voice.LEASED, seen=False)
    assert not lease.leave(29.0).refused
    lease.take(grant(), 29.0, voice=Voice.LEASED, seen=True)
    assert lease.leave(30.0).refused


def test_a_renewal_that_was_not_seen_ends_no_lease_and_makes_none_longer() -> None:
    lease = of(grant(), now=0.0)
    lease.take(grant(at=10.0), 10.0, voice=Voice.LEASED, seen=False)
    assert not lease.leave(29.9).refused
    assert "its grant ran out" in lease.leave(30.0).refused
    lease.take(grant(at=20.0, lease=5.0), 20.0, voice=Voice.LEASED, seen=False)
    assert not lease.leave(24.9).refused and lease.leave(25.0).refused, "a shorter one is shorter"


def test_what_was_not_seen_and_says_something_new_holds_nothing() -> None:
    lease = of(grant(), now=0.0)
    lease.take(msgspec.structs.replace(grant(at=10.0), token_budget=9), 10.0, voice=Voice.LEASED, seen=False)
    assert "not renewed" in lease.leave(10.0).refused


def test_a_grant_by_hand_holds_across_starts_and_overrides_until_it_is_deleted() -> None:
    lease = of(grant(lend=False, lease=0.0, reason="night"), seen=False)
    lease.take(grant(), 0.0, voice=Voice.LEASED, seen=True)
    assert lease.leave(1.0).refused == "a grant parked it: night"
    lease.take(None, 2.0, voice=Voice.BY_HAND, seen=True)
    assert not lease.leave(2.0).refused
    lease.take(grant(lease=0.0, job=""), 2.0, voice=Voice.BY_HAND, seen=True)
    assert not lease.leave(1e6).refused, "it does not run out"


def test_who_followed_leases_lends_nothing_once_they_are_deleted_before_it_is_told_again() -> None:
    for told in (grant(), grant(lend=False)):
        for seen in (True, False):
            lease = of(told, seen=seen, now=0.0)
            assert lease.take(None, 5.0, voice=Voice.LEASED, seen=seen)
            assert lease.leave(5.0).refused and lease.leave(1e6).refused
            lease.take(grant(at=6.0), 6.0, voice=Voice.LEASED, seen=True)
            assert not lease.leave(6.0).refused


def test_a_grant_that_names_another_job_parks_it() -> None:
    refused = of(grant(job="ns.:other")).leave(0.0).refused
    assert "ns.:other" in refused and JOB in refused


# What was granted at the same moment in the same words is the same grant, read again.
@given(st.lists(st.tuples(st.floats(0.01, 20.0), st.booleans(), st.floats(1.0, 30.0)), max_size=20), st.floats(0, 100))
def test_nobody_lends_longer_than_a_lease_after_the_last_renewal_that_was_seen(
    renewals: list[tuple[float, bool, float]], after: float
) -> None:
    lease, now, until = Lease(JOB, needed=False), 0.0, 0.0
    for gap, seen, seconds in renewals:
        now += gap
        lease.take(grant(lease=seconds, at=now), now, voice=Voice.LEASED, seen=seen)
        until = now + seconds if seen else min(until, now + seconds)
    if renewals:
        assert bool(lease.leave(now + after).refused) == (now + after >= until)


def drain(seconds: float = 0.0) -> CapacityGrant:
    return CapacityGrant(
        worker="e", lend=False, kv_bytes=0, token_budget=0, granted_at=0.0, reason="disk", finish_seconds=seconds
    )


def test_a_drain_overrides_all_leaves_its_time_once_and_leaves_what_was_granted_as_it_was() -> None:
    lease = of(grant(lease=0.0, job=""), now=0.0)
    assert lease.take(drain(60.0), 10.0, voice=Voice.DRAIN, seen=True)
    lease.take(drain(60.0), 50.0, voice=Voice.DRAIN, seen=False)  # read again after trouble with the bus
    said = [lease.leave(now) for now in (10.0, 69.9, 70.0)]
    assert {each.refused for each in said} == {"it is drained: disk"}
    assert [each.finishing for each in said] == [True, True, False]
    lease.take(None, 80.0, voice=Voice.DRAIN, seen=True)
    assert (lease.leave(80.0).refused, lease.leave(80.0).kv_bytes) == ("", 7)


def test_who_is_no_lender_follows_a_drain_and_nothing_else() -> None:
    lease = Lease()
    for voice in (Voice.LEASED, Voice.BY_HAND):
        lease.take(grant(lend=False), 0.0, voice=voice, seen=True)
    assert lease.leave(0.0) == FREELY
    lease.take(drain(), 0.0, voice=Voice.DRAIN, seen=False)
    assert lease.leave(0.0).refused and not lease.leave(0.0).finishing


def test_the_cell_that_was_named_last_holds_for_everybody_and_changes_nothing_else() -> None:
    for lease in (Lease(), of(grant(lend=False, lease=0.0, reason="night"))):
        before = lease.leave(0.0)
        for cell in (3, 1):
            named = CapacityGrant(worker="e", lend=True, kv_bytes=0, token_budget=0, granted_at=0.0, cell=cell)
            assert lease.take(named, 0.0, voice=Voice.CELL, seen=False)
            assert lease.leave(1e6) == replace(before, cell=cell)
        lease.take(drain(), 0.0, voice=Voice.DRAIN, seen=True)
        assert (lease.leave(0.0).refused, lease.leave(0.0).cell) == ("it is drained: disk", 1)


@given(st.sampled_from(Voice), st.from_regex(r"[A-Za-z0-9._:-]{1,128}", fullmatch=True))
def test_a_key_says_who_speaks_of_whom(voice: Voice, worker: str) -> None:
    assert spoken_in(key_of(worker, voice)) == (worker, voice)
    assert spoken_in(f"{worker}/else") == (worker, None)
