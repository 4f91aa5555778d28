"""A simulated lender serves first, gives memory back without losing a turn, and holds nothing while it is parked."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rose.pipeline.simulation.cost_model import load_profile, write_profile
from rose.pipeline.simulation.engine import EngineRequest, EngineResult
from rose.pipeline.simulation.fleet import Fleet
from rose.pipeline.simulation.lender import LendingServer
from rose.pipeline.simulation.prefix_cache import Segment
from tests.support.simulation_fixtures import PROFILE, scenario


def fleet_of(profile: str = PROFILE, lending: dict[str, Any] | None = None, **changes: Any) -> Fleet:
    """Return a fleet that has lenders only, by default one that strictly serves first."""
    part = {"serving_profile": profile, "guest_profile": profile, "count": 1, "max_turns": 4, **(lending or {})}
    return Fleet(scenario(**{"dedicated": [], "lending": part, "elastic": {"how": "lend"}, **changes}))


def until(fleet: Fleet, seconds: float) -> None:
    fleet.events.run_until(lambda: fleet.events.now >= seconds, latest=seconds + 100.0)


class Users:
    """Users of the first server, by hand; `ended` holds their results."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.lender = fleet.lenders[0]
        self.ended: list[EngineResult] = []
        count = self.lender.serving.on_ended

        def on_ended(result: EngineResult) -> None:
            self.ended.append(result)
            count(result)

        self.lender.serving.on_ended = on_ended  # type: ignore[method-assign]

    def send(self, at: float, prompt: int, new: int) -> None:
        name = f"user at {at}"
        request = EngineRequest(name, (Segment(name, prompt),), new, at)
        self.fleet.events.at(at, lambda: self.lender.on_user_request(request))


def test_user_of_a_strict_server_waits_at_most_for_a_layer_of_the_guest() -> None:
    fleet = fleet_of()
    users, cost = Users(fleet), fleet.lenders[0].cost
    fleet.trainer.start()
    step_seconds: list[float] = []
    for number in range(40):
        at = 20.0 + 1.01371 * number

        def note() -> None:
            guest = fleet.lenders[0].engine
            step_seconds.append(0.0 if guest.paused else guest.plan.first_seconds)

        fleet.events.at(at, note)
        users.send(at, 300, 2)
    until(fleet, 65.0)
    alone = cost.step_seconds(decoding=0, context_tokens=0, chunks=[(300, 0)])
    delays = [each.first_token_at - each.request.arrived_at - alone for each in users.ended]
    assert len(delays) == 40 and sum(delay > 1e-6 for delay in delays) > 10
    for delay, step in zip(delays, step_seconds, strict=True):
        assert -1e-9 <= delay <= step / cost.layers * 1.05 + 1e-9


def test_strict_lending_keeps_the_time_to_the_first_token_of_all_users() -> None:
    few = [{"profile": PROFILE, "count": 1, "max_turns": 2}]
    changes: dict[str, Any] = {"users": {"busy": 0.3}, "dedicated": few}
    alone, lending = fleet_of(**{**changes, "elastic": {"how": "none"}}), fleet_of(**changes)
    alone.trainer.start()
    lending.run()
    until(alone, lending.events.now)
    assert lending.lenders[0].lent_seconds > 1.0
    p99 = [fleet.serving[0].figures.ttft.percentile(0.99) for fleet in (lending, alone)]
    assert p99[0] <= 1.10 * p99[1]


def short_of_memory(folder: Path, kv_tokens: int) -> str:
    profile = load_profile(PROFILE).profile
    memory = msgspec.structs.replace(profile.memory, kv_cache_tokens=kv_tokens)
    (folder / "short.toml").write_text(write_profile(msgspec.structs.replace(profile, memory=memory)))
    return str(folder / "short.toml")


@pytest.mark.parametrize("dial", [0.0, 1.0])
def test_server_short_of_memory_cuts_its_guest_and_no_turn_is_lost(tmp_path: Path, dial: float) -> None:
    profile = short_of_memory(tmp_path, 24_000)
    tasks = {"groups": 2, "group_size": 12, "prompt_tokens": 2000, "context_tokens": 6000}
    users = {"busy": 0.6, "prompt_tokens": 4000, "prompt_spread": 0.3, "new_tokens": 300}
    fleet = fleet_of(profile, {"count": 2, "max_turns": 8, "dial": dial}, tasks=tasks, users=users)
    peak = 0.0

    def look() -> None:
        nonlocal peak
        for lender in fleet.lenders:
            held = lender.engine.held_tokens + lender.serving.engine.held_tokens
            peak = max(peak, held / 24_000)

    fleet.events.repeat(0.01, look)
    fleet.run()
    assert sum(lender.cuts for lender in fleet.lenders) > 3
    assert any(turn.attempts > 1 for turn in fleet.rollout.turns)
    assert peak <= 1.0, "the two tenants hold more than the card has"


def test_guest_shares_a_long_answer_of_the_server_by_slo_and_waits_for_its_end_by_strict() -> None:
    lent: dict[float, list[float]] = {}
    for dial in (0.0, 1.0):
        fleet = fleet_of(lending={"dial": dial})
        users = Users(fleet)
        fleet.trainer.start()
        users.send(20.0, 500, 1500)
        lent[dial] = []
        for seconds in (20.0, 25.0):
            until(fleet, seconds)
            users.lender.engine.count_steps(seconds)
            lent[dial].append(users.lender.lent_seconds)
        assert not users.ended
    assert lent[0.0][0] == pytest.approx(lent[0.0][1], abs=0.02), "the step under way when the user came"
    assert 0.3 * 5.0 < lent[1.0][1] - lent[1.0][0] < 0.7 * 5.0
    assert lent[0.0][0] > 10.0, "the guest had all turns while no user was there"


def test_lender_that_was_killed_while_its_guest_woke_lends_after_its_restart() -> None:
    fleet = fleet_of()
    lender = fleet.lenders[0]
    fleet.trainer.start()
    fleet.events.run_until(lambda: lender._status().suspended_reason == "its guest is being built", latest=60.0)
    lender.kill()
    fleet.events.after(8.0, lambda: lender.restart(fleet.trainer.version))
    fleet.events.run_until(lambda: len(lender.inbox) > 0, latest=120.0)


@pytest.mark.parametrize("how", ["kill", "leave"])
def test_lender_that_comes_back_is_parked_until_it_is_told_to_lend(how: str) -> None:
    fleet = fleet_of()
    lender = fleet.lenders[0]
    fleet.trainer.start()
    fleet.events.run_until(lambda: len(lender.inbox) > 2, latest=60.0)
    lender.kill() if how == "kill" else lender.leave("it leaves")
    assert lender.engine.requests == 0
    lender.restart(fleet.trainer.version)
    assert (lender.version, lender.engine.cache.tokens, lender.engine.kv_tokens) == (-1, 0, 0)
    assert lender.serving.engine.kv_tokens == lender.cost.kv_cache_tokens
    fleet.run()


def test_version_swap_drops_the_cache_of_guest_and_dedicated_executor_alike() -> None:
    fleet = fleet_of(dedicated=[{"profile": PROFILE, "count": 1, "max_turns": 2}])
    fleet.run()
    first: dict[tuple[str, int], int] = {}
    for turn in sorted(fleet.rollout.turns, key=lambda each: each.scheduled_at):
        first.setdefault((turn.worker, turn.version), turn.cached_tokens)
    workers = {worker for worker, version in first if version == 1}
    assert len(workers) == 2
    assert all(first[worker, 1] == 0 for worker in workers), "the first turn of a version finds nothing"


def test_parked_lender_holds_nothing() -> None:
    fleet = fleet_of(dedicated=[{"profile": PROFILE, "count": 2, "max_turns": 2}], users={"busy": 0.1})
    lender, states = fleet.lenders[0], set[bool]()

    def look(executor: LendingServer) -> None:
        parked = executor.version < 0
        states.add(parked)
        if parked:
            assert not len(executor.inbox) and not executor.engine.requests and not executor.engine.cache.tokens
            assert executor.serving.engine.kv_tokens == executor.cost.kv_cache_tokens

    fleet.events.repeat(0.05, lambda: look(lender))
    fleet.run()
    assert states == {True, False}
