"""The guest: the rollout engine inside a serving engine's process, built, ticked and dropped.

Keeps true
- Nothing that goes wrong here leaves `tick`: the guest is dropped, which is told, and built again after a while.
- A tick is one bounded piece: of building the guest, of preparing a version, or a step of the engine. A guest whose
  steps have no price yet makes some before it is there (`profile`).
- Between two ticks the process is as the host left it, and between two layers of a step while it is `aside`.
- A guest is built once somebody has knocked and said so, and parked when it is not wanted any more (`life`), whoever is
  there. Who knocks later gets the same engine, empty, at the version that it has.
- Serving's next step has the KV memory that it may take, whatever the guest holds (`sharing`).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from logging import Logger

from schemas.errors import in_words
from workers.executor.host import EngineHost
from workers.executor.line import Line
from workers.executor.step_cost import StepCost
from workers.executor.vllm.engine import Engine
from workers.executor.want import Want, Work
from workers.executor.words import NO_LIMIT, Gone, Slack
from workers.lender.caller import Caller
from workers.lender.config import LendConfig
from workers.lender.feeder import Feeder
from workers.lender.life import Act, Life, State
from workers.lender.parked import NOT_WOKEN, Parked
from workers.lender.pulse import Pulse
from workers.lender.vllm.apart import Apart, apart_for_building
from workers.lender.vllm.building import build
from workers.lender.vllm.pieces import Pieces
from workers.lender.vllm.pool import Pool
from workers.lender.vllm.profile import Profile
from workers.lender.vllm.ranks import Ranks
from workers.lender.vllm.serving_memory import ServingMemory
from workers.lender.vllm.sharing import Sharing

FREE_SECONDS = 0.5
"""How long a guest that is parked waits for serving to be idle before it gives its memory back all the same."""


class Guest:
    """At most one engine, for at most one process beside."""

    def __init__(
        self,
        config: LendConfig,
        feeder: Feeder,
        pulse: Pulse,
        cost: StepCost,
        slack: Callable[[], Slack],
        serving: ServingMemory,
        log: Logger,
        between_layers: Callable[[], None],
        ranks: Ranks | None = None,
    ) -> None:
        """`cost`: of the guest's steps, which is told of each; `slack`: how serving stands, for those beside;
        `between_layers` is called within its steps, as far as they are in this process; `ranks`: serving's, where it
        has several.
        """
        self._config = config
        self._feeder = feeder
        self._caller = Caller(feeder)
        self._pulse = pulse
        self._cost = cost
        self._slack = slack
        self._serving = serving
        self._log = log
        self._between_layers = between_layers
        self._ranks = ranks
        self._life = Life()
        self._parks_since = 0.0
        self._apart: Apart | None = None
        self._building: Pieces[tuple[Engine, Pool]] | None = None
        self._engine: Engine | None = None
        self._sharing: Sharing | None = None
        """While there is an engine."""
        self._profile: Profile | None = None
        """Of an engine that has just been built."""
        self._host: EngineHost | Parked | None = None
        """Answers the caller, while there is one."""
        self._granted = 0
        """KV bytes, as it last heard; 0: it is not to lend."""
        self._failed: Exception | None = None
        """Of it, while its step stood still."""
        self._began = 0.0

    @property
    def busy(self) -> bool:
        """Whether a tick has something to do."""
        if self._caller.changed:
            return True
        if self._sharing is not None and self._sharing.busy:
            return True
        if self._host is None:
            return self._left_alone
        return self._host.busy or self._life.due(self._wanted, time.monotonic())

    @property
    def _left_alone(self) -> bool:
        """Whether nobody is there for whom a guest would be kept that something says is to stop."""
        return self._host is None and self._engine is not None and not self._wanted

    @property
    def _wanted(self) -> bool:
        return self._granted > 0 and not self._pulse.stop

    @property
    def want(self) -> Want:
        """What the next tick would do."""
        if self._engine is None or self._sharing is None:
            return Want(Work.ANY, self._config.piece_seconds)
        if self._profile is not None and not self._needs_memory:
            return self._profile.want
        if self._sharing.grows:
            return Want(Work.PIECE, self._config.piece_seconds)
        return self._host.want if isinstance(self._host, EngineHost) else Want(Work.ANY, 0.0)

    @property
    def _needs_memory(self) -> bool:
        """Whether a profile waits for more."""
        assert self._profile is not None and self._sharing is not None
        return self._sharing.grows and self._profile.needs(self._sharing.room_tokens)

    def tick(self, *, seconds: float, tokens: int) -> None:
        """One bounded piece of work, of at most `seconds`, or a step of at most `tokens` tokens. Raises nothing."""
        self._pulse.take()
        try:
            if self._caller.changed:
                self._change_link()
            else:
                self._live(seconds, tokens)
        except Exception as error:  # noqa: BLE001  whatever a guest does, serving goes on
            self.drop(error)
        finally:
            self._pulse.give()

    def beat(self, *, held: bool) -> None:
        """Where no tick may be done (`held`), or there is nothing to do: report, and let go of what is not wanted.

        Raises nothing.
        """
        self._pulse.take()
        try:
            if self._caller.changed:
                self._change_link()
            if self._host is not None:
                self._host.beat(held=held)
                self._granted = self._host.granted
            self._let_park(held=held)
        except Exception as error:  # noqa: BLE001  as above
            self.drop(error)
        finally:
            self._pulse.give()

    def _live(self, seconds: float, tokens: int) -> None:
        if self._host is None:
            self._let_park(held=False)
            return
        self._follow()
        host: EngineHost | Parked | None = self._host
        assert host is not None
        if self._life.state is State.PARKING:
            host.beat()
            self._park(held=False)
        elif isinstance(host, Parked):
            host.tick()
            if self._life.state is State.WAKING:
                self._wake(seconds, tokens)
        elif self._sharing is not None and self._sharing.grows:
            self._share(grow=True)
            host.beat()
        else:
            assert self._apart is not None
            with self._apart.stepping():
                host.tick(tokens, seconds)
        self._granted = host.granted
        if self._failed is not None:
            raise self._failed

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While its step stands still between two layers, and the host has the thread."""
        assert self._engine is not None and self._apart is not None
        began = time.perf_counter()
        self._pulse.give()
        with self._apart.aside():
            yield
        self._pulse.take()
        self._engine.aside_seconds += time.perf_counter() - began

    def stands(self, *, held: bool) -> bool:
        """Its step stands still: report; whether it may stand on, as nothing waits for its end. `held`: whether it may
        not go on. Raises nothing.
        """
        if self._host is None or self._caller.changed or self._failed is not None:
            return False
        self._pulse.take()
        try:
            patient = self._host.stands(held=held)
            self._granted = self._host.granted
            return patient and self._wanted
        except Exception as error:  # noqa: BLE001  as of the step itself, which is computed to its end first
            self._failed = error
            return False
        finally:
            self._pulse.give()

    def make_room(self) -> None:
        """Before a step of serving. Raises nothing."""
        if self._sharing is not None:
            try:
                self._share(grow=False)
            except Exception as error:  # noqa: BLE001  as above
                self.drop(error)

    def make_room_within(self) -> bool:
        """The same within a step of its own: whether that needed no turn taken out, and is done. Raises nothing."""
        if self._sharing is None or self._host is None:
            return True
        try:
            done = self._sharing.look_within(most_bytes=self._host.granted or NO_LIMIT)
            if done:
                self._tell_news()
            return done
        except Exception as error:  # noqa: BLE001  as above
            self._failed = error
            return False

    def _share(self, *, grow: bool) -> None:
        assert self._sharing is not None
        host = self._host
        give_up: Callable[[str, str], None] | None = None
        if isinstance(host, EngineHost):
            give_up = host.give_up
        elif host is not None and self._profile is not None:
            give_up = self._profile.give_up
        most = (host is not None and host.granted) or NO_LIMIT  # of one that parks, the turns go back one by one
        self._sharing.look(give_up, most_bytes=most, grow=grow)
        self._tell_news()

    def _tell_news(self) -> None:
        if isinstance(self._host, EngineHost) and self._sharing is not None and self._sharing.take_news():
            self._host.tell_load()

    def _follow(self) -> None:
        now = time.monotonic()
        if self._profile is not None and not self._wanted:
            self._lend()
        match self._life.follow(self._wanted, now):
            case Act.BUILD:
                self._began = now
                self._apart = apart_for_building()
                self._building = Pieces(partial(build, self._config, self._ranks, self._log), "rose-guest-build")
            case Act.PARK:
                self._parks_since = now
            case Act.NOTHING:
                pass
        if isinstance(self._host, Parked):
            self._host.why = self._why_parked

    @property
    def _why_parked(self) -> str:
        if self._life.state is State.WAKING:
            return "its guest is being built"
        if self._life.state is State.DROPPED:
            return "its guest was dropped, and is built again"
        return self._pulse.stop or NOT_WOKEN

    def _let_park(self, *, held: bool) -> None:
        """Where it is not wanted."""
        if not self._wanted:
            self._follow()
        if self._life.state is State.PARKING:
            self._park(held=held)

    def _park(self, *, held: bool) -> None:
        """One turn back, or, once none is left, all of its memory."""
        assert self._engine is not None and self._apart is not None
        if isinstance(self._host, EngineHost) and not self._host.hand_back():
            return
        if held and time.monotonic() - self._parks_since < FREE_SECONDS:
            return
        engine = self._engine
        self._let_go()
        with self._apart.stepping():
            engine.close()
        self._life.freed()
        self._log.info("rose: the guest is parked: %s", self._why_parked)
        self._enter()

    def _change_link(self) -> None:
        if self._host is not None:
            self._granted = self._host.granted
            self._host.leave()
        self._host = None
        if self._profile is not None:
            self._profile.end()
        self._caller.take()
        self._enter()
        if self._sharing is not None:
            self._share(grow=False)  # with nobody to lend to, its memory goes back

    def _enter(self) -> None:
        """Have somebody answer the caller."""
        if self._host is not None:
            self._granted = self._host.granted
        self._host = None
        wires, reports, every = self._caller.wires, self._caller.reports, self._config.heartbeat_seconds
        if wires is None or reports is None:
            return
        if self._engine is None or self._profile is not None:
            self._host = Parked(Line(wires.orders), reports, self._slack, tick_seconds=every)
            self._host.why = self._why_parked
        else:
            assert self._sharing is not None
            slack, lent = self._slack, self._sharing.told
            self._host = EngineHost(
                self._engine, wires, reports, self._cost, tick_seconds=every, slack=slack, lent=lent
            )
        self._host.granted = self._granted

    def _wake(self, seconds: float, tokens: int) -> None:
        """One piece of building the guest, or of its first steps."""
        if self._profile is None:
            self._build(min(seconds, self._config.piece_seconds))
        elif self._needs_memory:
            self._share(grow=True)
        else:
            assert self._apart is not None and self._sharing is not None
            with self._apart.stepping():
                self._profile.step(tokens, self._sharing.room_tokens)
            if self._profile.done:
                self._lend()

    def _lend(self) -> None:
        """The guest is there."""
        assert self._profile is not None
        self._profile.end()
        self._profile = None
        self._life.built()
        self._enter()

    def _build(self, seconds: float) -> None:
        assert self._building is not None and self._apart is not None
        if self._ranks is not None and self._ranks.asked:
            self._ranks.go_on(seconds)
            return
        with self._apart.building():
            if not self._building.go_on(seconds):
                return
        building, self._building = self._building, None
        self._engine, pool = building.result()
        self._feeder.guest_lives = True
        self._engine.between_layers(self._between_layers)
        self._sharing = Sharing(self._serving, self._engine, pool, self._config)
        self._profile = Profile(self._engine, self._cost)
        pieces, longest_seconds = (0, 0.0) if self._ranks is None else self._ranks.told()
        self._log.info(
            "rose: the guest is built, %.2f s after it was begun, in %d pieces of at most %.1f ms",
            time.monotonic() - self._began,
            pieces + building.pieces,
            1000 * max(longest_seconds, building.longest_seconds),
        )
        if self._cost.known:
            self._lend()

    def drop(self, error: Exception) -> None:
        """Let go of the engine for an error, and tell. Raises nothing."""
        if self._building is not None:  # which has not failed, and cannot be ended: who knocks next waits for it
            self._host = None
            self._caller.hang_up()
            self._log.error("rose: the link of a guest that is being built is ended: %s", in_words(error))
            return
        engine, self._failed = self._engine, None
        with suppress(Exception):  # what is broken may not let itself be closed
            self._let_go()
        wait, reason = self._life.fault(time.monotonic()), in_words(error)
        self._log.error("rose: the guest is dropped, serving goes on, another is built in %.0f s: %s", wait, reason)
        with suppress(Exception):  # as where the link is broken
            self._caller.tell(Gone(reason, wait), last=isinstance(self._host, Parked))
        if engine is not None and self._apart is not None:
            with suppress(Exception), self._apart.stepping():  # as above
                engine.close()
        with suppress(Exception):  # as where no descriptor is left
            self._enter()
        if self._host is None:
            self._caller.hang_up()

    def _let_go(self) -> None:
        """Of the engine; all KV memory is serving's again."""
        sharing, self._engine, self._sharing, self._profile = self._sharing, None, None, None
        self._feeder.guest_lives = False
        if sharing is not None:
            sharing.close()
