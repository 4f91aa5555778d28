"""Runs the arms of a scenario one after the other, and serving alone for the same time.

Keeps true
- An arm is compared with serving alone over the same simulated seconds, with the same requests of users.
- Arms whose serving fleet and users are equal share one simulation of serving alone.
- One fleet of an arm is in memory at a time.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial

import msgspec

from rose.pipeline.simulation.fleet import Fleet
from rose.pipeline.simulation.recorder import Recorder
from rose.pipeline.simulation.results import (
    ScenarioResult,
    UserFigures,
    arm_figures,
    compare,
    user_figures,
    with_alone,
)
from rose.pipeline.simulation.scenario import Elastic, Pool, Scenario, Tasks, Training

Watch = Callable[[str, Fleet, float | None], AbstractContextManager[None]]
"""Shows the progress of a fleet for as long as it runs, given its name and the simulated second of its end if known."""


def run_arms(
    name: str,
    scenarios: Mapping[str, Scenario],
    *,
    watch: Watch,
    ended: Callable[[str, Fleet], None],
    recorders: Mapping[str, Recorder],
) -> ScenarioResult:
    """Run all arms of a scenario. Raises Stalled.

    Args:
        name: Name of the scenario.
        scenarios: The scenario of each arm.
        watch: Shows the progress.
        ended: Called with each arm and its fleet, when the arm has ended.
        recorders: The recorders of arms that are recorded.
    """
    arms, ends = {}, {}
    for arm, scenario in scenarios.items():
        fleet = Fleet(scenario, recorders.get(arm))
        with watch(f"{name}, {arm}", fleet, None):
            fleet.run()
        ended(arm, fleet)
        arms[arm], ends[arm] = arm_figures(fleet), fleet.events.now
    alone = serve_alone(scenarios, ends, partial(watch, f"{name}, serving alone"))
    return compare(name, scenarios, {arm: with_alone(figures, alone.get(arm)) for arm, figures in arms.items()})


def serve_alone(
    scenarios: Mapping[str, Scenario],
    ends: Mapping[str, float],
    watch: Callable[[Fleet, float | None], AbstractContextManager[None]],
) -> dict[str, UserFigures]:
    """Return what the users of each arm see up to its end, in seconds, if the fleet only serves."""
    fleets: dict[bytes, Fleet] = {}
    found: dict[str, UserFigures] = {}
    for arm in sorted(ends, key=lambda each: ends[each]):
        if scenarios[arm].users is None:
            continue
        only = only_serving(scenarios[arm])
        key = msgspec.json.encode(only)
        if key not in fleets:
            fleets[key] = Fleet(only)
        fleet = fleets[key]
        if not _has_reached(fleet, ends[arm]):
            with watch(fleet, ends[arm]):
                fleet.events.run_until(partial(_has_reached, fleet, ends[arm]), latest=math.inf)
        if (figures := user_figures(fleet)) is not None:
            found[arm] = figures
    return found


def _has_reached(fleet: Fleet, seconds: float) -> bool:
    return fleet.events.now >= seconds


def only_serving(scenario: Scenario) -> Scenario:
    """Return a scenario with the same serving fleet and users, and nothing else."""
    lending = scenario.lending
    if lending is None:
        raise ValueError(f"the scenario {scenario.name} has no serving fleet")
    return Scenario(
        name=scenario.name,
        seed=scenario.seed,
        dedicated=(Pool(profile=lending.guest_profile, count=0),),
        lending=msgspec.structs.replace(lending, dial=0.0),
        users=scenario.users,
        tasks=Tasks(groups=1),
        training=Training(),
        elastic=Elastic(how="none"),
    )
