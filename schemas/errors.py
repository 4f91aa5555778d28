"""Errors meant for a person, and any other in words.

Keeps true: the message of a RoseError is one sentence that says what is wrong and how to mend it.
"""


class RoseError(Exception):
    """Something the user can mend; the command prints the message alone and exits with `exit_status`."""

    exit_status = 1


class UsageError(RoseError):
    """Bad input: a config, a flag, a prompt file, a model folder."""

    exit_status = 2


class RecordError(RoseError):
    """A record that cannot be decoded or breaks a bound; its bytes go to the dead-letter topic."""


def message_of(error: BaseException) -> str:
    """What the error says, also one that does not let itself be told."""
    try:
        return f"{error}".encode(errors="replace").decode()
    except BaseException:  # noqa: BLE001  whoever waits for the answer is told all the same
        return "it does not let itself be told"


def describe_error(error: BaseException) -> str:
    """What went wrong."""
    return f"{type(error).__name__}: {message_of(error)}"
