"""A simulation: the slack alone is not enough, and the occupancy guard bounds the held requests.

Serving keeps every deadline and still holds many times the requests that it would hold alone, by Little's law.
"""

from functools import cache

import pytest

from rose.workers.lender.admission import STRICT
from tests.support.lender_fixtures import LenderSimulation, SimulationResult, run

LIGHT = LenderSimulation()
HEAVY = LenderSimulation(prompt=8, token=0.0006)
"""The token work takes more than half of the time: any further stretch grows without bound."""

BURSTY = LenderSimulation(rate=10.0, burst=10.0, token=0.00006)

WORLDS = pytest.mark.parametrize("simulation", [LIGHT, HEAVY, BURSTY], ids=["light", "heavy", "bursty"])
SEEDS = pytest.mark.parametrize("seed", [1, 2])


@cache
def seen(simulation: LenderSimulation, dial: float | None, seed: int) -> SimulationResult:
    return run(simulation, dial, seed)


@SEEDS
def test_slack_without_the_guard_raises_occupancy_fivefold_without_late_tokens(seed: int) -> None:
    alone, slack = seen(LIGHT, None, seed), seen(LIGHT, 1.0, seed)
    assert slack.served == alone.served
    assert slack.longest_gap < 0.03
    assert slack.occupancy > 5 * alone.occupancy


@SEEDS
@WORLDS
@pytest.mark.parametrize("dial", [0.2, 0.5])
def test_guard_keeps_occupancy_within_the_dial(simulation: LenderSimulation, dial: float, seed: int) -> None:
    """The comparison is with the strict dial: the wait for a step that began earlier belongs to the yield bound."""
    strict, slo = seen(simulation, STRICT, seed), seen(simulation, dial, seed)
    assert slo.served == strict.served
    assert slo.occupancy < 1.1 * strict.occupancy / (1 - dial)
    assert slo.guest_tokens > 1.02 * strict.guest_tokens


@SEEDS
@WORLDS
def test_strict_dial_leaves_occupancy_as_without_guest(simulation: LenderSimulation, seed: int) -> None:
    alone, strict = seen(simulation, None, seed), seen(simulation, STRICT, seed)
    assert strict.occupancy < alone.occupancy + simulation.rate * 0.02
    assert strict.guest_tokens > 0
