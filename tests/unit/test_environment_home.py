"""A home's inputs: prompts open in order and once, and no offset is committed before its consequences are."""

from hypothesis import given
from hypothesis import strategies as st

from schemas.prompts import Prompt
from workers.environments.home import Home, Unfinished


def prompt_of(group_id: str, size: int = 2) -> Prompt:
    return Prompt(group_id=group_id, group_size=size, environment="calculator", seed=0)


def home_of() -> Home:
    return Home(0, life=1, prompts_from=10, results_from=20)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["read", "passed", "done"]), st.integers(0, 99)), max_size=40)
)
def test_the_low_water_is_the_oldest_offset_that_is_not_done(events: list[tuple[int, str, int]]) -> None:
    inputs, offset = Unfinished(5), 5
    undone: set[int] = set()
    for gap, what, pick in events:
        if what == "done":
            if undone:
                chosen = sorted(undone)[pick % len(undone)]
                undone.discard(chosen)
                inputs.done(chosen)
        else:
            offset += gap - 1  # transaction markers leave holes in the offsets
            getattr(inputs, what)(offset)
            if what == "read":
                undone.add(offset)
            offset += 1
        assert inputs.low_water == min(undone, default=offset)


def test_prompts_go_on_the_log_in_order_however_long_each_takes_to_open() -> None:
    home = home_of()
    for offset, group_id in ((10, "slow"), (12, "quick")):
        home.submitted(offset, prompt_of(group_id))
    slow, quick = home.open_next(), home.open_next()
    quick.awaited = 0
    assert list(home.take_complete()) == [] and home.prompts_low_water == 10
    slow.awaited = 0
    assert list(home.take_complete()) == [slow, quick] and home.prompts_low_water == 13


def test_a_group_id_opens_once_unless_its_prompt_was_refused() -> None:
    home = home_of()
    for offset, group_id in ((10, "a"), (11, "b"), (12, "a"), (13, "a")):
        home.submitted(offset, prompt_of(group_id))
    first, other = home.open_next(), home.open_next()
    assert not home.can_open, "the first prompt of this id may still be refused"
    home.refuse(first, "bad arguments")
    first.awaited = other.awaited = 0
    assert list(home.take_complete()) == [first, other]
    second = home.open_next()
    assert not second.refusal, "nothing was opened under this id"
    second.awaited = 0
    assert list(home.take_complete()) == [second]
    assert "submitted before" in home.open_next().refusal


def test_a_group_is_unsettled_until_each_of_its_trajectories_has_an_outcome() -> None:
    home = home_of()
    home.opened(prompt_of("a", size=3))
    for trajectory_id in ("a:0", "a:2", "a:2", "a:x", "a:999999999", "b:1"):
        home.settled(trajectory_id.partition(":")[0], trajectory_id)
        assert "a" in home.unsettled
    home.settled("a", "a:1")
    assert not home.unsettled and "a" in home.known
