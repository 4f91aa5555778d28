"""Laws of liveness."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.routing.liveness import FORGET_SECONDS, Liveness, Standing
from tests.unit.routing_world import TTL_SECONDS, heartbeat

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("beat"), st.integers(1, 3), st.integers(-1, 4)),
        st.tuples(st.just("publish"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("hold"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("time"), st.sampled_from([1, 5, 19, 20, 21]), st.just(0)),
    ),
    max_size=60,
)


@given(EVENTS)
def test_nobody_is_live_without_proof_and_what_is_held_comes_back_once(events: list[tuple[str, int, int]]) -> None:
    liveness = Liveness(max_lag_versions=1)
    now = 0.0
    held: list[str] = []
    returned: list[str] = []
    for what, value, version in events:
        before = liveness.executors.get("w0")
        was = before.standing if before is not None else Standing.GONE
        was_incarnation = before.incarnation if before is not None else 0
        if what == "beat":
            returned += liveness.heard(heartbeat(0, incarnation=value, policy_version=version), now)
        elif what == "publish":
            liveness.published(value)
        elif what == "hold" and before is not None and before.standing is Standing.LIVE:
            name = f"g:{len(held)}"
            held.append(name)
            before.holds[name] = None
        elif what == "time":
            now += value / 10
            for executor in liveness.expire(now):
                returned += executor.holds
                executor.holds.clear()
        after = liveness.executors.get("w0")
        if after is None:
            continue
        if after.standing is Standing.LIVE:
            assert after.beat is not None and liveness.lag(after) <= 1 and after.expires > now - 1e-9
            if was is not Standing.LIVE or after.incarnation != was_incarnation:
                assert after.beat.policy_version >= max(0, liveness.current_version), "LIVE without proof"
    present = liveness.executors.get("w0")
    still = list(present.holds) if present is not None else []
    assert sorted(returned + still) == sorted(held)


def test_an_executor_is_live_until_its_ttl_and_then_gone() -> None:
    liveness = Liveness(max_lag_versions=0)
    liveness.published(0)
    liveness.heard(heartbeat(0), 10.0)
    assert liveness.expire(10.0 + TTL_SECONDS - 0.01) == []
    (gone,) = liveness.expire(10.0 + TTL_SECONDS)
    assert gone.standing is Standing.GONE
    liveness.heard(heartbeat(0, policy_version=-1), 13.0)
    assert liveness.executors["w0"].standing is Standing.STALE


def test_an_older_start_is_ignored_until_the_executor_is_forgotten() -> None:
    liveness = Liveness(max_lag_versions=0)
    liveness.heard(heartbeat(0, incarnation=5), 0.0)
    liveness.heard(heartbeat(0, incarnation=4), 1.0)
    assert liveness.executors["w0"].incarnation == 5
    liveness.expire(5.0)
    assert liveness.forget(5.0) == []
    assert liveness.forget(TTL_SECONDS + FORGET_SECONDS) == ["w0"] and not liveness.executors


def test_an_executor_too_far_behind_is_stale_until_it_has_caught_up() -> None:
    liveness = Liveness(max_lag_versions=1)
    liveness.heard(heartbeat(0), 0.0)
    standings = []
    for version in (1, 2):
        liveness.published(version)
        standings.append(liveness.executors["w0"].standing)
    for shown in (1, 2):
        liveness.heard(heartbeat(0, policy_version=shown), 0.1)
        standings.append(liveness.executors["w0"].standing)
    # One behind keeps a LIVE one, it makes none.
    assert standings == [Standing.LIVE, Standing.STALE, Standing.STALE, Standing.LIVE]
