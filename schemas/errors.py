"""Errors meant for a person, and any other in words.

Keeps true: the message of a RoseError is one sentence that says what is wrong and how to mend it.
"""

from traceback import walk_tb

MAX_LEAVES = 5
"""Number of errors of a group that a sentence describes."""


class RoseError(Exception):
    """An error that the user can correct. The command prints only the message and exits with `exit_status`."""

    exit_status = 1


class UsageError(RoseError):
    """Bad input: a config, a flag, a prompt file, a model folder."""

    exit_status = 2


class RecordError(RoseError):
    """A record that cannot be decoded or breaks a bound; its bytes go to the dead-letter topic."""


class ThreadRefused(RoseError):
    """The system starts no further thread for this process."""

    def __init__(self) -> None:
        super().__init__(
            "no further thread can be started: raise the limit of processes (pids.max of the container, or ulimit -u), "
            "or end other processes"
        )


def is_start_refused(error: BaseException) -> bool:
    """Return whether the system has refused to start a thread (by `threading`) or a process (by `subprocess`)."""
    if isinstance(error, BlockingIOError):
        return any(frame.f_code.co_name == "_execute_child" for frame, _ in walk_tb(error.__traceback__))
    return isinstance(error, RuntimeError) and message_of(error) == "can't start new thread"


def message_of(error: BaseException) -> str:
    """Return the message of the error, also where its `__str__` raises."""
    try:
        return f"{error}".encode(errors="replace").decode()
    except BaseException:  # noqa: BLE001  the caller needs a message whatever the error's own code raises
        return "its text cannot be read"


def describe_error(error: BaseException) -> str:
    """Return the type and message of the error; for a group, also those of its first MAX_LEAVES errors."""
    sentence = f"{type(error).__name__}: {message_of(error)}"
    if not isinstance(error, BaseExceptionGroup):
        return sentence
    leaves = leaves_of(error)
    further = [f"{len(leaves) - MAX_LEAVES} more"] if len(leaves) > MAX_LEAVES else []
    return f"{sentence}: {'; '.join([*map(describe_error, leaves[:MAX_LEAVES]), *further])}"


def leaves_of(error: BaseException) -> list[BaseException]:
    """Return the errors of a group and of its groups, in order; any other error alone."""
    found: list[BaseException] = []
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if isinstance(each, BaseExceptionGroup):
            waiting += reversed(each.exceptions)
        else:
            found.append(each)
    return found
