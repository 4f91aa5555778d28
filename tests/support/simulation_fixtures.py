"""A small engine's cost model, small scenarios, and a naive engine that computes one step after the other."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rose.pipeline.simulation.cost_model import CostModel, load_profile
from rose.pipeline.simulation.engine import EngineRequest, EngineResult
from rose.pipeline.simulation.scenario import Scenario

PROFILE = "qwen3-8b-h800-tp1"

BLOCK = 16


def small_cost(kv_tokens: int = 400) -> CostModel:
    """Return the cost model of a real card with a KV memory so small that tests can fill it."""
    cost = load_profile(PROFILE)
    memory = msgspec.structs.replace(cost.profile.memory, kv_cache_tokens=kv_tokens, block_tokens=BLOCK)
    return CostModel.of(msgspec.structs.replace(cost.profile, memory=memory))


def scenario(**changes: Any) -> Scenario:
    """Return a scenario of two engines and four groups, with changes in the form of a TOML file."""
    fields: dict[str, Any] = {
        "name": "test",
        "dedicated": [{"profile": PROFILE, "count": 2, "max_turns": 2}],
        "tasks": {"groups": 4, "group_size": 12, "turns": 4, "new_tokens": 150, "max_turn_tokens": 600},
        "training": {"steps": 2, "fixed_seconds": 1.0},
        "elastic": {"how": "none"},
    }
    for name, change in changes.items():
        before = fields.get(name)
        fields[name] = {**before, **change} if isinstance(before, dict) and isinstance(change, dict) else change
    return msgspec.convert(fields, Scenario, strict=True)


@dataclass(eq=False)
class NaiveRun:
    """A request in the naive engine."""

    request: EngineRequest
    sampled: int = 0
    """Sampled tokens, with those before a preemption."""
    context: int = 0
    computed: int = 0
    chunk: int = 0
    sampled_here: int = 0
    cached: int = 0
    scheduled_at: float | None = None
    first_token_at: float = 0.0
    device_seconds: float = 0.0
    salt: int = 0

    @property
    def shared(self) -> int:
        return sum(tokens for _, tokens in self.request.segments[:-1])

    def blocks(self, tokens: int) -> list[tuple[Any, ...]]:
        """Keys of the whole blocks of the first tokens. Shared segments consist of whole blocks."""
        keys: list[tuple[Any, ...]] = []
        for name, many in self.request.segments[:-1]:
            keys += [(self.salt, name, index) for index in range(many // BLOCK)]
        own = self.request.segments[-1].name
        keys += [(self.salt, own, index) for index in range(max(0, tokens - self.shared) // BLOCK)]
        return keys[: tokens // BLOCK]

    def result(self, now: float) -> EngineResult:
        return EngineResult(
            self.request,
            self.sampled,
            self.cached,
            self.scheduled_at or 0.0,
            self.first_token_at,
            now,
            self.device_seconds,
        )


@dataclass(eq=False)
class NaiveEngine:
    """The reference of `Engine`: one step after the other, a list of requests, and a cache of single blocks."""

    cost: CostModel
    max_running: int
    step_tokens: int
    kv_tokens: int
    waiting: list[NaiveRun] = field(default_factory=list)
    running: list[NaiveRun] = field(default_factory=list)
    """Requests in the order of their age."""
    unused: "OrderedDict[tuple[Any, ...], None]" = field(default_factory=OrderedDict)
    busy_seconds: float = 0.0
    lost_seconds: float = 0.0
    """Seconds that aborted requests had of the steps under way."""
    preempted: int = 0
    step: tuple[float, float, int, frozenset[str]] | None = None
    """Start and seconds of the step under way, its tokens, and the names of the requests that decode in it."""
    paused_at: float | None = None
    salt: int = 0

    def held(self) -> int:
        own = sum(max(0, run.computed - run.shared) + run.sampled_here for run in self.running)
        return own + sum(self._shared_in_use().values())

    def _shared_in_use(self) -> dict[tuple[int, str], int]:
        """Computed tokens of each shared segment that a running request uses."""
        found: dict[tuple[int, str], int] = {}
        for run in self.running:
            begins = 0
            for name, tokens in run.request.segments[:-1]:
                computed = max(0, min(tokens, run.computed - begins))
                found[run.salt, name] = max(computed, found.get((run.salt, name), 0))
                begins += tokens
        return found

    def add(self, request: EngineRequest, now: float) -> None:
        self.waiting.append(NaiveRun(request))
        self._begin(now)

    def advance(self, now: float) -> list[EngineResult]:
        ended = []
        while self.paused_at is None and self.step is not None and self.step[0] + self.step[1] <= now + 1e-9:
            began, seconds, tokens, decoding = self.step
            at, self.step = began + seconds, None
            self.busy_seconds += seconds
            for run in list(self.running):
                decodes = run.request.name in decoding
                run.device_seconds += seconds * (run.chunk + decodes) / tokens
                run.chunk = 0
                if decodes or run.computed == run.context:
                    run.sampled += 1
                    run.sampled_here += 1
                    run.first_token_at = run.first_token_at or at
                if run.sampled == run.request.new_tokens:
                    self._free(run)
                    ended.append(run.result(at))
            self._begin(at)
        return ended

    def abort(self, name: str, now: float) -> EngineResult:
        for run in self.waiting:
            if run.request.name == name:
                self.waiting.remove(run)
                return run.result(now)
        run = next(each for each in self.running if each.request.name == name)
        if self.step is not None:
            _, seconds, tokens, decoding = self.step
            self.lost_seconds += seconds * (run.chunk + (run.request.name in decoding)) / tokens
        self._free(run)
        return run.result(now)

    def pause(self, now: float) -> None:
        self.paused_at = now

    def resume(self, now: float) -> None:
        assert self.paused_at is not None
        paused, self.paused_at = now - self.paused_at, None
        if self.step is not None:
            self.step = (self.step[0] + paused, *self.step[1:])
        self._begin(now)

    def drop_cache(self) -> None:
        self.unused.clear()
        self.salt += 1

    def _free(self, run: NaiveRun) -> None:
        self.running.remove(run)
        in_use = {key for each in self.running for key in each.blocks(min(each.computed, each.shared))}
        for key in reversed(run.blocks(run.computed + max(0, run.sampled_here - 1))):
            if key not in in_use:
                self.unused.pop(key, None)
                self.unused[key] = None
        self._evict()

    def _evict(self, sampled: int = 0) -> None:
        while self.unused and self.held() + sampled + BLOCK * len(self.unused) > self.kv_tokens:
            self.unused.popitem(last=False)

    def _begin(self, at: float) -> None:
        if self.step is not None or self.paused_at is not None:
            return
        while True:
            decoding = [run for run in self.running if run.sampled_here]
            left, growth = self.step_tokens - len(decoding), len(decoding)
            for run in self.running:
                if not run.sampled_here:
                    chunk = min(max(0, left), run.context - run.computed)
                    left, growth = left - chunk, growth + chunk + (run.computed + chunk == run.context)
            if len(self.running) <= 1 or self.held() + growth <= self.kv_tokens:
                break
            youngest = self.running[-1]
            self._free(youngest)
            self.preempted += 1
            self.waiting.insert(0, youngest)
        left = self.step_tokens - len(decoding)
        chunks: list[tuple[int, int]] = []
        for run in self.running:
            if not run.sampled_here:
                left = self._compute(run, left, chunks)
        while self.waiting and left > 0 and len(self.running) < self.max_running and self._admit(at, len(decoding)):
            left = self._compute(self.running[-1], left, chunks)
        self._evict(sum(run.computed == run.context for run in self.running))
        if decoding or chunks:
            context = sum(run.context + run.sampled_here for run in decoding)
            seconds = self.cost.step_seconds(decoding=len(decoding), context_tokens=context, chunks=chunks)
            tokens = len(decoding) + sum(chunk for chunk, _ in chunks)
            self.step = at, seconds, tokens, frozenset(run.request.name for run in decoding)

    def _admit(self, at: float, decoding: int) -> bool:
        run = self.waiting[0]
        run.salt, run.context, run.sampled_here = self.salt, run.request.context_tokens + run.sampled, 0
        used = {key for each in self.running for key in each.blocks(min(each.computed, each.shared))}
        shared = self._shared_in_use()
        in_use = sum(shared.get((run.salt, name), 0) for name, _ in run.request.segments[:-1])
        if self.held() + decoding + run.context + 1 - in_use > self.kv_tokens:
            return False
        hits = []
        for key in run.blocks((run.context - 1) // BLOCK * BLOCK):
            if key not in used and key not in self.unused:
                break
            hits.append(key)
        for key in list(self.unused):  # the request takes the blocks of its own segment, needed or not
            if key in hits or key[:2] == (run.salt, run.request.segments[-1].name):
                del self.unused[key]
        run.computed = BLOCK * len(hits)
        if not run.device_seconds:
            run.cached, run.scheduled_at = run.computed, at
        self.running.append(self.waiting.pop(0))
        return True

    def _compute(self, run: NaiveRun, left: int, chunks: list[tuple[int, int]]) -> int:
        run.chunk = min(max(0, left), run.context - run.computed)
        if run.chunk:
            chunks.append((run.chunk, run.computed))
        run.computed += run.chunk
        for key in run.blocks(min(run.computed, run.shared)):
            self.unused.pop(key, None)
        return left - run.chunk
