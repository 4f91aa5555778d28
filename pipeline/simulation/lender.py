"""A simulated serving engine that lends: its users' requests, and a guest that computes in between.

Keeps true
- Serving comes first, by the production cores: `Admission` decides before each guest step whether and how long the
  guest may compute, and `KvBudget` how much KV memory it may hold.
- A request that arrives while the guest computes waits for the end of the guest's layer, as in the lender's process.
- While serving computes, the guest runs only in what `Admission` gives it between two of serving's steps (`slo`).
- A cut returns whole turns at once, the youngest first, with the tokens that they have.
- A parked guest holds nothing. It is ready `wake_seconds` after its grant, and then takes the newest version.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from rose.pipeline.simulation.cost_model import CostModel
from rose.pipeline.simulation.engine import Engine, EngineRequest, EngineResult
from rose.pipeline.simulation.executors import Executor, Surroundings
from rose.pipeline.simulation.latency_histogram import LatencyHistogram
from rose.pipeline.simulation.recorder import Answered, MemoryDecision, Recorder, Swap
from rose.schemas.grants import CapacityGrant, GrantSource
from rose.schemas.heartbeats import BUILDING_REASON, NOT_RESUMED_REASON, WorkerClass
from rose.workers.executor.grants import Lease, Permission
from rose.workers.executor.ipc.messages import (
    EngineStatus,
    LendingStats,
    NextWork,
    Resume,
    ServingStats,
    Suspend,
    WorkKind,
)
from rose.workers.executor.step_cost import ComputeShare
from rose.workers.lender.admission import Admission, Promise, ServingState
from rose.workers.lender.kv_budget import KvBudget, KvLimits, KvShares, KvUsage

PARKED, WAKING = NOT_RESUMED_REASON, BUILDING_REASON

HEADROOM_SHARE = 0.2
"""Share of the KV memory that growth of the guest leaves free for serving (`lender.headroom`)."""

QUIET_SECONDS = 10.0
"""A freeze ends after so long without a cut (`lender.quiet_seconds`)."""


@dataclass(slots=True, kw_only=True)
class ServingFigures:
    """Latencies that the users of one server saw."""

    ttft: LatencyHistogram
    requests: int = 0
    kept: int = 0
    """Requests whose first token and mean time per token were within the promise."""


class ServingEngine:
    """The users' requests of one server."""

    def __init__(self, cost: CostModel, promise: Promise, *, max_running: int, step_tokens: int) -> None:
        self.engine = Engine(cost, max_running=max_running, step_tokens=step_tokens, kv_tokens=cost.kv_cache_tokens)
        self.figures = ServingFigures(ttft=LatencyHistogram())
        self._promise = promise

    def on_ended(self, result: EngineResult) -> None:
        """Count a request that has ended."""
        figures, arrived = self.figures, result.request.arrived_at
        ttft = result.first_token_at - arrived
        later = max(1, result.sampled_tokens - 1)
        tpot = (result.finished_at - result.first_token_at) / later
        figures.requests += 1
        figures.kept += ttft <= self._promise.ttft_seconds and tpot <= self._promise.tpot_seconds
        figures.ttft.add(ttft)


class LendingServer(Executor):
    """A serving engine and its guest, which is the executor."""

    worker_class = WorkerClass.SERVING

    def __init__(
        self,
        name: str,
        slot: int,
        cost: CostModel,
        around: Surroundings,
        *,
        max_turns: int,
        step_tokens: int,
        serving: ServingEngine,
        promise: Promise,
        job: str,
        newest_version: Callable[[], tuple[int, float]],
        needs_grant: bool,
    ) -> None:
        """`newest_version`: the newest version, and the seconds in which a woken guest takes it.

        `needs_grant`: whether the server lends only with a grant of the control app.
        """
        self._lease = Lease(job, grant_required=needs_grant)
        super().__init__(name, slot, cost, around, max_turns=max_turns, step_tokens=step_tokens)
        self.serving = serving
        self.admission = Admission(promise, serving_step_tokens=serving.engine.step_tokens)
        self.cuts = 0
        self._newest_version = newest_version
        self._parked = PARKED
        self._wake = 0
        total = serving.engine.kv_tokens * serving.engine.cost.kv_bytes_per_token
        block = cost.block_tokens * cost.kv_bytes_per_token
        self._memory = KvBudget(
            KvLimits(
                total_bytes=total,
                pool_bytes=total // block * block,
                block_bytes=block,
                headroom_bytes=int(HEADROOM_SHARE * total),
                quiet_seconds=QUIET_SECONDS,
                piece_bytes=total,
                transferable=True,
            )
        )
        self._shares: KvShares | None = None
        self._serving_looked_at = 0.0
        self._share = ComputeShare()
        self._shared_at = self._shared_seconds = 0.0
        """Time and busy seconds at the newest observation of `_share`."""
        self._had_turns = False
        self._learned_seconds = 0.0
        """The guest's busy seconds at the newest observation of its step time."""
        self._computed_at = 0.0
        """When the guest was last allowed to compute."""
        self.engine.pause(0.0)
        self.engine.limit_kv(0, 0.0)
        if around.recorder is not None:
            self._record(around.recorder)
        serving.engine.before_step = self._before_serving_step

    def _record(self, recorder: Recorder) -> None:
        """Let the recorder see the steps of serving, and the times in which the guest computes."""
        self.serving.engine.on_steps = partial(recorder.on_serving_steps, self.name)
        self.engine.on_pause = partial(recorder.on_guest_paused, self.name)

    @property
    def lent_seconds(self) -> float:
        """Seconds in which the guest has computed, up to its newest whole step that was counted."""
        return self.engine.busy_seconds

    def on_grant(self, grant: CapacityGrant, source: GrantSource) -> None:
        """Take a grant that has just been written."""
        self._lease.on_grant(grant, self._events.now, source=source, live=True)
        self._beat_now()

    def on_user_request(self, request: EngineRequest) -> None:
        """Take a request of a user: the guest stops at the end of its layer."""
        now = self._events.now
        self._catch_up()
        self._serve()
        engine = self.serving.engine
        self.admission.on_arrival(request.context_tokens, now)
        wait = 0.0 if engine.requests else self.engine.layer_remaining(now)
        if wait:
            self._events.after(wait, partial(self._admit_user, request))
        else:
            self._admit_user(request)

    def _admit_user(self, request: EngineRequest) -> None:
        self._catch_up()
        self._serve()
        self._stop_guest()
        self.serving.engine.add(request, self._events.now)
        self._share_memory()
        self._look_at_serving()

    def on_work(self) -> None:
        """Let the guest compute if it may."""
        self._let_guest_compute()
        shares_steps = bool(self.admission.promise.dial and self.engine.requests)
        self.serving.engine.plan_single_steps(shares_steps, self._events.now)
        self._look_at_serving()
        self._look_again()

    def _permission(self) -> Permission:
        return self._lease.permission(self._events.now)

    def _beat(self) -> None:
        now, has_turns = self._events.now, bool(self._held)
        self.engine.count_steps(now)
        seconds = self.engine.busy_seconds
        computed = seconds - self._shared_seconds
        self._share.observe(computed, now - self._shared_at, has_turns=has_turns and self._had_turns)
        self._shared_at, self._shared_seconds, self._had_turns = now, seconds, has_turns
        super()._beat()

    def _update_gate(self) -> None:
        busy = bool(self.serving.engine.requests)
        before = self.gate.reason
        self._catch_up()
        command = self.gate.update(self._status(), busy=bool(self._held))
        if isinstance(command, Resume) and self._parked == PARKED:
            self._wake_guest()
        elif isinstance(command, Suspend) and self._parked != PARKED:
            self._park_guest()
        self._share_memory(grow=not busy)
        self.inbox.offer(max_turns=self._max_turns, token_budget=self.gate.allowed_tokens)
        if self.gate.reason and not before:
            self._return_turns(self.gate.reason)
        self.on_work()

    def _wake_guest(self) -> None:
        self._parked, self._wake = WAKING, self._wake + 1
        version, transfer_seconds = self._newest_version()
        self._events.after(self.cost.wake_seconds + transfer_seconds, partial(self._woken, self._wake, version))

    def _woken(self, wake: int, version: int) -> None:
        if wake != self._wake or self._parked != WAKING or self.gone:
            return
        self._parked, self._computed_at = "", self._events.now
        self.version = version
        if self._around.recorder is not None:
            self._around.recorder.add(Swap(self.name, version, self._events.now, 0.0))
        newest, transfer_seconds = self._newest_version()
        if newest != version:
            self.publish(newest, transfer_seconds, 0.0)
        self._beat_now()

    def _park_guest(self) -> None:
        self._return_turns(self.gate.reason or PARKED)
        self._parked, self._shares, self.version = PARKED, None, -1
        self._wake += 1
        self.engine.pause(self._events.now)
        self.engine.drop_cache()
        self.engine.limit_kv(0, self._events.now)
        self._share_memory()

    def restart(self, version: int) -> None:
        """Come back with a parked guest, as a new incarnation; nothing happens if it is there."""
        if not self.gone:
            return
        self._park_guest()
        super().restart(self.version)

    def publish(self, version: int, transfer_seconds: float, swap_seconds: float) -> None:
        """Take a policy version, unless the guest is parked: a guest takes the newest version when it wakes."""
        if not self._parked:
            super().publish(version, transfer_seconds, swap_seconds)

    def _resume(self) -> None:
        """Do nothing: the guest goes on when it may compute."""

    def _let_guest_compute(self) -> None:
        """Let the guest compute while serving has nothing to do."""
        now = self._events.now
        if not self.serving.engine.requests:
            self._computed_at = now
        if self.serving.engine.requests or self._parked or self._swaps or not self.engine.requests:
            self._stop_guest()
            return
        decision = self.admission.admit(ServingState(), self._next_work(), now=now)
        self.engine.step_tokens = max(1, decision.tokens)
        if self.engine.paused:
            self.engine.resume(now)

    def _stop_guest(self) -> None:
        if not self.engine.paused:
            self._computed_at = self._events.now
            self.engine.pause(self._events.now)

    def _next_work(self) -> NextWork:
        tokens = max(1, self.engine.plan.tokens)
        return NextWork(WorkKind.STEP, self.admission.guest.seconds(tokens))

    def _catch_up(self) -> None:
        plan = self.engine.plan
        super()._catch_up()
        if self.engine.busy_seconds > self._learned_seconds and plan.tokens:
            self._learned_seconds = self.engine.busy_seconds
            self.admission.guest.observe(plan.tokens, plan.first_seconds)

    def _before_serving_step(self, at: float) -> float:
        """Let the guest compute between two steps of serving; return for how long serving waits."""
        engine = self.serving.engine
        if not self.admission.promise.dial or self._parked or self._swaps or not self.engine.requests:
            return 0.0
        state = ServingState(
            prefills=engine.unfinished_prompts,
            last_tokens=(engine.stepped_at,) * engine.decoding,
            waiting=len(engine.waiting),
        )
        decision = self.admission.admit(state, self._next_work(), now=at)
        if decision.hold_reason is not None:
            return 0.0
        self.engine.step_tokens = max(1, decision.tokens)
        self.engine.resume(at)
        seconds = min(decision.seconds, self.engine.step_remaining(at))
        self.admission.on_guest_run(held=state.held, seconds=seconds)
        self._events.at(at + seconds, self._end_guest_turn)
        self._look_again()
        return seconds

    def _end_guest_turn(self) -> None:
        if self.serving.engine.requests:
            self._catch_up()
            self._stop_guest()

    def _serve(self) -> None:
        """End serving's steps up to now."""
        engine, now = self.serving.engine, self._events.now
        plan, before = engine.plan, engine.busy_seconds
        ended = engine.advance(now)
        steps_seconds = engine.busy_seconds - before
        if steps_seconds > 0.0:
            self.admission.on_serving_step(
                prompt_tokens=plan.tokens - plan.decoding,
                decoding=plan.decoding,
                held=plan.decoding + len(engine.unfinished_prompts),
                seconds=plan.first_seconds,
            )
        for result in ended:
            self.serving.on_ended(result)
            if self._around.recorder is not None:
                self._around.recorder.add(Answered(self.name, result))
        if ended:
            self._share_memory()
        if not engine.requests:
            self.on_work()

    def _look_at_serving(self) -> None:
        at = self.serving.engine.next_at
        if at != self._serving_looked_at:
            self._serving_looked_at = at
            self._events.at(at, lambda: self._serve_at(at))

    def _serve_at(self, at: float) -> None:
        if at == self._serving_looked_at:
            self._serving_looked_at = 0.0
            self._serve()
            self._look_at_serving()

    def _share_memory(self, *, grow: bool = False) -> None:
        """Decide how much KV memory each tenant may hold, and return the turns that no longer fit."""
        serving, guest, now = self.serving.engine, self.engine, self._events.now
        if self._parked:
            if serving.kv_tokens != serving.cost.kv_cache_tokens:
                serving.limit_kv(serving.cost.kv_cache_tokens, now)
            return
        ours, theirs = serving.cost.kv_bytes_per_token, self.cost.kv_bytes_per_token
        wanted = sum(each.request.context_tokens for each in serving.waiting) * ours
        use = KvUsage(
            serving_bytes=serving.held_tokens * ours,
            serving_wanted_bytes=wanted,
            serving_cached_bytes=(serving.cache.tokens - serving.cache.used_tokens) * ours,
            guest_bytes=guest.held_tokens * theirs,
            guest_cached_bytes=(guest.cache.tokens - guest.cache.used_tokens) * theirs,
        )
        shares = self._memory.decide(
            use, most_bytes=self._memory_limit, policy_version=self.version, grow=grow, now=now
        )
        frozen = self._shares is not None and self._shares.frozen
        changed = self._shares is None or shares.budget_bytes != self._shares.budget_bytes
        self._shares = shares
        self.cuts += shares.cuts
        if self._around.recorder is not None and (shares.cuts or shares.frozen != frozen):
            self._around.recorder.add(MemoryDecision(self.name, now, shares.cuts, shares.frozen))
        if not changed:
            return
        tokens = shares.budget_bytes // theirs
        while guest.held_tokens > tokens and guest.running:
            self._preempt(guest.youngest(), "serving takes its memory")
        guest.limit_kv(tokens, now)
        serving.limit_kv(shares.serving_bytes // ours, now)
        if shares.cuts:
            self.inbox.offer(max_turns=self._max_turns, token_budget=self.gate.allowed_tokens)

    @property
    def _memory_limit(self) -> int:
        return self._permission().kv_bytes or 1 << 62

    def _status(self) -> EngineStatus:
        engine, shares, status = self.serving.engine, self._shares, super()._status()
        blocked = bool(engine.requests) and not self._parked
        return msgspec.structs.replace(
            status,
            prefill_tokens_per_second=self._share.value * status.prefill_tokens_per_second,
            decode_tokens_per_second=self._share.value * status.decode_tokens_per_second,
            blocked_seconds=self._events.now - self._computed_at if blocked else 0.0,
            suspended_reason=self._parked,
            serving=ServingStats(engine.running, len(engine.waiting), None, None, 0.0, 0.0, 0.0, 0.0, 0.0, {}),
            lending=None if shares is None else LendingStats(shares.budget_bytes, shares.frozen),
        )
