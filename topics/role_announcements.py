"""Role starts: a process writes a record when it starts, and each time that its loop restarts, so they can be counted.

Keeps true
- The records are written on a thread of their own: the role does not wait for it, and an error is only logged.
- The thread has a connection only while it writes a record.
- Processes of the same name are told apart by their places: the host, and the lowest number on the host that no running
  process of the name has. The kernel frees the number when its process ends, however it ends.
"""

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from threading import Event, Thread

import structlog

from rose.schemas.errors import RoseError
from rose.schemas.heartbeats import RoleBegun
from rose.schemas.limits import MAX_TEXT_CHARACTERS
from rose.topics.catalog import ROLE_STARTS
from rose.topics.health import HEALTH, Health
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer

MIN_PAUSE_SECONDS = 2.0
"""Least time between two records. Restarts in between are written as one record."""

STOP_SECONDS = 2.0
"""How long the end of a process waits for a record that is being written."""


MAX_NAMESAKES = 64
"""Processes of one name on one host that are told apart."""


@contextmanager
def announce_starts(settings: BusSettings, role: str, health: Health = HEALTH) -> Iterator[None]:
    """Write a record of this process's start, and of each restart of its loop until the end of the context.

    `role`: name of the process. `health`: reports the restarts.
    """
    stop = Event()
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as instance_socket:
        place = f"{socket.gethostname()}/{_take_instance_number(instance_socket, settings.name(role))}"
        thread = Thread(target=_write_starts, args=(settings, role, place, health, stop), name="telling", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            health.wake_waiters()
            thread.join(STOP_SECONDS)


def _take_instance_number(instance_socket: socket.socket, name: str) -> int:
    """Take the lowest number that no process of this name has on this host, until the socket is closed."""
    for number in range(MAX_NAMESAKES):
        with suppress(OSError):
            instance_socket.bind(f"\0{name}/{number}")  # a name in the abstract namespace, without a file
            return number
    return MAX_NAMESAKES


def _write_starts(settings: BusSettings, role: str, place: str, health: Health, stop: Event) -> None:
    announced = 0
    record: RoleBegun | None = RoleBegun(role=role, place=place)
    while record is not None:
        try:
            with closing(Writer(settings, f"{role}-tells")) as writer:
                writer.write(ROLE_STARTS, record, key=role)
                writer.flush()
        except RoseError as error:
            structlog.get_logger("bus").warning("start_not_announced", reason=str(error))
        record = None
        stop.wait(MIN_PAUSE_SECONDS)
        if not stop.is_set():
            times, reason = health.await_restart(announced)
            if times > announced:
                record = RoleBegun(role=role, times=times - announced, reason=reason[:MAX_TEXT_CHARACTERS], place=place)
                announced = times
