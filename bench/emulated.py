"""An emulated executor: it keeps the executor's contract, and computes only how long a real executor would take.

Keeps true
- All times are emulated, not measured: they follow from the rates of the executor's `Machine`.
- Inbox, heartbeats and answers come from the executor's own code. The emulated executor never holds more than it
  offers, and its heartbeats list a turn until the turn is answered, once.
- A step costs `base + token * tokens` seconds, the model that a real executor fits (`workers/executor/step_cost.py`).
  Each decoding turn gets one token in every step; prompts are computed in order of arrival, cut into chunks.
- A block is in the cache from the start of the step that computes it until its room is taken. Blocks without a running
  turn are evicted first, the least recently used first, and of one turn the last block first. A turn reuses the leading
  blocks of its context that are in the cache; its last token is always computed (as in vLLM).

Pure: `now` is an argument, and everything that happened until then is returned. This module is for simulated time and
for turns that run to their end. `bench.fleet` emulates executors on a real bus that pause, are cut and leave, with
the simulator's engine.

Example, with steps of 10 ms and 0.1 ms a token, blocks of 32 tokens
    add(100 tokens of context, 3 to sample) at 0   -> step 1 ends at 0.020, with the first token
    add(a longer context of the same prompt) at 0  -> waits for step 2, which begins at 0.020: 96 tokens are cached
    steps 2 and 3                                  -> the first turn has its three tokens, and has ended
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import NamedTuple

from rose.schemas.heartbeats import ExecutorState, SlackHeartbeat, WorkerClass
from rose.schemas.sampled_tokens import SampledTokens, VersionSpan
from rose.schemas.turns import TurnDispatch, TurnKey, TurnOutcome, TurnResult, TurnTimes
from rose.workers.executor.inbox import Inbox, InboxAction
from rose.workers.executor.ipc.messages import EngineStatus, TurnFinished
from rose.workers.executor.records import ExecutorIncarnation, HeartbeatWriter, finished_result, refused_result
from rose.workers.executor.vllm.types import FinishedTurn

INCARNATION, VERSION = 1, 0
"""Incarnation and policy version of an emulated executor, which starts once with the first version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The properties of an executor's hardware that decide time and room."""

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
    kv_bytes_per_token: int = 2_048

    @property
    def token_budget(self) -> int:
        """Return the number of tokens that turns may hold: each turn may leave one block partly unfilled."""
        return (self.kv_blocks - self.lanes) * self.block_tokens

    def seconds(self, prefilled: int, sampled: int) -> float:
        """Return the time of this many tokens when all lanes are busy: the decoding turns share a step's fixed time."""
        return prefilled * self.token_seconds + sampled * (self.base_seconds / self.lanes + self.token_seconds)


class Work(NamedTuple):
    """A turn as the engine sees it. Two contexts share as many leading blocks as they share leading keys."""

    key: TurnKey
    context_tokens: int
    new_tokens: int
    """Number of tokens that the turn will sample, at least one."""
    room_tokens: int
    """Most tokens that the turn may hold."""
    blocks: Sequence[int]
    """Keys of the full blocks of its context and of the tokens sampled after it."""


class Finished(NamedTuple):
    """A turn that has left the engine. Times are in seconds."""

    work: Work
    cached_tokens: int
    scheduled_at: float
    """Start of its first step."""
    first_token_at: float
    finished_at: float


@dataclass(slots=True, eq=False)
class Running:
    """A turn in the engine's steps."""

    work: Work
    cached_tokens: int
    scheduled_at: float
    computed: int
    """Computed tokens of its context, including the tokens of the present step."""
    held: int = 0
    """Number of its leading blocks that are held in the cache for it."""
    first_token_at: float = 0.0


class Cache:
    """Blocks of KV memory, by content."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._used: dict[int, int] = {}
        """Number of running turns that use each block."""
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Unused blocks in the order of eviction."""

    def __contains__(self, key: int) -> bool:
        return key in self._used or key in self._unused

    def hold(self, key: int) -> None:
        """Count one more turn that uses the block, which is in the cache from now on."""
        self._unused.pop(key, None)
        self._used[key] = self._used.get(key, 0) + 1

    def release(self, keys: Sequence[int]) -> None:
        """Count one turn less for these blocks, given in the order of its context."""
        for key in reversed(keys):
            self._used[key] -= 1
            if not self._used[key]:
                del self._used[key]
                self._unused[key] = None

    def shrink(self, unnamed: int) -> None:
        """Evict unused blocks until this many blocks that are not full fit too."""
        room = self._blocks - unnamed - len(self._used)
        while len(self._unused) > max(0, room):
            self._unused.popitem(last=False)


class Engine:
    """Runs turns in steps; turns that cannot run yet wait in order, without a bound."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.waiting: deque[Work] = deque()
        self.busy_seconds = 0.0
        """Total time of all steps."""
        self._cache = Cache(machine.kv_blocks)
        self._prefilling: list[Running] = []
        self._decoding: list[tuple[int, int, Running]] = []
        """A heap of turns by the step in which each ends."""
        self._order = count()
        self._held_blocks = 0
        """Number of blocks that running turns may need."""
        self._steps = 0
        """Number of steps that have ended."""
        self._began = self._step_seconds = 0.0
        self._planned = 0
        """Number of equal steps from `_began` until a turn can leave or join; 0 while nothing runs."""

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def next_at(self) -> float:
        """Return the time of the next event; infinity while nothing runs."""
        return self._began + self._planned * self._step_seconds if self._planned else math.inf

    def add(self, work: Work, now: float) -> None:
        """Add a turn. Raises ValueError for a turn that could never run."""
        if self._need(work) > self.machine.kv_blocks:
            raise ValueError(
                f"{work.key} needs {self._need(work)} blocks of KV, and there are {self.machine.kv_blocks}"
            )
        self.waiting.append(work)
        if not self._planned:
            self._begin(now)
        else:  # the next step may include the turn
            under_way = int((now - self._began) / self._step_seconds) + 1
            self._planned = min(self._planned, under_way)

    def advance(self, now: float) -> list[Finished]:
        """Return the turns that have ended up to now."""
        finished: list[Finished] = []
        while (at := self.next_at) <= now:
            self.busy_seconds += self._planned * self._step_seconds
            self._steps += self._planned
            finished += self._end(at)
            self._begin(at)
        return finished

    def decode_tokens_per_second(self) -> float:
        """Return the decode rate of one turn in the present batch."""
        return 1.0 / (self.machine.base_seconds + self.machine.token_seconds * max(1, self.running))

    def _need(self, work: Work) -> int:
        return -(-work.room_tokens // self.machine.block_tokens)

    def _begin(self, at: float) -> None:
        """Plan the next step: first decoding turns, then started prompts, then new prompts."""
        machine = self.machine
        left = machine.step_tokens - len(self._decoding)
        for running in self._prefilling:
            left -= self._compute(running, left)
        while self.waiting and left > 0 and self.running < machine.lanes:
            work = self.waiting[0]
            if self._held_blocks + self._need(work) > machine.kv_blocks:
                break
            self.waiting.popleft()
            running = self._admit(work, at)
            left -= self._compute(running, left)
        tokens = machine.step_tokens - left
        self._began, self._step_seconds = at, machine.base_seconds + machine.token_seconds * tokens
        if self._prefilling:
            self._planned = 1
        else:
            self._planned = self._decoding[0][0] - self._steps if self._decoding else 0

    def _admit(self, work: Work, at: float) -> Running:
        block = self.machine.block_tokens
        reusable = (work.context_tokens - 1) // block
        hits = 0
        for key in islice(work.blocks, reusable):
            if key not in self._cache:
                break
            hits += 1
        running = Running(work, hits * block, at, hits * block)
        self._held_blocks += self._need(work)
        self._prefilling.append(running)
        self._hold(running, hits)
        return running

    def _compute(self, running: Running, tokens: int) -> int:
        """Add this many context tokens, or all remaining ones, to the step; return their number."""
        tokens = min(tokens, running.work.context_tokens - running.computed)
        running.computed += tokens
        self._hold(running, running.computed // self.machine.block_tokens)
        return tokens

    def _hold(self, running: Running, blocks: int) -> None:
        for key in islice(running.work.blocks, running.held, blocks):
            self._cache.hold(key)
            running.held += 1
        self._cache.shrink(self.running)

    def _end(self, at: float) -> list[Finished]:
        """End the planned steps: turns with a computed context get their first token, and some turns end."""
        finished = []
        prefilled = [running for running in self._prefilling if running.computed == running.work.context_tokens]
        self._prefilling = [each for each in self._prefilling if each.computed < each.work.context_tokens]
        for running in prefilled:
            running.first_token_at = at
            ends = self._steps + running.work.new_tokens - 1
            heapq.heappush(self._decoding, (ends, next(self._order), running))
        while self._decoding and self._decoding[0][0] <= self._steps:
            _, _, running = heapq.heappop(self._decoding)
            finished.append(self._leave(running, at))
        return finished

    def _leave(self, running: Running, at: float) -> Finished:
        work = running.work
        self._hold(running, (work.context_tokens + work.new_tokens - 1) // self.machine.block_tokens)
        self._cache.release(work.blocks[: running.held])
        self._cache.shrink(self.running)
        self._held_blocks -= self._need(work)
        return Finished(work, running.cached_tokens, running.scheduled_at, running.first_token_at, at)


class EmulatedExecutor:
    """An engine with the executor's contract: dispatches in, heartbeats and results out."""

    def __init__(self, machine: Machine, *, worker: str, slot: int) -> None:
        self.engine = Engine(machine)
        self._start = ExecutorIncarnation(worker, WorkerClass.DEDICATED, INCARNATION)
        self._inbox = Inbox(worker, INCARNATION, max_turns=machine.lanes, token_budget=machine.token_budget)
        self._heartbeats = HeartbeatWriter(self._start, slot)
        self._received: dict[TurnKey, float] = {}

    def on_dispatch(self, dispatch: TurnDispatch, work: Work, now: float) -> TurnResult | None:
        """Accept a dispatch, whose future `work` describes, or return its refusal."""
        answer = self._inbox.on_dispatch(dispatch, VERSION, offset=dispatch.offset)
        if answer.action is InboxAction.ACCEPT:
            self._received[dispatch.key] = now
            self.engine.add(work, now)
            return None
        return refused_result(self._start, dispatch, answer.reason, answer.refusal, now=now)

    def advance(self, now: float) -> list[tuple[TurnResult, Finished]]:
        """Return the results up to now."""
        return [(self._answer(each), each) for each in self.engine.advance(now)]

    def heartbeat(self, now: float) -> SlackHeartbeat:
        """Return the present heartbeat."""
        engine, machine = self.engine, self.engine.machine
        status = EngineStatus(
            version=VERSION,
            device=f"emulated {machine.kind}",
            running=engine.running,
            waiting=len(engine.waiting),
            kv_bytes_total=machine.token_budget * machine.kv_bytes_per_token,
            kv_bytes_free=(machine.token_budget - self._inbox.tokens) * machine.kv_bytes_per_token,
            kv_bytes_per_token=machine.kv_bytes_per_token,
            prefill_tokens_per_second=1.0 / machine.token_seconds,
            decode_tokens_per_second=engine.decode_tokens_per_second(),
            steps=0,
            step_seconds=0.0,
        )
        state = ExecutorState.READY
        return self._heartbeats.next_heartbeat(
            status, self._inbox, state=state, version=VERSION, pause_reason="", now=now
        )

    def _answer(self, finished: Finished) -> TurnResult:
        work = finished.work
        sampled = bytes(4 * work.new_tokens)
        times = TurnTimes(
            scheduled_at=finished.scheduled_at, first_token_at=finished.first_token_at, finished_at=finished.finished_at
        )
        turn = FinishedTurn(
            name="",
            sampled=SampledTokens(tokens=sampled, logprobs=sampled, spans=(VersionSpan(0, work.new_tokens, VERSION),)),
            finish_reason="stop",
            context_tokens=work.context_tokens,
            cached_tokens=finished.cached_tokens,
            times=times,
        )
        seconds = self.engine.machine.seconds(work.context_tokens - finished.cached_tokens, work.new_tokens)
        done = TurnFinished(turn, device_seconds=seconds)
        dispatch = self._inbox.release(work.key)
        received_at = self._received.pop(work.key)
        return finished_result(self._start, dispatch, done, TurnOutcome.COMPLETED, "", received_at=received_at)
