"""Trajectories for the benchmark of routing: who asks for what, when, and what of it is known already.

Keeps true
- A workload is a function of its arguments: the same arrivals for every policy. Within a trajectory the next turn is
  asked for once the one before is answered.
- Two contexts share as many leading blocks as they share leading keys.
- Arrivals are spread so that the fleet, were nothing computed twice and all lanes busy, would need a said share of the
  time for them.

`demo`: the demo's own tasks, groups and bounds, played by the real environment in the real turn format. A scripted
policy takes the policy's place, which makes a slip now and then, so that trajectories have 2 to 12 turns.
`mooncake`: a trace of Mooncake's. Requests with the same first block are the turns of one trajectory (no two such share
anything); a turn comes at the trace's moment, and never before the one before it was answered.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import accumulate, count, islice
from pathlib import Path

from bench.emulated import Machine
from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.pipeline.local.demo import CONFIGURATION, training_prompts
from rose.schemas.limits import MAX_CONTEXT_TOKENS
from rose.workers.environments.calculator import Calculator
from rose.workers.environments.turn_format import TurnFormat
from rose.workers.loadgen.traces import BLOCK_TOKENS, Arrival, read_trace

SLIPS = 0.15
"""Share of the scripted policy's actions that the tool cannot read: it tries again."""

ENVIRONMENT_SECONDS = 0.06
"""Mean time from an answer to the next request, in the demo: what a turn is on the bus."""

PIECE_TOKENS = 4
"""Of the demo's contexts, for a policy that remembers text; a block of the cache is a multiple."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """One turn; see `policies.Request`."""

    trajectory_id: str
    context_tokens: int
    new_tokens: int
    pieces: Sequence[int]
    piece_tokens: int
    blocks: Sequence[int]
    """Keys of the full blocks of its context and of what it samples behind it."""
    at: float = 0.0
    """Seconds; it is asked for no sooner."""
    after_seconds: float = 0.0
    """The environment's time, since the answer before."""


@dataclass(slots=True)
class Session:
    """One trajectory."""

    trajectory_id: str
    group_id: str
    turns: list[Turn]


@dataclass(slots=True, kw_only=True)
class Workload:
    """A fleet and what it is asked."""

    name: str
    machines: list[Machine]
    max_tokens: int
    """That a turn may sample."""
    sessions: list[Session]
    """In the order in which they begin."""
    told: dict[str, str | float] = field(default_factory=dict)
    """What a reader of its figures should know."""

    @property
    def turns(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


def reusable(workload: Workload) -> list[int]:
    """For each turn, in the order of the sessions' moments: its tokens that one cache without bounds would have."""
    block = workload.machines[0].block_tokens
    known: set[int] = set()
    found = []
    for turn in in_order(workload.sessions):
        hits = 0
        while hits < (turn.context_tokens - 1) // block and turn.blocks[hits] in known:
            hits += 1
        found.append(hits * block)
        known.update(turn.blocks[: (turn.context_tokens + turn.new_tokens - 1) // block])
    return found


def in_order(sessions: Sequence[Session]) -> Iterator[Turn]:
    """All turns by their moments; those of a trajectory in their order."""
    moments = []
    for each, session in enumerate(sessions):
        reached = accumulate((turn.at for turn in session.turns), max)
        moments += [(at, each, number) for number, at in enumerate(reached)]
    return (sessions[each].turns[number] for _, each, number in sorted(moments))


def spread(workload: Workload, busy: float) -> float:
    """Seconds over which the arrivals have to come for the fleet to be busy for that share of them."""
    rates = [0.0] * len(workload.machines)
    for turn, cached in zip(in_order(workload.sessions), reusable(workload), strict=True):
        for number, machine in enumerate(workload.machines):
            rates[number] += machine.seconds(turn.context_tokens - cached, turn.new_tokens)
    return 1.0 / sum(1.0 / seconds for seconds in rates) / busy


def demo(machines: Sequence[Machine], *, groups: int, seed: int, busy: float) -> Workload:
    """So many groups of the demo's, which begin at random moments."""
    configuration = Path(str(files("rose.pipeline.local") / CONFIGURATION))
    settings = load(Common(config=configuration, settings=[])).settings
    draw = random.Random(seed)
    form = TurnFormat(settings.model.folder)
    policy = _ScriptedPolicy(form, draw, machines[0].block_tokens)
    sessions = []
    for prompt in training_prompts(settings.tasks, run="bench", seed=seed, groups=groups):
        for index in range(prompt.group_size):
            name = f"{prompt.group_id}:{index}"
            sessions.append(Session(name, prompt.group_id, asyncio.run(policy.run(name, prompt.task_seed))))
    workload = Workload(
        name="demo",
        machines=list(machines),
        max_tokens=settings.environment.max_turn_tokens,
        sessions=sessions,
        told={"groups": groups},
    )
    seconds = spread(workload, busy)
    moments = sorted(draw.uniform(0.0, seconds) for _ in range(groups))
    for number, session in enumerate(sessions):
        session.turns[0].at = moments[number // settings.tasks.group_size]
    return workload


def mooncake(trace: str, machines: Sequence[Machine], *, busy: float, requests: int | None = None) -> Workload:
    """The trace's first `requests`, all if left out; less those that no record could carry. Raises TraceError."""
    arrivals = read_trace(trace, count=requests)
    by_first: dict[int, list[Arrival]] = {}
    for arrival in arrivals:
        if arrival.prompt_tokens <= MAX_CONTEXT_TOKENS:
            by_first.setdefault(arrival.blocks[0], []).append(arrival)
    private = count(-1, -1)
    sessions = [
        Session(f"session-{first}", f"session-{first}", _turns(f"session-{first}", each, private))
        for first, each in by_first.items()
    ]
    kept = sum(len(session.turns) for session in sessions)
    workload = Workload(
        name="mooncake",
        machines=list(machines),
        max_tokens=1 << max(arrival.output_tokens for arrival in arrivals).bit_length(),
        sessions=sessions,
        told={"longer than a context may be": len(arrivals) - kept},
    )
    faster = arrivals[-1].at / spread(workload, busy)
    blocks = {key for session in sessions for turn in session.turns for key in turn.blocks}
    workload.told["trace played faster by"] = round(faster, 2)
    workload.told["blocks of cache over those of the trace"] = round(
        sum(machine.kv_blocks for machine in machines) / len(blocks), 2
    )
    for session in sessions:
        for turn in session.turns:
            turn.at /= faster
    return workload


def _turns(name: str, arrivals: Sequence[Arrival], private: Iterator[int]) -> list[Turn]:
    """`private`: keys that no context has, for what is sampled and never asked about."""
    turns = [
        Turn(
            trajectory_id=name,
            context_tokens=arrival.prompt_tokens,
            new_tokens=arrival.output_tokens,
            pieces=arrival.blocks[: arrival.prompt_tokens // BLOCK_TOKENS],
            piece_tokens=BLOCK_TOKENS,
            blocks=arrival.blocks[: arrival.prompt_tokens // BLOCK_TOKENS],
            at=arrival.at,
        )
        for arrival in arrivals
    ]
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        asked = len(turn.blocks)
        written = (turn.context_tokens + turn.new_tokens) // BLOCK_TOKENS
        goes_on = following is not None and len(following.pieces) >= written and following.pieces[:asked] == turn.pieces
        sampled = following.pieces[asked:written] if following and goes_on else islice(private, written - asked)
        turn.blocks = (*turn.pieces, *sampled)
    return turns


class _ScriptedPolicy:
    """Works the calculator's sums out in the demo's own tokens, with a slip now and then."""

    def __init__(self, form: TurnFormat, draw: random.Random, block_tokens: int) -> None:
        self._form = form
        self._draw = draw
        self._block_tokens = block_tokens

    async def run(self, name: str, seed: int) -> list[Turn]:
        """The turns of one trajectory of this task."""
        environment, turns = Calculator(), []
        observation = await environment.reset(seed, {})
        terms = observation.replace("+", " +").replace("-", " -").split()
        context = self._form.observation_tokens(observation, first=True)
        total, done = "0", False
        while not done:
            action = f"{total}{terms[0]}" if terms else f"={total}"
            slip = self._draw.random() < SLIPS
            sampled = self._form.action_tokens(action[::-1] + "-" if slip else action)
            turns.append(self._turn(name, context, sampled))
            step = await environment.step(action[::-1] + "-" if slip else action)
            if not slip and terms:
                total, terms = step.observation, terms[1:]
            context += sampled + self._form.observation_tokens(step.observation, first=False)
            done = step.done
        return turns

    def _turn(self, name: str, context: Sequence[int], sampled: Sequence[int]) -> Turn:
        keys = _keys([*context, *sampled])
        each = self._block_tokens // PIECE_TOKENS
        return Turn(
            trajectory_id=name,
            context_tokens=len(context),
            new_tokens=len(sampled),
            pieces=keys[: len(context) // PIECE_TOKENS],
            piece_tokens=PIECE_TOKENS,
            blocks=keys[each - 1 :: each],
            after_seconds=self._draw.expovariate(1 / ENVIRONMENT_SECONDS),
        )


def _keys(tokens: Sequence[int]) -> list[int]:
    """Of each whole piece: what stands for all tokens up to its end."""
    keys, key = [], 0
    for end in range(PIECE_TOKENS, len(tokens) + 1, PIECE_TOKENS):
        key = hash((key, *tokens[end - PIECE_TOKENS : end]))
        keys.append(key)
    return keys
