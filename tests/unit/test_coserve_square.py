"""The square wave that `bench.coserve` plays in place of a trace."""

import pytest

from bench.coserving.square import read_arrivals
from rose.workers.loadgen.traces import TraceError


def test_square_wave_alternates_between_two_rates() -> None:
    taken = read_arrivals("square:40,4,50", first=0, count=8000)
    assert taken == read_arrivals("square:40,4,50", first=0, count=8000)
    phases = [0] * (int(taken[-1].at // 50) + 1)
    for arrival in taken:
        phases[int(arrival.at // 50)] += 1
    whole = phases[:-1]
    assert len(whole) > 5
    assert all(1800 < count < 2200 for count in whole[0::2]), phases
    assert all(130 < count < 270 for count in whole[1::2]), phases


@pytest.mark.parametrize(
    "text", ["square:", "square:1,2", "square:a,b,c", "square:1,2,9", "square:5,0,9", "square:5,1,0"]
)
def test_invalid_square_wave_is_refused(text: str) -> None:
    with pytest.raises(TraceError, match="square:"):
        read_arrivals(text, first=0, count=9)
