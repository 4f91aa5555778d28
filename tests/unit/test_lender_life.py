"""The life of a guest: one build at a time, no lending against a stop, bounded waits after faults, no standstill."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.lender.life import FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, WELL_SECONDS, Act, Event, Life, State

OUTCOMES = {Act.BUILD: Event.BUILT, Act.PARK: Event.FREED}


class Lives(RuleBasedStateMachine):
    """A caller that does what it is told, in a world where grants, stops and faults come as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.life = Life()
        self.now = 0.0
        self.doing: Act | None = None
        """Asked for, and not reported yet."""
        self.granted = self.stopped = False
        self.fault_at = -1e9
        self.waits: list[float] = []

    def tell(self, event: Event) -> None:
        act = self.life.on(event, self.now)
        if act is Act.BUILD:
            assert self.doing is None and self.granted and not self.stopped
            assert self.now >= self.fault_at + (self.waits[-1] if self.waits else 0.0)
            self.doing = act
        elif act is Act.PARK:
            assert self.doing is None and not (self.granted and not self.stopped)
            self.doing = act
        elif act is Act.DROP:
            self.doing, self.fault_at = None, self.now
            self.waits.append(self.life.waits_until - self.now)

    @rule(granted=st.booleans())
    def a_grant(self, granted: bool) -> None:
        self.granted = granted
        self.tell(Event.GRANTED if granted else Event.WITHDRAWN)

    @rule(stopped=st.booleans())
    def a_stop(self, stopped: bool) -> None:
        self.stopped = stopped
        self.tell(Event.STOPPED if stopped else Event.CLEARED)

    @precondition(lambda self: self.doing is not None)
    @rule()
    def it_is_done(self) -> None:
        assert self.doing is not None
        event, self.doing = OUTCOMES[self.doing], None
        self.tell(event)

    @rule()
    def a_fault(self) -> None:
        self.tell(Event.FAULT)

    @rule(event=st.sampled_from([Event.BUILT, Event.FREED]))
    def what_nobody_waits_for(self, event: Event) -> None:
        if self.doing is None or OUTCOMES[self.doing] is not event:
            before = self.life.state
            self.tell(event)
            assert self.life.state in (before, State.WAKING, State.PARKED), "time alone may have ended a wait"

    @rule(seconds=st.floats(0.0, 2 * WELL_SECONDS))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.tell(Event.TICK)

    @invariant()
    def a_stop_is_followed_at_once(self) -> None:
        if self.life.state is State.LENDING:
            assert self.granted and not self.stopped

    @invariant()
    def waits_are_bounded(self) -> None:
        for wait in self.waits[-1:]:
            assert wait >= FIRST_WAIT_SECONDS - 1e-6 and wait <= LONGEST_WAIT_SECONDS + 1e-6

    @invariant()
    def it_comes_to_lend_once_all_is_well(self) -> None:
        """Whatever has happened: seen on a copy, so that the history goes on as it was."""
        life, now, doing = Life(), self.now, self.doing
        for name, value in vars(self.life).items():
            setattr(life, name, value)
        act = Act.NOTHING
        for event in (Event.CLEARED, Event.GRANTED):
            act = life.on(event, now) if act is Act.NOTHING else act
        for _ in range(4):
            if doing is None and act is Act.NOTHING and life.state is not State.LENDING:
                now += LONGEST_WAIT_SECONDS
                act = life.on(Event.TICK, now)
            pending = doing or act
            if pending in OUTCOMES:
                doing, act = None, life.on(OUTCOMES[pending], now)
        assert life.state is State.LENDING and now <= self.now + LONGEST_WAIT_SECONDS


Lives.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestLives = Lives.TestCase


def test_waits_double_up_to_the_longest_and_a_guest_that_lent_well_begins_anew() -> None:
    life, now, waits = Life(), 0.0, []
    life.on(Event.GRANTED, now)
    for _ in range(12):
        assert life.on(Event.FAULT, now) is Act.DROP
        waits.append(life.waits_until - now)
        assert life.on(Event.TICK, now + 0.99 * waits[-1]) is Act.NOTHING
        now = life.waits_until
        assert life.on(Event.TICK, now) is Act.BUILD
    assert waits[:3] == [FIRST_WAIT_SECONDS, 2 * FIRST_WAIT_SECONDS, 4 * FIRST_WAIT_SECONDS]
    assert waits == sorted(waits) and waits[-1] == LONGEST_WAIT_SECONDS
    life.on(Event.BUILT, now)
    life.on(Event.FAULT, now + WELL_SECONDS)
    assert life.waits_until == now + WELL_SECONDS + FIRST_WAIT_SECONDS


def test_a_guest_that_was_stopped_while_it_was_built_never_lends() -> None:
    life = Life()
    assert life.on(Event.GRANTED, 0.0) is Act.BUILD
    assert life.on(Event.STOPPED, 1.0) is Act.NOTHING
    assert life.on(Event.BUILT, 2.0) is Act.PARK
    assert life.on(Event.FREED, 3.0) is Act.NOTHING
    assert life.state is State.PARKED
    assert life.on(Event.CLEARED, 4.0) is Act.BUILD
