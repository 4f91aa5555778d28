"""Estimates what observed servers would lend: each is simulated as it was recorded, with rollouts that never run out.

Keeps true
- A server is simulated for as long as it was recorded, minute by minute, once beside a guest and once alone.
- Figures of a day are those of the recorded time of each server, scaled to 24 hours. Latencies
  are over all requests and all tokens.
- What is assumed instead of recorded is part of the estimate.
- The same recordings, assumptions and seed give the same estimate.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from rose.pipeline.simulation.comparison import Watch, only_serving
from rose.pipeline.simulation.cost_model import load_profile
from rose.pipeline.simulation.fleet import Fleet
from rose.pipeline.simulation.recorded_load import MINUTE, RecordedMinute, minutes_of
from rose.pipeline.simulation.results import UserFigures, UserTotals, lent_gpu_seconds
from rose.pipeline.simulation.scenario import Lending, Pool, Scenario, Tasks, Users, longest_requests
from rose.schemas.errors import UsageError
from rose.workers.lender.recording import Row, read_recording

DAY_SECONDS, HOUR_SECONDS = 86_400.0, 3600.0

OPEN_GROUPS = 4
"""Groups of trajectories that are open at any time: four times as many trajectories as a guest holds turns."""

GUEST_TURNS = 16
"""Most turns that a guest holds at once (ROSE's paper: 16 for Qwen3 at 32k)."""

TASKS = Tasks(groups=1_000_000_000)
"""The rollouts. No training step ever has all its groups, so that no version is published."""

TOP_UP_SECONDS = 1.0
"""Time between two looks at the number of open trajectories."""


class Assumptions(msgspec.Struct, frozen=True, kw_only=True):
    """Assumptions about what recordings do not tell. Lengths are medians of log-normal distributions."""

    serving_profile: str
    guest_profile: str
    prompt_tokens: int
    """Prompt of a user's request."""
    new_tokens: int
    """Answer to a user's request."""
    ttft_seconds: float
    """Promise to the users: time to the first token."""
    tpot_seconds: float
    """Promise to the users: time between two tokens."""
    seed: int = 0


class FleetMinute(msgspec.Struct, frozen=True, kw_only=True):
    """One minute of the clock, over all servers that were recorded in it."""

    minute: int
    """Minutes since the Unix epoch."""
    servers: int
    busy: float
    """Recorded busy share, on average over the servers."""
    lent: float
    """Share of the servers' time in which a guest computed."""
    tokens: int
    """Tokens of rollout turns that ended in this minute."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The capacity that a fleet would have lent."""

    servers: int
    gpus: int
    recorded_hours: float
    """Recorded time of all servers together."""
    tokens_per_day: float
    """Tokens that the rollouts sample on the fleet in a day."""
    turns_per_day: float
    trajectories_per_day: float
    lent_gpu_hours_per_day: float
    lent_share: float
    """Share of the GPU time of the fleet that is lent."""
    busy: float
    """Recorded share of the time in which a server had requests."""
    simulated_busy: float
    """The same share in the simulation of serving alone: how well the simulation meets the recording."""
    kv_most: float
    """Most KV memory that the users' requests held, as a share of a server's KV memory. Recorded."""
    cuts_per_day: float
    """Times that serving takes KV memory back."""
    lending: UserFigures | None
    """Latencies of the users while the fleet lends; None without requests."""
    alone: UserFigures | None
    """Latencies of the same users if the fleet lends nothing."""
    assumed: Assumptions
    minutes: tuple[FleetMinute, ...]


class _Totals:
    """Sums over the servers."""

    def __init__(self) -> None:
        self.lending, self.alone = UserTotals(), UserTotals()
        self.gpus = 0
        self.recorded_seconds = self.kv_most = 0.0
        self.busy = self.simulated_busy = 0.0
        """Sums of the busy shares."""
        self.tokens = self.turns = self.trajectories = self.cuts = self.lent_gpu_seconds = 0.0
        """The figures, scaled to a day."""
        self.minutes: defaultdict[int, list[tuple[float, float, int]]] = defaultdict(list)
        """Recorded busy share, lent share and tokens of each server, by minute."""


def estimate(files: Sequence[Path], assumed: Assumptions, watch: Watch) -> Estimate:
    """Return what the recorded servers would have lent; one recording for each server.

    Raises UsageError for a recording or a profile, or Stalled.
    """
    recordings = [read_recording(file) for file in files]
    totals = _Totals()
    for number, (file, rows) in enumerate(zip(files, recordings, strict=True)):
        _simulate(totals, _scenario(file, assumed, number), rows, watch)
    return Estimate(
        servers=len(files),
        gpus=totals.gpus,
        recorded_hours=totals.recorded_seconds / HOUR_SECONDS,
        tokens_per_day=totals.tokens,
        turns_per_day=totals.turns,
        trajectories_per_day=totals.trajectories,
        lent_gpu_hours_per_day=totals.lent_gpu_seconds / HOUR_SECONDS,
        lent_share=totals.lent_gpu_seconds / (totals.gpus * DAY_SECONDS),
        busy=totals.busy / len(files),
        simulated_busy=totals.simulated_busy / len(files),
        kv_most=totals.kv_most,
        cuts_per_day=totals.cuts,
        lending=totals.lending.figures(),
        alone=totals.alone.figures(),
        assumed=assumed,
        minutes=tuple(_fleet_minutes(totals)),
    )


def _scenario(file: Path, assumed: Assumptions, number: int) -> Scenario:
    """Return the scenario of one server, which only lends and serves; `number` tells the servers apart.

    Raises UsageError if the requests of users do not fit into the server's memory.
    """
    prompt, new = longest_requests(load_profile(assumed.serving_profile).kv_cache_tokens)
    if assumed.prompt_tokens > prompt or assumed.new_tokens > new:
        raise UsageError(
            f"requests of {assumed.prompt_tokens} + {assumed.new_tokens} tokens are too long for the KV memory of "
            f"{assumed.serving_profile}: the medians may be up to {prompt} and {new}"
        )
    return Scenario(
        name=file.stem,
        seed=1000 * assumed.seed + number,
        dedicated=(Pool(profile=assumed.guest_profile, count=0),),
        lending=Lending(
            serving_profile=assumed.serving_profile,
            guest_profile=assumed.guest_profile,
            count=1,
            max_turns=GUEST_TURNS,
            ttft_seconds=assumed.ttft_seconds,
            tpot_seconds=assumed.tpot_seconds,
        ),
        users=Users(
            recording=(str(file),),
            prompt_tokens=assumed.prompt_tokens,
            new_tokens=assumed.new_tokens,
        ),
        tasks=TASKS,
    )


def _simulate(totals: _Totals, scenario: Scenario, rows: Sequence[Row], watch: Watch) -> None:
    """Simulate one server, and add what it did."""
    minutes = minutes_of([rows])
    seconds = float(MINUTE * len(minutes))
    fleet, noted = Fleet(scenario), _Noted()
    fleet.events.repeat(TOP_UP_SECONDS, partial(_top_up, fleet))
    fleet.events.repeat(MINUTE, partial(_note, totals, fleet, minutes, noted), first=MINUTE)
    with watch(f"{scenario.name}, lending", fleet, seconds):
        _run(fleet, seconds)
    fleet.check()
    alone = Fleet(only_serving(scenario))
    with watch(f"{scenario.name}, serving alone", alone, seconds):
        _run(alone, seconds)
    (server,), per_day = fleet.lenders, DAY_SECONDS / seconds
    totals.gpus += server.serving.engine.cost.tensor_parallel
    totals.recorded_seconds += sum(row.seconds for row in rows)
    totals.busy += sum(minute.busy for minute in minutes) / len(minutes)
    totals.simulated_busy += alone.serving[0].engine.busy_seconds / seconds
    totals.tokens += per_day * noted.tokens
    totals.turns += per_day * noted.turns
    totals.trajectories += per_day * fleet.rollout.finished
    totals.cuts += per_day * server.cuts
    totals.lent_gpu_seconds += per_day * lent_gpu_seconds(fleet)
    totals.kv_most = max(totals.kv_most, *(row.kv_bytes_most / row.kv_bytes_total for row in rows))
    totals.lending.add(fleet)
    totals.alone.add(alone)


class _Noted:
    """Totals of a fleet so far."""

    minutes = tokens = turns = 0
    lent_seconds = 0.0


def _note(totals: _Totals, fleet: Fleet, minutes: Sequence[RecordedMinute], noted: _Noted) -> None:
    """Add the minute that ends now, and forget its turns: those of a whole day would fill the memory."""
    minute, (server,) = minutes[noted.minutes], fleet.lenders
    tokens = sum(turn.new_tokens for turn in fleet.rollout.turns)
    lent = server.engine.busy_seconds - noted.lent_seconds
    totals.minutes[minute.minute].append((minute.busy, lent / MINUTE, tokens))
    noted.tokens += tokens
    noted.turns += len(fleet.rollout.turns)
    noted.minutes += 1
    noted.lent_seconds += lent
    fleet.rollout.turns.clear()
    server.attempts.clear()


def _top_up(fleet: Fleet) -> None:
    while len(fleet.rollout.live) <= (OPEN_GROUPS - 1) * TASKS.group_size:
        fleet.rollout.open_group()


def _run(fleet: Fleet, seconds: float) -> None:
    """Run all events up to a second of the simulation."""
    ended: list[bool] = []
    fleet.events.at(math.nextafter(seconds, math.inf), partial(ended.append, True))
    fleet.events.run_until(lambda: bool(ended), latest=math.inf)


def _fleet_minutes(totals: _Totals) -> Iterable[FleetMinute]:
    for minute, seen in sorted(totals.minutes.items()):
        busy, lent, tokens = zip(*seen, strict=True)
        yield FleetMinute(
            minute=minute,
            servers=len(seen),
            busy=sum(busy) / len(seen),
            lent=sum(lent) / len(seen),
            tokens=sum(tokens),
        )
