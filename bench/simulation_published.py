"""Compares the simulator with figures that others published.

    python -m bench.simulation_published
    python -m bench.simulation_published --mooncake mooncake_trace.jsonl

- `makespan`: PEARL's closed form for one rollout (2026, 32 H800, Qwen3-8B, tensor parallel size 2, groups of 16, batch
  of 64 trajectories, 32k tokens). PEARL assumes that all trajectories are alike and make their turns in step, so the
  simulated trajectories have no spread. PEARL also assumes that every engine has its share of the trajectories and
  keeps their prefixes, as ROLL's router does: so the bound is on the policy `session`. Rows show ROSE's router beside
  the policy. The coefficients of the form (decode step `A + b * batch`, seconds of a prefill token) come from the
  simulator's own cost model. So the comparison is of the structure: batching, chunked prefill, placement. PEARL's
  second model, Qwen3-30B-A3B, has no profile; Qwen3-32B takes its place.
- `hits`: the share of the blocks of Mooncake's trace (`--mooncake`, 23,608 requests) that LRU caches of several sizes
  hold, in the simulator's prefix cache. Each block of 512 tokens is one segment, a partial last block too; a hit is a
  block before the first block that is not cached (Mooncake#4020).
- `pools`: RollArt's pools of equal cost (OSDI '26): 72 H800, 208 H20, 64 H800 with 24 H20. The scenarios
  `rollart-*.toml` have tasks that mostly prefill and tasks that mostly decode, half of each; their arm `rose` is the
  mixed pool. ROSE's router decides the placement by its own prediction. The trainer is asynchronous as RollArt's, and
  the figure is the time of a step, without the warm-up. RollArt publishes no lengths:
  `rollart-8b-long.toml` has longer observations.

`--json FILE` writes one object with `checks` and all rows. Exit status 1 if a bound is missed.
"""

import sys
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

from bench.check import Check, Section, keep, options, say
from rose.pipeline.simulation.cost_model import CostModel, load_profile
from rose.pipeline.simulation.fleet import Fleet
from rose.pipeline.simulation.prefix_cache import PrefixCache, Segment
from rose.pipeline.simulation.results import measured
from rose.pipeline.simulation.scenario import Elastic, Pool, Routing, Scenario, Tasks, Training, load_scenario
from rose.workers.loadgen.traces import BLOCK_TOKENS, read_trace

TOLERANCE = 0.15
"""Largest relative difference from PEARL's closed form."""

HIT_TOLERANCE = 0.01

LEAST_GAIN, MOST_GAIN = 1.1, 1.7
"""RollArt reports that the mixed pool is faster than a pure pool by a factor between these."""

BATCH, GROUP = 64, 16
"""Trajectories of a rollout, and of a group."""

ENGINES = (8, 12)
"""PEARL gives 16 to 24 of its 32 GPUs to rollouts; an engine has two."""

PROFILES = ("qwen3-8b-h800-tp2", "qwen3-32b-h800-tp2")

PUBLISHED_HITS = {1_000: 0.341, 10_000: 0.460, 30_000: 0.537, 50_000: 0.551, 100_000: 0.552, None: 0.553}
"""Hit rate by the cache's blocks; None is a cache without bound."""

POOLS = ("rollart-8b.toml", "rollart-32b.toml", "rollart-8b-long.toml")

SCENARIOS = Path(__file__).parent / "scenarios"


class Turns(NamedTuple):
    """The shape of every trajectory of a rollout."""

    name: str
    turns: int
    new_context: int
    """Tokens of each observation; the prompt has as many."""
    sampled: int
    """Tokens that each turn samples."""


SHAPES = (
    Turns("3 % of the tokens are sampled, as PEARL measured", turns=20, new_context=1450, sampled=50),
    Turns("a third of the tokens is sampled", turns=20, new_context=1000, sampled=500),
)
"""Both fill about 30,000 of the 32k tokens."""


def rollout_of(profile: str, engines: int, shape: Turns, routing: Literal["session", "rose"]) -> Scenario:
    """Return a scenario with one rollout whose trajectories are alike."""
    return Scenario(
        name="makespan",
        routing=Routing(policy=routing),
        dedicated=(Pool(profile=profile, count=engines),),
        elastic=Elastic(how="none"),
        tasks=Tasks(
            groups=BATCH // GROUP,
            group_size=GROUP,
            prompt_tokens=shape.new_context,
            observation_tokens=shape.new_context,
            observation_spread=0.0,
            turns=shape.turns,
            turns_spread=0.0,
            max_turns=shape.turns,
            new_tokens=shape.sampled,
            trajectory_spread=0.0,
            turn_spread=0.0,
            max_turn_tokens=shape.sampled,
            environment_spread=0.0,
        ),
        training=Training(steps=1),
    )


def closed_form(scenario: Scenario, cost: CostModel, shape: Turns) -> float:
    """Return PEARL's makespan in seconds: `S * (B dL / N * t_prefill + r * (A + b * B / N) + T_over) + T_env`."""
    pool = scenario.dedicated[0]
    per_engine = scenario.tasks.groups * scenario.tasks.group_size / pool.count
    context = shape.turns * (shape.new_context + shape.sampled) // 2
    base, each = decode_line(cost, round(per_engine), context)
    chunk = cost.step_seconds(decoding=0, context_tokens=0, chunks=[(pool.step_tokens, context)])
    prefill = per_engine * shape.new_context * chunk / pool.step_tokens
    over = 3 * scenario.hop_seconds  # request, dispatch, result
    turn = prefill + shape.sampled * (base + each * per_engine) + over
    return shape.turns * (turn + scenario.tasks.environment_seconds) + scenario.tasks.reset_seconds


def decode_line(cost: CostModel, batch: int, context: int) -> tuple[float, float]:
    """Return the coefficients `A` and `b`: the line through the decode steps of one request and of `batch` requests."""
    one = cost.step_seconds(decoding=1, context_tokens=context)
    many = cost.step_seconds(decoding=batch, context_tokens=batch * context)
    each = (many - one) / (batch - 1)
    return one - each, each


def rollout_seconds(scenario: Scenario) -> float:
    """Simulate; return the mean seconds from the opening of a step's groups to its whole batch."""
    fleet = Fleet(scenario)
    fleet.run()
    steps = fleet.trainer.figures.steps
    return sum(step.collected_at - step.began_at for step in steps) / len(steps)


def step_seconds(scenario: Scenario) -> float:
    """Simulate; return the mean seconds of a training step, without the warm-up."""
    fleet = Fleet(scenario)
    fleet.run()
    steps = measured(fleet.trainer.figures.steps, scenario.open_steps)
    return (steps[-1].ended_at - steps[0].began_at) / len(steps)


def makespan() -> Section:
    """Compare rollouts with PEARL's closed form."""
    section, worst = Section("makespan"), 0.0
    for profile, engines, shape in product(PROFILES, ENGINES, SHAPES):
        scenario = rollout_of(profile, engines, shape, "session")
        expected = closed_form(scenario, load_profile(profile), shape)
        simulated = rollout_seconds(scenario)
        with_rose = rollout_seconds(rollout_of(profile, engines, shape, "rose"))
        worst = max(worst, abs(simulated / expected - 1.0))
        section.rows.append(
            {
                "profile": profile,
                "engines": engines,
                "shape": shape.name,
                "closed_form_seconds": expected,
                "simulated_seconds": simulated,
                "difference": simulated / expected - 1.0,
                "difference_with_rose": with_rose / expected - 1.0,
            }
        )
    section.checks.append(Check("makespan", worst, "of the closed form", TOLERANCE, "max", "PEARL's closed form"))
    return section


def hit_rate(rows: Iterable[Sequence[int]], most_blocks: int | None) -> float:
    """Return the share of all blocks that an LRU cache of `most_blocks` blocks holds.

    `rows`: the ids of each request's blocks.
    """
    cache, hits, total = PrefixCache(BLOCK_TOKENS), 0, 0
    for blocks in rows:
        segments = [Segment(str(block), BLOCK_TOKENS) for block in blocks]
        hits += cache.lookup(segments) // BLOCK_TOKENS
        total += len(segments)
        for segment in segments:
            cache.use(segment.name)
            cache.extend(segment.name, BLOCK_TOKENS)
        for segment in reversed(segments):  # the end of a context is evicted before its beginning
            cache.release(segment.name)
        if most_blocks is not None:
            cache.shrink(most_blocks * BLOCK_TOKENS)
    return hits / total


def hits(trace: Path) -> Section:
    """Compare hit rates on Mooncake's trace with published hit rates."""
    rows = [arrival.blocks for arrival in read_trace(str(trace))]
    section, worst = Section("hits"), 0.0
    for blocks, published in PUBLISHED_HITS.items():
        rate = hit_rate(rows, blocks)
        worst = max(worst, abs(rate - published))
        section.rows.append({"blocks": blocks or "no bound", "hit_rate": rate, "published": published})
    against = "hit rates of Mooncake#4020"
    section.checks.append(Check("hits", worst, "", HIT_TOLERANCE, "max", against, {"requests": len(rows)}))
    return section


def pools() -> Section:
    """Compare RollArt's pools."""
    section = Section("pools")
    for file in POOLS:
        seconds = {}
        for arm, scenario in load_scenario(SCENARIOS / file).items():
            seconds[arm] = step_seconds(scenario)
            section.rows.append({"scenario": file, "arm": arm, "step_seconds": seconds[arm]})
        for pure in ("h800", "h20"):
            gain, details = seconds[pure] / seconds["rose"], {"scenario": file}
            against = f"the mixed pool over {pure}, RollArt"
            section.checks.append(Check("pools", gain, "times", LEAST_GAIN, "min", against, details))
            section.checks.append(Check("pools", gain, "times", MOST_GAIN, "max", against, details))
    return section


def main() -> None:
    """Run the comparisons; see the module."""
    parser = options(__doc__)
    parser.add_argument("--mooncake", type=Path, metavar="FILE", help="Mooncake's mooncake_trace.jsonl, for `hits`")
    parser.add_argument("--only", nargs="*", choices=("makespan", "hits", "pools"), help="run only these")
    arguments = parser.parse_args()
    only = arguments.only or ("makespan", "hits", "pools")
    sections = []
    if "makespan" in only:
        sections.append(makespan())
    if "hits" in only and arguments.mooncake is not None:
        sections.append(hits(arguments.mooncake))
    elif "hits" in only:
        say("no --mooncake: the hit rates are not compared")
    if "pools" in only:
        sections.append(pools())
    checks = [check for section in sections for check in section.checks]
    rows = {section.name: section.rows for section in sections}
    if not keep({"checks": checks, "rows": rows}, arguments.json):
        for section in sections:
            print(*section.rows, *section.checks, sep="\n")
    sys.exit(not all(check.met for check in checks))


if __name__ == "__main__":
    main()
