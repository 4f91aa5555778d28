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

Slice = TypeVar("Slice")
Result = TypeVar("Result")

THREADS = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
"""Number of threads: half of the processor's cores, at most 8. The other half is for the engine or the trainer."""


def map_slices(
    function: Callable[[Slice], Result], slices: Iterable[Slice], *, threads: int | None = None
) -> Generator[Result, None, None]:
    """Yield `function` of each slice. A caller that may leave early closes the generator.

    `threads`: None stands for THREADS. Raises what `function` and `slices` raise.
    """
    threads = THREADS if threads is None else threads
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
            under_way.append(pool.submit(function, one))
            if len(under_way) > threads:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
