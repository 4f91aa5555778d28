"""Guard of a role: a process that waits for the end of the role and ends all processes that the role has started.

Keeps true
- However a role ends, and whatever sessions its descendants have made, no descendant outlives it: an orphan becomes a
  child of the guard, and the guard ends the orphan before it reports the end of the role.
- Until then no other process has the role's process id, so a signal to the role or its group reaches no other process.
- The role ends when the guard ends, and the guard, after the role, when its own parent ends: the kernel signals both.
"""

import os
import signal
from collections.abc import Callable

from rose.topics.processes import adopt_orphans, die_with_parent, end_children, set_process_name

GRACE_SECONDS = 3.0
"""How long the processes that a role leaves behind may take to end after SIGTERM: a sidecar returns its turns."""

GUARD_SIGNALS = frozenset({signal.SIGTERM, signal.SIGCHLD})
"""The signals that a guard waits for. They are blocked, so that none arrives between a check and the wait."""


def guard_process(parent: int, report: Callable[[int, int | None], None]) -> None:
    """Fork the role, and return in the role only. Call it with `GUARD_SIGNALS` blocked.

    `parent` is the process id of the fork server. `report` is called in the guard with the role's process id: first
    with None, then with the exit status when no process of the role is left.
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
    """Return the exit status of the role when none of its descendants is left. The role itself is not reaped here."""
    grace = GRACE_SECONDS
    status: int | None = None
    while status is None:
        if signal.sigwait(GUARD_SIGNALS) == signal.SIGTERM:
            os.kill(role, signal.SIGKILL)
            grace = 0.0
        while status is None and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            if ended.si_pid == role:
                status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            else:  # an orphan has ended by itself
                os.waitpid(ended.si_pid, 0)
    end_children(grace_seconds=grace, keep=(role,))
    return status
