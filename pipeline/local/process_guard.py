"""A guard around a role: a process that stays behind when the role is forked, and leaves nothing of what it started.

Keeps true
- Whatever ends a role, and whatever sessions its descendants have made for themselves, none outlives it: an orphan
  becomes the guard's child, and the guard ends it before it says that the role has ended.
- Until then nobody else has the role's process id: whoever signals it, or its group, meets no stranger.
- The role ends when the guard ends, and the guard, role first, when its own parent does: the kernel sees to both.
"""

import os
import signal
from collections.abc import Callable

from rose.topics.processes import adopt_orphans, die_with_parent, end_children, set_process_name

GRACE_SECONDS = 3.0
"""What a role has left behind may take so long to end after SIGTERM: a lender's companion hands its turns back."""

GUARD_SIGNALS = frozenset({signal.SIGTERM, signal.SIGCHLD})
"""What a guard waits for; both are blocked, so none comes between a look and the wait."""


def guard_process(parent: int, report: Callable[[int, int | None], None]) -> None:
    """Fork, and return in the role alone. Call it with `GUARD_SIGNALS` blocked.

    `tell` is called in the guard: with the role's process id and, once nothing of the role is left, with its exit
    status too.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent(parent, signal.SIGTERM)()
    adopt_orphans()
    own = os.getpid()
    role = os.fork()
    if role == 0:
        die_with_parent(own, signal.SIGKILL)()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, GUARD_SIGNALS)
        return
    try:
        set_process_name("guard")
        report(role, None)
        report(role, _exit_status_of(role))
        os.waitpid(role, 0)
    finally:
        os._exit(0)


def _exit_status_of(role: int) -> int:
    """Its exit status, once nothing that it has started is left. It is still to be reaped."""
    grace = GRACE_SECONDS
    status: int | None = None
    while status is None:
        if signal.sigwait(GUARD_SIGNALS) == signal.SIGTERM:
            os.kill(role, signal.SIGKILL)
            grace = 0.0
        while status is None and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            if ended.si_pid == role:
                status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            else:  # an orphan that has ended by itself
                os.waitpid(ended.si_pid, 0)
    end_children(grace_seconds=grace, keep=(role,))
    return status
