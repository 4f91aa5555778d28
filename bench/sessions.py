"""Trajectories for the routing benchmark: the turns that each requests, their times, and their known prefixes.

Keeps true
- A workload is a function of its arguments: all policies get the same arrivals. Within a trajectory the next turn is
  requested once the previous turn is answered.
- Two contexts share as many leading blocks as they share leading keys.
- Arrivals are spread so that the fleet would be busy for a given share of the time if no token was computed twice and
  all lanes were busy.

`demo`: the demo's own tasks, groups and bounds, played by the real environment in the real turn format. A scripted
policy replaces the trained policy. It makes an error now and then, so that trajectories have 2 to 12 turns.
`mooncake`: a Mooncake trace. Requests with the same first block are the turns of one trajectory (two trajectories share
nothing). A turn is requested at the time in the trace, and never before the previous turn was answered.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import accumulate, count, islice
from pathlib import Path

from rose.pipeline.config.load import load
from rose.pipeline.config.options import Common
from rose.pipeline.local.demo import CONFIGURATION, training_prompts
from rose.pipeline.simulation.cost_model import CostModel, parse_profile
from rose.pipeline.simulation.engine import EngineRequest
from rose.pipeline.simulation.prefix_cache import Segment
from rose.schemas.limits import MAX_CONTEXT_TOKENS
from rose.workers.environments.calculator import Calculator
from rose.workers.environments.turn_format import TurnFormat
from rose.workers.loadgen.traces import BLOCK_TOKENS, Arrival, read_trace

SLIPS = 0.15
"""Share of the scripted policy's actions that the tool cannot read; the policy then tries again."""

ENVIRONMENT_SECONDS = 0.06
"""Mean time from an answer to the next request in the demo, which is the bus time of a turn."""

PIECE_TOKENS = 4
"""Tokens of a piece of the demo's contexts, for policies that remember prefixes; a cache block is a multiple of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The properties of an executor's hardware that decide time and room. A step takes `base + token * tokens`."""

    kind: str
    base_seconds: float
    """Fixed time of a step, independent of its tokens: the weights are read."""
    token_seconds: float
    """Time that each token adds to a step."""
    lanes: int
    """Most turns that run at once."""
    step_tokens: int
    """Most tokens of one step."""
    block_tokens: int
    kv_blocks: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that turns may hold: each turn may leave one block partly unfilled."""
        return (self.kv_blocks - self.lanes) * self.block_tokens

    def seconds(self, prefilled: int, sampled: int) -> float:
        """Return the time of this many tokens when all lanes are busy: the decoding turns share a step's fixed time."""
        return prefilled * self.token_seconds + sampled * (self.base_seconds / self.lanes + self.token_seconds)

    def cost(self) -> CostModel:
        """Return the machine as a cost model: its linear layers have all the time."""
        stated = {"source": "stated by the benchmark"}
        nothing = {"counts": [1, 2], "seconds": [0.0, 0.0], **stated}
        seconds = [self.base_seconds + self.token_seconds * tokens for tokens in (1, self.step_tokens)]
        tables = {
            "name": self.kind,
            "model": "none",
            "card": self.kind,
            "tensor_parallel": 1,
            "shape": {"layers": 1, "kv_bytes_per_token": 2048, "weight_bytes": 1, **stated},
            "memory": {"kv_cache_tokens": self.kv_tokens, "block_tokens": self.block_tokens, **stated},
            "host": {"step_seconds": 0.0, "sequence_seconds": 0.0, **stated},
            "linear": {"counts": [1, self.step_tokens], "seconds": seconds, **stated},
            "output": nothing,
            "decode_attention": {"context_token_seconds": 0.0, **nothing},
            "prefill_attention": {"token_seconds": 0.0, "pair_seconds": 0.0, **stated},
            "lifecycle": {"wake_seconds": 0.0, "load_seconds": 0.0, **stated},
            "links": {"network_bytes_per_second": 1.0, "nvlink_bytes_per_second": 0.0, **stated},
        }
        return CostModel.of(parse_profile(tables, self.kind))


@dataclass(slots=True, kw_only=True)
class Turn:
    """One turn; see `policies.Request`."""

    trajectory_id: str
    context_tokens: int
    new_tokens: int
    pieces: Sequence[int]
    piece_tokens: int
    blocks: Sequence[int]
    """Keys of the full blocks of its context and of the tokens sampled after it."""
    at: float = 0.0
    """Earliest time of the request, in seconds."""
    after_seconds: float = 0.0
    """The environment's time since the previous answer, in seconds."""

    def engine_request(self, name: str, block_tokens: int, now: float) -> EngineRequest:
        """Return the turn for an engine: each whole block of the context is a segment, named by its key."""
        whole = (self.context_tokens - 1) // block_tokens
        shared = (Segment(str(key), block_tokens) for key in islice(self.blocks, whole))
        rest = Segment(name, self.context_tokens - whole * block_tokens)
        blocks = tuple(map(str, islice(self.blocks, whole, None)))
        return EngineRequest(name, (*shared, rest), self.new_tokens, now, blocks)


@dataclass(slots=True)
class Session:
    """One trajectory."""

    trajectory_id: str
    group_id: str
    turns: list[Turn]


@dataclass(slots=True, kw_only=True)
class Workload:
    """A fleet and its requests."""

    name: str
    machines: list[Machine]
    max_tokens: int
    """Most tokens that a turn may sample."""
    sessions: list[Session]
    """Trajectories in the order in which they begin."""
    notes: dict[str, str | float] = field(default_factory=dict)
    """Facts that a reader of the figures should know."""

    @property
    def turns(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


def reusable(workload: Workload) -> list[int]:
    """Return the prompt tokens of each turn that one unlimited cache would hold, in the order of the turns' times."""
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
    """Yield all turns by time; the turns of a trajectory stay in order."""
    moments = []
    for each, session in enumerate(sessions):
        reached = accumulate((turn.at for turn in session.turns), max)
        moments += [(at, each, number) for number, at in enumerate(reached)]
    return (sessions[each].turns[number] for _, each, number in sorted(moments))


def spread(workload: Workload, busy: float) -> float:
    """Return the seconds over which the arrivals must be spread for the fleet to be busy for this share of them."""
    rates = [0.0] * len(workload.machines)
    for turn, cached in zip(in_order(workload.sessions), reusable(workload), strict=True):
        for number, machine in enumerate(workload.machines):
            rates[number] += machine.seconds(turn.context_tokens - cached, turn.new_tokens)
    return 1.0 / sum(1.0 / seconds for seconds in rates) / busy


def demo(machines: Sequence[Machine], *, groups: int, seed: int, busy: float) -> Workload:
    """Return a workload of demo groups, which begin at random times."""
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
        notes={"groups": groups},
    )
    seconds = spread(workload, busy)
    moments = sorted(draw.uniform(0.0, seconds) for _ in range(groups))
    for number, session in enumerate(sessions):
        session.turns[0].at = moments[number // settings.tasks.group_size]
    return workload


def mooncake(trace: str, machines: Sequence[Machine], *, busy: float, requests: int | None = None) -> Workload:
    """Return the first `requests` requests of a trace, by default all, without those that no record could carry.

    Raises TraceError.
    """
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
        notes={"longer than a context may be": len(arrivals) - kept},
    )
    faster = arrivals[-1].at / spread(workload, busy)
    blocks = {key for session in sessions for turn in session.turns for key in turn.blocks}
    workload.notes["trace played faster by"] = round(faster, 2)
    workload.notes["blocks of cache over those of the trace"] = round(
        sum(machine.kv_blocks for machine in machines) / len(blocks), 2
    )
    for session in sessions:
        for turn in session.turns:
            turn.at /= faster
    return workload


def _turns(name: str, arrivals: Sequence[Arrival], private: Iterator[int]) -> list[Turn]:
    """Return the turns of one trajectory.

    `private`: keys that no context has, for sampled tokens that no request repeats.
    """
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
        prompt = len(turn.blocks)
        written = (turn.context_tokens + turn.new_tokens) // BLOCK_TOKENS
        goes_on = (
            following is not None and len(following.pieces) >= written and following.pieces[:prompt] == turn.pieces
        )
        sampled = following.pieces[prompt:written] if following and goes_on else islice(private, written - prompt)
        turn.blocks = (*turn.pieces, *sampled)
    return turns


class _ScriptedPolicy:
    """Solves the calculator's sums in the demo's own tokens, with an error now and then."""

    def __init__(self, form: TurnFormat, draw: random.Random, block_tokens: int) -> None:
        self._form = form
        self._draw = draw
        self._block_tokens = block_tokens

    async def run(self, name: str, seed: int) -> list[Turn]:
        """Return the turns of one trajectory of this task."""
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
    """Return one key for each whole piece, which identifies all tokens up to the end of the piece."""
    keys, key = [], 0
    for end in range(PIECE_TOKENS, len(tokens) + 1, PIECE_TOKENS):
        key = hash((key, *tokens[end - PIECE_TOKENS : end]))
        keys.append(key)
    return keys
