"""The engine's side of an executor: it is ticked, and does one bounded piece of work a tick.

Keeps true
- A tick takes orders in, does one piece of preparing a version or one engine step, in turn, and reports.
  Nothing else runs in this process for it: no bus, no records, no thread.
- Where a tick has an end, orders that take long to obey (a turn's context is hashed) are a piece of work of their own.
- A policy version is swapped in between two steps, whole or not at all.
- Where no tick may be done, a turn that is given up goes back all the same, one at a time; within a step, none does.
- Reports never wait for their reader: what does not fit on the line is kept and sent later, in order.
- Ticks make the heartbeats: an engine that hangs says nothing.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator

from schemas.arrays import pack_logprobs, pack_tokens, unpack_tokens
from schemas.errors import RecordError
from workers.executor.line import Line
from workers.executor.slabs import Lying
from workers.executor.step_cost import StepCost
from workers.executor.vllm.engine import Engine
from workers.executor.vllm.types import EngineRefusal, Finished, SwapRefused
from workers.executor.want import Want, Work
from workers.executor.wires import Wires
from workers.executor.words import (
    NO_LIMIT,
    ORDERS,
    Done,
    GiveUp,
    Lent,
    NotTaken,
    Order,
    Outbox,
    Park,
    Prepare,
    Prepared,
    Refused,
    Serve,
    Serving,
    Slack,
    Take,
    Tick,
    Wake,
    untouched,
)

UNKNOWN_PIECE = {"base_seconds": 0.002, "token_seconds": 1e-6}
"""A guess for a piece of preparing a version, of which none was seen."""

OBEYED_BESIDE = 0.1
"""Share of a tick that orders may take beside a step."""


class EngineHost:
    """One engine at its wires. Whoever owns the thread calls `tick`."""

    def __init__(
        self,
        engine: Engine,
        wires: Wires,
        reports: Outbox,
        cost: StepCost,
        *,
        tick_seconds: float,
        slack: Callable[[], Slack | None] = lambda: None,
        lent: Callable[[], Lent | None] = lambda: None,
    ) -> None:
        """`reports` is of the wires; `cost` is told of each step; `tick_seconds` lie between two `Tick`s, which say
        `slack` and `lent`.
        """
        self.granted = NO_LIMIT
        """KV bytes that it may hold, as far as it was told; 0: it is not to lend. A guest's alone."""
        self._engine = engine
        self._wires = wires
        self._orders = Line(wires.orders)
        self._later: deque[Order] = deque()
        """Read where no tick may be done."""
        self._reports = reports
        self._let_at = time.monotonic()
        """When it might last compute."""
        self._held = False
        """Whether what was last heard within a step is that it may not go on."""
        self._tick_seconds = tick_seconds
        self._slack, self._lent = slack, lent
        self._cost = cost
        self._share = 0.0
        """Running sum of device-seconds a turn."""
        self._share_before: dict[str, float] = {}
        """By turn, what that sum was when it came."""
        self._preparing: tuple[int, Iterator[None]] | None = None
        self._piece_cost = StepCost(**UNKNOWN_PIECE)
        """Of a piece of preparing, whatever it does."""
        self._stepped = False
        """Whether the latest piece of work was a step."""
        self._steps, self._step_seconds = 0, 0.0
        self._next_tick = 0.0

    @property
    def busy(self) -> bool:
        """Whether a tick has something to do."""
        return bool(self._orders or self._later) or self._preparing is not None or len(self._engine) > 0

    @property
    def rest_seconds(self) -> float:
        """Until it must be ticked although it is not busy."""
        return max(0.0, self._next_tick - time.monotonic())

    @property
    def want(self) -> Want:
        """What the next tick would do beside orders, which take as long as they may."""
        if self._prepares_next:
            return Want(Work.PIECE, self._piece_cost.cautious_seconds(1))
        tokens = self._engine.wanted_tokens
        return Want(Work.STEP, self._cost.cautious_seconds(tokens)) if tokens else Want(Work.ANY, 0.0)

    def tick(self, most_tokens: int | None = None, most_seconds: float = math.inf) -> None:
        """One bounded piece of work: orders, for `most_seconds`; with them what was wanted, which is a step of at most
        `most_tokens` tokens or none, or a piece of preparing a version.

        Raises EngineBroken.
        """
        self._let_at, self._held = time.monotonic(), False
        self._reports.flush()
        prepares = self._prepares_next
        self._read()
        if self._obey_all(most_seconds):
            if prepares:
                self._prepare_on()
            elif len(self._engine) and most_tokens != 0:
                self._step(most_tokens)
        self.beat(held=self._held)

    def _obey_all(self, most_seconds: float) -> bool:
        """Obey orders for so long; whether there is time for more than that."""
        began, seconds = time.monotonic(), 0.0
        while self._later and seconds < most_seconds:
            self._obey(self._later.popleft())
            seconds = time.monotonic() - began
        return seconds < OBEYED_BESIDE * most_seconds

    @property
    def _prepares_next(self) -> bool:
        return self._preparing is not None and (self._stepped or not len(self._engine))

    def beat(self, *, held: bool = False) -> None:
        """Say how the engine stands, if it is time for that, and give a turn up: all that may be done where a step may
        not. `held`: whether one may not, or there is just nothing to do.
        """
        if not held:
            self._let_at = time.monotonic()
        elif self._orders or self._later:
            self._read()
            self._give_up_next()
        if time.monotonic() >= self._next_tick:
            self.tell_load()

    def stands(self, *, held: bool) -> bool:
        """Within a step that stands still: say how the engine stands, if it is time for that; whether no turn is to be
        given up, which waits for the step's end. `held`: whether the step may not go on.
        """
        self._held = held
        if not held:
            self._let_at = time.monotonic()
        if self._orders:
            self._read()
        if time.monotonic() >= self._next_tick:
            self.tell_load()
        return not any(isinstance(order, GiveUp) for order in self._later)

    def hand_back(self) -> bool:
        """Give one turn up; whether none is left. Who gave the orders may be slow to hear of it."""
        self._read()
        here = (order.name for order in self._later if isinstance(order, Take))
        name = next(here, None) or next(iter(self._share_before), None)
        if name is not None:
            self.give_up(name)
        return name is None

    def leave(self) -> None:
        """Whoever gave the orders is gone: let go of the turns; the engine may have another host."""
        for name in self._share_before:
            self._engine.abort(name)

    def _read(self) -> None:
        """Orders as they came; what says whether to lend is heard at once."""
        for message in self._orders.read():
            order = ORDERS.decode(message)
            if isinstance(order, Wake | Park):
                self.granted = order.most_bytes if isinstance(order, Wake) else 0
            else:
                self._later.append(order)

    def _give_up_next(self) -> None:
        """The first turn that is to be given up, out of its order."""
        for order in self._later:
            if isinstance(order, GiveUp):
                self._later.remove(order)
                self.give_up(order.name)
                return

    def give_up(self, name: str, reason: str = "") -> None:
        """Take a turn out, and answer with what was sampled of it; it may be in the engine, on the way there, or have
        left.
        """
        finished = self._engine.abort(name)
        if finished is not None:
            self._reports.say(self._done(finished, reason))
        for order in self._later:
            if isinstance(order, Take) and order.name == name:
                self._later.remove(order)
                self._reports.say(untouched(name, time.time()))
                return

    def _obey(self, order: Order) -> None:
        match order:
            case Take():
                self._take(order)
            case GiveUp():
                self.give_up(order.name)
            case Prepare():
                tensors = Lying(self._wires.slabs[order.slab], order.layout)
                self._preparing = order.version, self._engine.preparing(tensors)
            case Serve():
                self._serve(order.version)

    def _take(self, order: Take) -> None:
        if order.version != self._engine.version:  # who gave it had not heard that the guest is another
            reason = f"version {self._engine.version} serves, not {order.version}"
            self._reports.say(untouched(order.name, time.time(), reason))
            return
        try:
            context = unpack_tokens(order.context)
            self._engine.add(order.name, context, order.sampling, policy_version=order.version)
        except (EngineRefusal, RecordError) as refusal:
            self._reports.say(Refused(order.name, str(refusal)))
        else:
            self._share_before[order.name] = self._share

    def _prepare_on(self) -> None:
        assert self._preparing is not None
        version, pieces = self._preparing
        self._stepped, began = False, time.monotonic()
        try:
            next(pieces)
            self._piece_cost.observe(1, time.monotonic() - began)
        except StopIteration:
            self._preparing = None
            self._reports.say(Prepared(version))
        except SwapRefused as refusal:
            self._preparing = None
            self._reports.say(NotTaken(version, str(refusal)))

    def _serve(self, version: int) -> None:
        try:
            seconds = self._engine.serve(version)
        except SwapRefused as refusal:
            self._reports.say(NotTaken(version, str(refusal)))
        else:
            self._reports.say(Serving(version, seconds))
            self.tell_load()

    def _step(self, most_tokens: int | None) -> None:
        self._stepped = True
        step = self._engine.step(most_tokens)
        self._share += self._engine.devices * step.seconds / max(1, len(self._share_before))
        self._steps += 1
        self._step_seconds += step.seconds
        if step.tokens:
            self._cost.observe(step.tokens, step.seconds)
        for finished in step.finished:
            self._reports.say(self._done(finished))

    def _done(self, finished: Finished, reason: str = "") -> Done:
        return Done(
            name=finished.key,
            tokens=pack_tokens(finished.tokens),
            logprobs=pack_logprobs(finished.logprobs),
            finish_reason=finished.finish_reason,
            spans=finished.spans,
            context_tokens=finished.context_tokens,
            cached_tokens=finished.cached_tokens,
            scheduled_at=finished.scheduled_at,
            first_token_at=finished.first_token_at,
            finished_at=finished.finished_at,
            device_seconds=self._share - self._share_before.pop(finished.key),
            reason=reason,
        )

    def tell_load(self) -> None:
        """Say at once how the engine stands."""
        self._next_tick = time.monotonic() + self._tick_seconds
        load, lent = self._engine.load(), self._lent()
        self._reports.say(
            Tick(
                version=self._engine.version,
                device=load.device,
                running=load.running,
                waiting=load.waiting,
                kv_bytes_total=load.kv_bytes_total if lent is None else lent.budget_bytes,
                kv_bytes_free=load.kv_bytes_free,
                kv_bytes_per_token=load.kv_bytes_per_token,
                prefill_tokens_per_second=self._cost.prefill_tokens_per_second,
                decode_tokens_per_second=self._cost.decode_tokens_per_second(load.running),
                steps=self._steps,
                step_seconds=self._step_seconds,
                held_seconds=time.monotonic() - self._let_at,
                slack=self._slack(),
                lent=lent,
            )
        )
        self._steps, self._step_seconds = 0, 0.0
