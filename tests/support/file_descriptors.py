"""A process without free file descriptors: no file can be opened, and open files keep working."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

STANDARD = 3
"""Input, output and errors are always open. poll(2) refuses more descriptors than the limit allows, and a thread of
another test may be polling one."""


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (STANDARD, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
