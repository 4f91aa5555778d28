"""A model of an inference engine: continuous batching in steps, chunked prefill, prefix cache, preemption.

Keeps true
- Each decoding request gets one token in every step. Prompts are computed in order of arrival, cut into chunks, in the
  same steps: they get what the decoding requests leave of `step_tokens`, as vLLM's scheduler plans it.
- A step takes the seconds of its cost model. Between two events the engine plans all equal steps at once: the time of
  `n` steps is a sum in closed form, so the time to simulate does not depend on the number of tokens.
- Requests and cached prefixes never hold more than `kv_tokens`. If the running requests outgrow it, the youngest is
  preempted: it waits at the front, and is computed again from what the cache still holds (as in vLLM).
- A request reuses only what was cached since the last `drop_cache`, and leaves nothing behind for later requests if it
  began before.
- `pause` stops the engine in mid-step, and the step goes on after `resume`.
- Every request leaves once: in `advance` when it has ended, or by `abort`.
- The device seconds of all requests are the busy seconds, less what an aborted request had of the step under way.

Pure: `now` is an argument, and `advance(now)` comes before any other change at `now`. Units: seconds, tokens.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rose.pipeline.simulation.cost_model import CostModel
from rose.pipeline.simulation.latency_histogram import LatencyHistogram
from rose.pipeline.simulation.prefix_cache import PrefixCache, Segment
from rose.pipeline.simulation.step_plan import NO_PLAN, ROUNDING, Plan


class EngineRequest(NamedTuple):
    """A request to an engine."""

    name: str
    segments: tuple[Segment, ...]
    """The context. The last segment belongs to this request; sampled tokens are added to it."""
    new_tokens: int
    """Tokens that the request samples, at least one."""
    arrived_at: float
    blocks: tuple[str, ...] = ()
    """Names of the blocks that the last segment and the sampled tokens fill, if these are cached by their content.
    Without names, they are cached under the name of the last segment."""

    @property
    def context_tokens(self) -> int:
        """Tokens of the context."""
        return sum(segment.tokens for segment in self.segments)


@dataclass(slots=True, eq=False)
class Running:
    """A request in the engine's steps."""

    request: EngineRequest
    segments: tuple[Segment, ...]
    """The context, with the names of the segments in the cache."""
    salt: int
    context_tokens: int
    """Tokens to compute before the next token is sampled: the context, and what was sampled before a preemption."""
    cached_tokens: int
    """Context tokens that were cached when it was scheduled first."""
    scheduled_at: float
    computed: int
    """Computed tokens of the context, with those of the present step."""
    ticket: int
    sampled_before: int = 0
    """Tokens that were sampled before a preemption."""
    chunk: int = 0
    """Tokens of the context that the present step computes."""
    began_step: int = 0
    """Number of the step that sampled its first token here."""
    first_token_at: float = 0.0
    device_seconds: float = 0.0
    decode_share: float = 0.0
    """The engine's `decode_share` when it began to decode."""
    token_at: float = 0.0
    """When its newest token before a preemption was sampled."""


class EngineResult(NamedTuple):
    """A request that is in no step: it waits, or has left the engine."""

    request: EngineRequest
    sampled_tokens: int = 0
    cached_tokens: int = 0
    """Context tokens that were cached when it was scheduled first."""
    scheduled_at: float = 0.0
    """Start of its first step; 0 if it did not run."""
    first_token_at: float = 0.0
    """End of the step with its first token; 0 without a token."""
    finished_at: float = 0.0
    """When it left, or was preempted."""
    device_seconds: float = 0.0
    """Its share of the steps that it was in."""
    token_at: float = 0.0
    """When its newest token was sampled, if it was preempted afterwards."""


BeforeStep = Callable[[float], float]
"""Called at the beginning of a step; returns the seconds by which another tenant delays the step."""

OnSteps = Callable[[Plan, int], None]
"""Called when the first steps of a plan have ended, with their number."""

OnPause = Callable[[float, float], None]
"""Called when the engine is stopped, with the times of its last `resume` and of its stop."""


class Engine:
    """The requests of one engine."""

    def __init__(self, cost: CostModel, *, max_running: int, step_tokens: int, kv_tokens: int) -> None:
        self.cost = cost
        self.max_running = max_running
        self.step_tokens = step_tokens
        self.kv_tokens = kv_tokens
        self._most_kv_tokens = kv_tokens
        """The KV memory before `limit_kv`."""
        self.cache = PrefixCache(cost.block_tokens)
        self.waiting: deque[EngineResult] = deque()
        """Requests without a slot, with what they had before they were preempted."""
        self.busy_seconds = 0.0
        self.preempted = 0
        self.token_gaps = LatencyHistogram()
        """Seconds from one token of a request to the next, over all tokens."""
        self.before_step: BeforeStep | None = None
        self.on_steps: OnSteps | None = None
        self.on_pause: OnPause | None = None
        self.single_steps = False
        """Whether one step is planned at a time, so that `before_step` is called before each (`plan_single_steps`)."""
        self._prefilling: list[Running] = []
        self._decoding: dict[str, Running] = {}
        self._ends: list[tuple[int, int, Running]] = []
        """Heap of decoding requests by their last step. Entries of aborted requests are dropped at the top."""
        self._steps = self._tickets = 0
        self._held = 0
        """KV tokens of running requests, without shared segments."""
        self._decode_context = 0
        """Context tokens of all decoding requests, shared segments included for each."""
        self._decode_share = 0.0
        """Seconds of steps, each divided by the tokens of its step: what one decoding request was charged so far."""
        self._plan = NO_PLAN
        self._paused_at: float | None = None
        self._resumed_at = 0.0
        self._stepped_at = 0.0
        """End of the newest step."""
        self._salt = 0
        """Part of the names in the cache: how often the cache was dropped."""

    @property
    def running(self) -> int:
        """Number of requests in steps."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def requests(self) -> int:
        """Number of requests in the engine."""
        return self.running + len(self.waiting)

    @property
    def decoding(self) -> int:
        """Number of requests that have their first token."""
        return len(self._decoding)

    @property
    def decode_context_tokens(self) -> int:
        """Context tokens of the requests that decode, at the newest event."""
        return self._decode_context

    @property
    def held_tokens(self) -> int:
        """KV tokens that running requests hold."""
        return self._held + self.cache.used_tokens

    @property
    def unfinished_prompts(self) -> list[tuple[float, int]]:
        """Arrival and tokens to compute of each running request without its first token, in order of arrival."""
        return [(each.request.arrived_at, each.context_tokens - each.computed) for each in self._prefilling]

    @property
    def stepped_at(self) -> float:
        """End of the newest step, seconds."""
        return self._stepped_at

    @property
    def plan(self) -> Plan:
        """The planned steps."""
        return self._plan

    @property
    def next_at(self) -> float:
        """Return the time of the next event; infinity while nothing runs."""
        if self._paused_at is not None or not self._plan.steps:
            return math.inf
        return self._plan.began + self._plan.seconds(self._plan.steps)

    def names(self) -> list[str]:
        """Return the names of all requests: running requests by age, then waiting requests."""
        running = sorted((*self._prefilling, *self._decoding.values()), key=lambda each: each.ticket)
        return [each.request.name for each in running] + [each.request.name for each in self.waiting]

    def device_seconds(self) -> dict[str, float]:
        """Return the device time of each request so far, by name; with the planned steps that were counted."""
        found = {each.request.name: each.device_seconds for each in self.waiting}
        found |= {each.request.name: each.device_seconds for each in self._prefilling}
        for name, running in self._decoding.items():
            found[name] = running.device_seconds + self._decode_share - running.decode_share
        return found

    def youngest(self) -> str:
        """Return the running request that loses least if it is aborted: the request that began last."""
        return max((*self._prefilling, *self._decoding.values()), key=lambda each: each.ticket).request.name

    def add(self, request: EngineRequest, now: float) -> None:
        """Add a request. The next step may include it. Raises ValueError if even the whole KV memory is too small."""
        need = request.context_tokens + request.new_tokens
        if need > self._most_kv_tokens:
            raise ValueError(f"{request.name} needs {need} KV tokens, and there are {self._most_kv_tokens}")
        self.waiting.append(EngineResult(request))
        self._plan_again(now)

    def advance(self, now: float) -> list[EngineResult]:
        """Return the requests that have ended up to now."""
        ended: list[EngineResult] = []
        while (at := self.next_at) <= now + ROUNDING:
            self._count_steps(self._plan.steps)
            self._end_prefills(at)
            while self._ends and self._ends[0][0] <= self._steps:
                _, _, running = heapq.heappop(self._ends)
                if self._decoding.get(running.request.name) is running:
                    ended.append(self._leave(running, at))
            self._begin(at)
        return ended

    def abort(self, name: str, now: float) -> EngineResult:
        """Remove a request; return it with the tokens that it has sampled. Raises KeyError if there is none.

        The step under way goes on as planned.
        """
        for place, each in enumerate(self.waiting):
            if each.request.name == name:
                del self.waiting[place]
                return each._replace(finished_at=now)
        self._plan_again(now)
        running = self._decoding.get(name)
        if running is not None:
            self._plan = self._plan._replace(decoding=self._plan.decoding - 1)
            return self._leave(running, now)
        running = next((each for each in self._prefilling if each.request.name == name), None)
        if running is None:
            raise KeyError(name)
        self._prefilling.remove(running)
        return self._result(running, now)

    def limit_kv(self, tokens: int, now: float) -> None:
        """Change the KV memory. Cached prefixes are evicted; running requests stay, though they may hold more."""
        self.kv_tokens = tokens
        self.cache.shrink(max(0, tokens - self._held))
        self._plan_again(now)

    def plan_single_steps(self, single: bool, now: float) -> None:
        """Plan one step at a time from now on, or as many as are equal."""
        if single != self.single_steps:
            self.single_steps = single
            if single and self._plan.steps > 1:
                self._plan_again(now)

    def pause(self, now: float) -> None:
        """Stop in mid-step."""
        if self._paused_at is None:
            self._paused_at = now
            if self.on_pause is not None:
                self.on_pause(self._resumed_at, now)

    def resume(self, now: float) -> None:
        """Go on where `pause` stopped."""
        if self._paused_at is None:
            return
        paused, self._paused_at, self._resumed_at = now - self._paused_at, None, now
        if self._plan.steps:
            self._plan = self._plan._replace(began=self._plan.began + paused)
        else:
            self._begin(now)

    @property
    def paused(self) -> bool:
        """Whether the engine is stopped."""
        return self._paused_at is not None

    def layer_remaining(self, now: float) -> float:
        """Return the seconds until the layer under way ends; 0 while the engine does not compute."""
        plan = self._plan
        if self._paused_at is not None or not plan.steps or now <= plan.began:
            return 0.0
        done = plan.whole_steps(now - plan.began)
        layer = (plan.first_seconds + done * plan.growth_seconds) / self.cost.layers
        return layer - (now - plan.began - plan.seconds(done)) % layer

    def step_remaining(self, now: float) -> float:
        """Return the seconds until the step under way ends; 0 while nothing is planned. The engine is not paused."""
        plan = self._plan
        into = max(0.0, now - plan.began)
        done = plan.whole_steps(into)
        return plan.seconds(done + 1) - into if done < plan.steps else 0.0

    def drop_cache(self) -> None:
        """Forget cached prefixes: another policy version computes other KV."""
        self.cache.clear()
        self._salt += 1

    def count_steps(self, now: float) -> None:
        """Count the planned steps that have ended, for `busy_seconds` and `token_gaps`."""
        if self._plan.steps:
            at = now if self._paused_at is None else self._paused_at
            self._count_steps(min(self._plan.whole_steps(max(0.0, at - self._plan.began)), self._plan.steps - 1))

    def _plan_again(self, now: float) -> None:
        """Plan again at the end of the step under way, or now if none is under way."""
        plan = self._plan
        if not plan.steps:
            if self._paused_at is None:
                self._begin(now)
            return
        self.count_steps(now)
        self._plan = self._plan._replace(steps=1)
        self._evict_for_step()

    def _count_steps(self, steps: int) -> None:
        """Count the first `steps` planned steps as done."""
        plan = self._plan
        if not steps:
            return
        seconds = plan.seconds(steps)
        share = seconds / plan.tokens
        self.busy_seconds += seconds
        self._steps += steps
        self._held += plan.decoding * steps
        self.cache.shrink(max(0, self.kv_tokens - self._held))
        self._decode_context += plan.decoding * steps
        self._decode_share += share
        for running in self._prefilling:
            running.device_seconds += share * running.chunk
        if plan.decoding:
            self.token_gaps.add(max(0.0, plan.began - self._stepped_at) + plan.first_seconds, plan.decoding)
            if steps > 1:
                self.token_gaps.add((seconds - plan.first_seconds) / (steps - 1), plan.decoding * (steps - 1))
        self._stepped_at = plan.began + seconds
        if self.on_steps is not None:
            self.on_steps(plan, steps)
        self._plan = plan._replace(
            began=self._stepped_at,
            steps=plan.steps - steps,
            first_seconds=plan.first_seconds + steps * plan.growth_seconds,
        )

    def _end_prefills(self, at: float) -> None:
        """Let the requests whose context is computed decode: the step has sampled their first token."""
        if not self._prefilling:
            return
        done = [each for each in self._prefilling if each.computed == each.context_tokens]
        self._prefilling = [each for each in self._prefilling if each.computed < each.context_tokens]
        for running in done:
            if running.sampled_before:
                self.token_gaps.add(at - running.token_at)
            running.first_token_at = running.first_token_at or at
            running.began_step = self._steps
            running.decode_share = self._decode_share
            self._held += 1
            self._decode_context += running.context_tokens + 1
            self._decoding[running.request.name] = running
            ends = self._steps + running.request.new_tokens - running.sampled_before - 1
            heapq.heappush(self._ends, (ends, running.ticket, running))

    def _begin(self, at: float) -> None:
        """Plan the next steps: decoding requests, then prompts under way, then new prompts."""
        while self.running > 1 and self.held_tokens + self._growth() > self.kv_tokens:
            self._preempt(at)
        decoding = len(self._decoding)
        chunks: list[tuple[int, int]] = []
        left = self.step_tokens - decoding
        for running in self._prefilling:
            left = self._compute(running, left, chunks)
        while self.waiting and left > 0 and self.running < self.max_running:
            admitted = self._admit(at)
            if admitted is None:
                break
            left = self._compute(admitted, left, chunks)
        self._evict_for_step()
        if not decoding and not chunks:
            self._plan = NO_PLAN
            return
        steps, growth = 1, 0.0
        if chunks:
            first = self.cost.step_seconds(decoding=decoding, context_tokens=self._decode_context, chunks=chunks)
        else:
            fixed, per_token = self.cost.decode_terms(decoding)
            first, growth = fixed + per_token * self._decode_context, per_token * decoding
            if not self.single_steps:
                room = max(0, self.kv_tokens - self.held_tokens) // decoding
                steps = max(1, min(self._next_end() - self._steps, room))
        delay = self.before_step(at) if self.before_step is not None else 0.0
        tokens = decoding + sum(chunk for chunk, _ in chunks)
        self._plan = Plan(at + delay, steps, first, growth, decoding, tokens)

    def _evict_for_step(self) -> None:
        """Evict what the tokens that this step samples need."""
        sampled = len(self._decoding) + sum(each.computed == each.context_tokens for each in self._prefilling)
        self.cache.shrink(max(0, self.kv_tokens - self._held - sampled))

    def _growth(self) -> int:
        """Return the KV tokens by which the running requests grow in the next step."""
        left, grown = self.step_tokens - len(self._decoding), len(self._decoding)
        for running in self._prefilling:
            missing = running.context_tokens - running.computed
            chunk = min(max(0, left), missing)
            left -= chunk
            grown += chunk + (chunk == missing)
        return grown

    def _next_end(self) -> int:
        while True:
            step, _, running = self._ends[0]
            if self._decoding.get(running.request.name) is running:
                return step
            heapq.heappop(self._ends)

    def _admit(self, at: float) -> Running | None:
        """Give the first waiting request a slot; None if its context does not fit beside the next tokens of others."""
        waiting = self.waiting[0]
        request, sampled = waiting.request, waiting.sampled_tokens
        segments = tuple(Segment(f"{self._salt}/{name}", tokens) for name, tokens in request.segments)
        *shared, own = segments
        context = request.context_tokens + sampled
        in_use = sum(self.cache.tokens_in_use(segment.name) for segment in shared)
        if self.held_tokens + len(self._decoding) + context + 1 - in_use > self.kv_tokens:
            return None
        self.waiting.popleft()
        block = self.cost.block_tokens
        found = self.cache.lookup((*shared, Segment(own.name, own.tokens + sampled)))
        cached = min(found, (context - 1) // block * block)
        for segment in shared:
            self.cache.use(segment.name)
        self.cache.take(own.name)
        self._held += max(0, cached - (context - own.tokens - sampled))
        self._tickets += 1
        running = Running(request, segments, self._salt, context, cached, at, cached, self._tickets, sampled)
        if waiting.device_seconds:
            running.cached_tokens, running.scheduled_at = waiting.cached_tokens, waiting.scheduled_at
            running.first_token_at, running.device_seconds = waiting.first_token_at, waiting.device_seconds
            running.token_at = waiting.token_at
        self._prefilling.append(running)
        return running

    def _compute(self, running: Running, left: int, chunks: list[tuple[int, int]]) -> int:
        """Add as much of a context to the step as fits; return the tokens that are left for others."""
        chunk = running.chunk = min(max(0, left), running.context_tokens - running.computed)
        if not chunk:
            return left
        chunks.append((chunk, running.computed))
        before, running.computed = running.computed, running.computed + chunk
        begins = 0
        for segment in running.segments[:-1]:
            if running.computed > begins and before < begins + segment.tokens:
                self.cache.extend(segment.name, min(segment.tokens, running.computed - begins))
            begins += segment.tokens
        self._held += max(0, running.computed - max(before, begins))
        return left - chunk

    def _preempt(self, at: float) -> None:
        """Send the youngest request back to the front of the queue."""
        running = max((*self._prefilling, *self._decoding.values()), key=lambda each: each.ticket)
        if running in self._prefilling:
            self._prefilling.remove(running)
            result = self._result(running, at)._replace(token_at=running.token_at)
        else:
            result = self._leave(running, at)._replace(token_at=self._stepped_at)
        self.preempted += 1
        self.waiting.appendleft(result)

    def _leave(self, running: Running, at: float) -> EngineResult:
        """Take a decoding request out."""
        del self._decoding[running.request.name]
        sampled = self._steps - running.began_step + 1
        running.device_seconds += self._decode_share - running.decode_share
        self._decode_context -= running.context_tokens + sampled
        return self._result(running, at, sampled)

    def _result(self, running: Running, at: float, sampled: int = 0) -> EngineResult:
        """Return a request that is in no step any more; its context stays in the cache."""
        *shared, last = running.segments
        before = sum(segment.tokens for segment in shared)
        self._held -= max(0, running.computed - before) + sampled
        block = self.cost.block_tokens
        computed = running.computed + max(0, sampled - 1)  # the last sampled token was no input yet
        whole = max(0, computed // block * block - before)
        if running.request.blocks:
            for name in reversed(running.request.blocks[: whole // block]):
                self.cache.put(f"{running.salt}/{name}", block)
        else:
            self.cache.put(last.name, whole)
        for segment in reversed(shared):  # the end of a context is evicted before its beginning
            self.cache.release(segment.name)
        self.cache.shrink(max(0, self.kv_tokens - self._held))
        return EngineResult(
            running.request,
            running.sampled_before + sampled,
            running.cached_tokens,
            running.scheduled_at,
            running.first_token_at,
            at,
            running.device_seconds,
        )
