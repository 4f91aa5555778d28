"""A process that has no descriptor left: none can be opened, and what is open serves on."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

STANDARD = 3
"""Input, output and errors are always open; poll(2) refuses more descriptors at once than the limit allows, and a
thread that another test left may wait for one."""


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (STANDARD, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
