"""The lifecycle of a guest: one build at a time, no lending against a stop, bounded waits after faults, no deadlock."""

import copy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rose.topics.backoff import FIRST_SECONDS, LONGEST_SECONDS, RESET_SECONDS
from rose.workers.lender.guest_lifecycle import (
    Building,
    Dropped,
    GuestLifecycle,
    Lending,
    Profiling,
    Suspended,
    Suspending,
)


class LifecycleMachine(RuleBasedStateMachine):
    """A caller that does the work of each state, while grants and faults come at random."""

    def __init__(self) -> None:
        super().__init__()
        self.lifecycle: GuestLifecycle[int, int] = GuestLifecycle()
        self.now = 0.0
        self.should_lend = False
        self.builds = 0
        self.waits_until = 0.0

    def start_build(self) -> int:
        assert self.should_lend and self.now >= self.waits_until
        self.builds += 1
        return self.builds

    def advance(self) -> None:
        before = self.lifecycle.state
        due = self.lifecycle.has_action(self.should_lend, self.now)
        self.lifecycle.advance(self.should_lend, self.now, self.start_build)
        if not isinstance(before, Dropped) and self.lifecycle.state is not before:
            assert due

    @rule(should_lend=st.booleans())
    def change_grant(self, should_lend: bool) -> None:
        self.should_lend = should_lend
        self.advance()

    @rule()
    def do_work(self) -> None:
        do_work(self.lifecycle)
        self.advance()

    @rule()
    def fail(self) -> None:
        wait = self.lifecycle.on_fault(self.now)
        assert FIRST_SECONDS <= wait <= LONGEST_SECONDS
        self.waits_until = self.now + wait
        self.advance()

    @rule(seconds=st.floats(0.0, 2 * RESET_SECONDS))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.advance()

    @invariant()
    def guest_that_should_not_lend_does_not_lend(self) -> None:
        assert self.should_lend or not isinstance(self.lifecycle.state, Lending)

    @invariant()
    def guest_is_the_newest_build(self) -> None:
        assert self.lifecycle.guest in (None, self.builds)

    @invariant()
    def guest_lends_once_nothing_fails(self) -> None:
        """Checked on a copy, so that the history goes on as it was."""
        lifecycle, now = copy.deepcopy(self.lifecycle), self.now
        for _ in range(4):
            do_work(lifecycle)
            if isinstance(lifecycle.state, Dropped):
                now += LONGEST_SECONDS
            lifecycle.advance(True, now, lambda: self.builds + 1)
        assert isinstance(lifecycle.state, Lending)


def do_work(lifecycle: GuestLifecycle[int, int]) -> None:
    """Do the work of the present state: build, make the first steps, or free the guest."""
    match lifecycle.state:
        case Building(build):
            lifecycle.on_built(build)
        case Profiling(guest):
            lifecycle.on_profiled(guest)
        case Suspending():
            lifecycle.on_freed()


LifecycleMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestLifecycle = LifecycleMachine.TestCase


def test_guest_that_is_stopped_during_its_build_is_suspended_at_its_end() -> None:
    lifecycle: GuestLifecycle[str, str] = GuestLifecycle()
    lifecycle.advance(True, 0.0, lambda: "build")
    lifecycle.advance(False, 1.0, lambda: "another build")
    assert lifecycle.state == Building("build") and lifecycle.guest is None
    lifecycle.on_built("guest")
    lifecycle.on_profiled("guest")
    lifecycle.advance(False, 2.0, lambda: "another build")
    assert lifecycle.state == Suspending("guest", 2.0) and lifecycle.guest == "guest"
    lifecycle.on_freed()
    assert lifecycle.state == Suspended()
    lifecycle.advance(True, 3.0, lambda: "another build")
    assert lifecycle.state == Building("another build")
