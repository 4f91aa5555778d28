"""Errors meant for a person. Keeps true: the message is one sentence that says what is wrong and how to mend it."""


class RoseError(Exception):
    """Something the user can mend; the command prints the message alone and exits with `exit_status`."""

    exit_status = 1


class UsageError(RoseError):
    """Bad input: a config, a flag, a prompt file, a model folder."""

    exit_status = 2


class RecordError(RoseError):
    """A record that cannot be decoded or breaks a bound; its bytes go to the dead-letter topic."""
