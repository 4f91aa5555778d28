"""The life of a guest: one build at a time, no lending against a stop, bounded waits after faults, no standstill."""

import copy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rose.topics.backoff import FIRST_SECONDS, LONGEST_SECONDS, RESET_SECONDS
from rose.workers.lender.lifecycle import Action, GuestLifecycle, GuestState


class Lives(RuleBasedStateMachine):
    """A caller that does what it is told, in a world where wishes and faults come as they like."""

    def __init__(self) -> None:
        super().__init__()
        self.life = GuestLifecycle()
        self.now = 0.0
        self.wanted = False
        self.doing: Action | None = None
        """Asked for, and not reported yet."""
        self.waits_until = 0.0

    def follow(self) -> None:
        due = self.life.has_action(self.wanted, self.now)
        act = self.life.next_action(self.wanted, self.now)
        if act is Action.NONE:
            assert due == (self.doing is not None)
            return
        assert due and self.doing is None
        assert (act is Action.BUILD) == self.wanted
        assert act is Action.SUSPEND or self.now >= self.waits_until
        self.doing = act

    @rule(wanted=st.booleans())
    def a_wish(self, wanted: bool) -> None:
        self.wanted = wanted
        self.follow()

    @precondition(lambda self: self.doing is not None)
    @rule()
    def it_is_done(self) -> None:
        doing, self.doing = self.doing, None
        (self.life.on_built if doing is Action.BUILD else self.life.on_freed)()
        self.follow()

    @rule()
    def a_fault(self) -> None:
        wait = self.life.on_fault(self.now)
        assert FIRST_SECONDS <= wait <= LONGEST_SECONDS
        self.doing, self.waits_until = None, self.now + wait
        self.follow()

    @rule(seconds=st.floats(0.0, 2 * RESET_SECONDS))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.follow()

    @invariant()
    def who_is_not_wanted_does_not_lend(self) -> None:
        assert self.wanted or self.life.state is not GuestState.LENDING

    @invariant()
    def it_comes_to_lend_once_all_is_well(self) -> None:
        """Whatever has happened: seen on a copy, so that the history goes on as it was."""
        life, now, doing = copy.deepcopy(self.life), self.now, self.doing
        for _ in range(4):
            if doing is not None:
                (life.on_built if doing is Action.BUILD else life.on_freed)()
            if life.state is GuestState.DROPPED:
                now += LONGEST_SECONDS
            act = life.next_action(True, now)
            doing = None if act is Action.NONE else act
        assert life.state is GuestState.LENDING


Lives.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestLives = Lives.TestCase


def test_a_guest_that_was_stopped_while_it_was_built_never_lends() -> None:
    life = GuestLifecycle()
    assert life.next_action(True, 0.0) is Action.BUILD
    assert life.next_action(False, 1.0) is Action.NONE
    life.on_built()
    assert life.next_action(False, 2.0) is Action.SUSPEND
    life.on_freed()
    assert life.state is GuestState.SUSPENDED
    assert life.next_action(True, 3.0) is Action.BUILD
