"""Slices on several threads: the results and the error of one thread, a bounded number under way, no thread left."""

import concurrent.futures.thread
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.schemas.errors import ThreadRefused
from rose.workers.weights.slice_threads import map_slices


class SourceError(Exception):
    """An error of the source of slices."""


class SliceError(Exception):
    """An error of the function, with the number of the slice."""


def source(count: int, error: bool) -> Iterator[int]:
    yield from range(count)
    if error:
        raise SourceError


def gather(computed: Iterable[int]) -> tuple[list[int], str]:
    """Return the results before an error, and the error."""
    results: list[int] = []
    try:
        results.extend(computed)
    except (SourceError, SliceError) as raised:
        return results, repr(raised)
    return results, ""


def squared(one: int, failing: set[int]) -> int:
    if one in failing:
        raise SliceError(one)
    return one * one


@given(st.integers(0, 12), st.booleans(), st.sets(st.integers(0, 12), max_size=3), st.integers(1, 5), st.data())
def test_results_and_error_are_those_of_one_thread_in_any_order_of_completion(
    count: int, error: bool, failing: set[int], threads: int, data: st.DataObject
) -> None:
    """Without errors some slices wait until the slice after them has been computed."""
    waiting = data.draw(st.sets(st.integers(0, 12))) if threads > 1 and not failing else set()
    done = [threading.Event() for _ in range(count)]

    def compute(one: int) -> int:
        if one in waiting and one + 1 < count and one + 1 not in waiting:
            assert done[one + 1].wait(20)
        done[one].set()
        return squared(one, failing)

    found = gather(map_slices(compute, source(count, error), threads=threads))
    assert found == gather(squared(one, failing) for one in source(count, error))


@pytest.mark.parametrize("threads", [1, 3])
def test_slices_are_taken_only_a_few_ahead_of_the_results(threads: int) -> None:
    taken: list[int] = []

    def endless() -> Iterator[int]:
        while True:
            taken.append(len(taken))
            yield taken[-1]

    with closing(map_slices(abs, endless(), threads=threads)) as results:
        for received in range(1, 6):
            next(results)
            assert len(taken) <= received + threads + 1


def test_closing_leaves_no_thread_and_computes_no_later_slice() -> None:
    computed: list[int] = []

    def compute(one: int) -> int:
        computed.append(one)
        return one

    with closing(map_slices(compute, range(100), threads=2)) as results:
        assert next(results) == 0
    assert len(computed) <= 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rose-slices")]


def test_slices_are_computed_at_the_same_time() -> None:
    meeting = threading.Barrier(3)
    assert sorted(map_slices(lambda _: meeting.wait(20), range(3), threads=3)) == [0, 1, 2]


def test_refused_thread_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller tries again: the version is not at fault."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(ThreadRefused):
        list(map_slices(abs, range(4), threads=2))
    assert list(map_slices(abs, range(4), threads=1)) == [0, 1, 2, 3]


def test_results_and_error_are_those_of_one_thread_after_the_program_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last version may be published then. Python gives a pool no work any more."""
    failing = {3, 4}
    ended = threading.Event()

    def slices() -> Iterator[int]:
        yield 0
        monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)
        yield from range(1, 6)
        ended.set()

    def compute(one: int) -> int:
        assert one or ended.wait(20)
        return squared(one, failing)

    assert gather(map_slices(compute, slices(), threads=8)) == ([0, 1, 4], repr(SliceError(3)))
