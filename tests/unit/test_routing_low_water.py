"""The low water never passes an unfinished turn."""

from hypothesis import given
from hypothesis import strategies as st

from rose.pipeline.routing.cell_session import LowWater
from rose.topics.catalog import REQUESTED
from rose.topics.records import Place

HOME: Place = (REQUESTED, 0)


@given(st.lists(st.one_of(st.just("read"), st.just("mark"), st.integers(0, 20)), max_size=100))
def test_restart_from_the_low_water_reads_every_unfinished_turn(events: list[str | int]) -> None:
    low_water, epoch, end, lowest = LowWater({HOME: 0}), 0, 0, 0
    unfinished: dict[int, int] = {}  # offset of each turn's request, and the epoch in which it was read
    for event in events:
        if event == "read":
            unfinished[end] = epoch
            end += 1
        elif event == "mark":
            epoch = low_water.mark({HOME: end})
        elif unfinished and isinstance(event, int):
            del unfinished[list(unfinished)[event % len(unfinished)]]
        before, lowest = lowest, low_water.lowest(min(unfinished.values(), default=epoch))[HOME]
        assert before <= lowest <= min(unfinished, default=end)


def test_low_water_rises_to_the_newest_mark_without_unfinished_turns() -> None:
    low_water = LowWater({HOME: 3})
    epoch = low_water.mark({HOME: 9})
    assert low_water.lowest(0) == {HOME: 3}
    assert low_water.lowest(epoch) == {HOME: 9}
