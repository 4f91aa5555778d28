"""Computes on the slices of a version, on a few threads: the codec's loops run without Python's lock.

Keeps true
- Results come in the order of the slices. Of several errors the first in that order is raised, as on one thread; an
  error of the source comes after the results of the slices before the error.
- At most `threads` + 1 slices are taken from the source ahead of the results that the caller has.
- No thread is left once the iteration has ended or was closed.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from rose.schemas.errors import ThreadRefused, is_start_refused

Slice = TypeVar("Slice")
Result = TypeVar("Result")

THREADS = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
"""Number of threads: half of the processor's cores, at most 8. The other half is for the engine or the trainer."""


def map_slices(
    function: Callable[[Slice], Result], slices: Iterable[Slice], *, threads: int | None = None
) -> Generator[Result, None, None]:
    """Yield `function` of each slice. A caller that may leave early closes the generator.

    `threads`: None stands for THREADS; with 1 no thread is started. Raises what `function` and `slices` raise, and
    ThreadRefused.
    """
    threads = THREADS if threads is None else threads
    if threads == 1:
        yield from map(function, slices)
        return
    under_way: deque[Future[Result]] = deque()
    source = iter(slices)
    with ThreadPoolExecutor(threads, thread_name_prefix="rose-slices") as pool:
        while True:
            try:
                one = next(source)
            except StopIteration:
                break
            except Exception:
                while under_way:
                    yield under_way.popleft().result()
                raise
            under_way.append(_submit(pool, function, one))
            while under_way and (len(under_way) > threads or under_way[0].done()):
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


def _submit(pool: ThreadPoolExecutor, function: Callable[[Slice], Result], one: Slice) -> Future[Result]:
    """Start to compute on a slice. Raises ThreadRefused."""
    try:
        return pool.submit(function, one)
    except RuntimeError as error:
        if is_start_refused(error):
            raise ThreadRefused from error
        # Python gives no work to a pool once the program has ended, when a last version may still be published.
        computed: Future[Result] = Future()
        try:
            computed.set_result(function(one))
        except Exception as failed:  # noqa: BLE001  raised in its turn, after the results before it
            computed.set_exception(failed)
        return computed
