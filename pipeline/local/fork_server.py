"""Fork server: a process that has imported the modules of the roles, and forks the roles.

Keeps true
- A role runs and ends as `python -P -m rose.pipeline.cli.main` would: with its own session, log and signals, the
  environment of the process that opened the fork server, the same exit status and the same last lines.
- The fork server imports the modules of a role once, before the first role of that kind; it never imports vLLM for a
  router.
- A role ends when the fork server ends, and the fork server ends when its owner ends: the kernel kills both.
- Each role has a guard, a process that waits for the end of the role. However the role ends, and whatever sessions its
  descendants have made, no descendant outlives it: an orphan becomes a child of the guard, and the guard ends the
  orphan before it reports the end of the role. If the guard is killed, the fork server ends the processes.
- Until then no other process has the role's process id, so a signal to the role or its group reaches no other process.
- The role ends when the guard ends, and the guard, after the role, when the fork server ends: the kernel signals both.
- No caller waits for imports: `start` only requests a role, and a requested role can be ended before it runs.

An executor's start is ten seconds of imports and one second of work. A run has several executors, a demo measures
twice, and crashed roles are restarted.

Example:
    with ForkServer() as fork_server:
        process = fork_server.start(("router", "--config", "rose.toml"), name="router", log=Path("router.log"))
"""

import gc
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from time import monotonic
from types import TracebackType

from rose.topics.processes import adopt_orphans, die_with_parent, end_children, lower_priority, set_process_name

COMMAND = "rose.pipeline.cli.main"
"""The module whose `main` runs a role. The module is named, not imported, because it imports this module."""

ENGINE_MODULES = (
    "rose.workers.executor.vllm.process_env",
    "rose.workers.executor.vllm.engine",
)
PRELOAD = {
    "control": ("rose.pipeline.cli.roles", "rose.pipeline.control.service", "rose.pipeline.control.app"),
    "environment": ("rose.pipeline.cli.roles", "rose.workers.environments.main", "tokenizers"),
    "evaluate": ("rose.pipeline.cli.run_commands", *ENGINE_MODULES),
    "evaluator": ("rose.pipeline.cli.roles", "rose.workers.evaluator.loop"),
    "executor": (
        "rose.pipeline.cli.roles",
        "rose.workers.executor.engine_process",
        "rose.workers.executor.loop",
        *ENGINE_MODULES,
    ),
    "router": ("rose.pipeline.cli.roles", "rose.pipeline.routing.service"),
    "trainer": (
        "rose.pipeline.cli.roles",
        "rose.workers.trainer.main",
        "rose.workers.trainer.loop",
        "transformers.models.auto.modeling_auto",
    ),
}
"""The modules that each command imports when it runs."""

MAX_MESSAGE_BYTES = 1 << 16
"""Maximum size of a message to or from the fork server."""


class ForkedProcess:
    """A role in its own process. The object exists from the request on, before the process runs."""

    def __init__(self, fork_server: "ForkServer") -> None:
        self._server = fork_server
        self._pid: int | None = None
        self._status: int | None = None

    @property
    def pid(self) -> int:
        """The process id. Waits until the process runs. Raises ProcessLookupError if it never ran."""
        while self._pid is None and self._status is None:
            self._server.receive(None)
        if self._pid is None:
            raise ProcessLookupError
        return self._pid

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process runs or does not run yet."""
        self._server.receive(0.0)
        return self._status

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait until the process has ended and return the exit status; None if it still runs after `seconds`."""
        deadline = None if seconds is None else monotonic() + seconds
        while self.poll() is None and (deadline is None or monotonic() < deadline):
            self._server.receive(None if deadline is None else max(0.0, deadline - monotonic()))
        return self._status

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the role if it runs. SIGTERM and SIGKILL end a role that does not run yet at once."""
        if self.poll() is not None:
            return
        if self._pid is None and number in (signal.SIGTERM, signal.SIGKILL):
            self._status = -number
            self._server.kill_pending(self)
        elif number == signal.SIGKILL:
            _kill(self.pid)
        else:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def on_started(self, pid: int) -> None:
        """Record the process id. A role that was ended before it ran has one too: the fork server kills the process."""
        self._pid = pid

    def on_exit(self, status: int) -> None:
        """Record the exit status, unless the role was ended before."""
        if self._status is None:
            self._status = status


class ForkServer:
    """The owner's side of the fork server. Use it from one thread that lives as long as the roles should.

    The process starts with the first role. If it was killed, with all its roles, the next role starts it again.
    """

    def __init__(self, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
        """Set the working folder and the environment of the roles; None means the caller's."""
        self._folder = folder
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket
        self._roles: dict[int, ForkedProcess] = {}
        self._numbers = itertools.count()

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self, arguments: Sequence[str], *, name: str, log: Path, niceness: int = 0) -> ForkedProcess:
        """Request a role with these arguments of `rose`; its output is appended to `log`.

        `niceness` (0 to 19) is added to the nice value of the role and of the processes that the role starts.
        """
        self.receive(0.0)
        with log.open("ab") as output:
            if self._process is None:
                self._launch(output.fileno())
            role, number = ForkedProcess(self), next(self._numbers)
            self._roles[number] = role
            self._send([number, niceness, name, *arguments], output.fileno())
        return role

    def kill_pending(self, role: ForkedProcess) -> None:
        """Have the fork server kill a role as soon as the role runs."""
        for number in [number for number, each in self._roles.items() if each is role]:
            self._send([number])

    def receive(self, seconds: float | None) -> None:
        """Handle the messages of the fork server. Waits at most `seconds` for the first message; None: forever."""
        while self._process is not None:
            self._socket.settimeout(seconds)
            try:
                message = self._socket.recv(MAX_MESSAGE_BYTES)
            except (BlockingIOError, TimeoutError):
                return
            except ConnectionResetError:
                message = b""
            if not message:
                self.close()
                return
            number, pid, status = json.loads(message)
            if status is None:
                self._roles[number].on_started(pid)
            elif number in self._roles:  # else its guard was killed after it had reported the end
                self._roles.pop(number).on_exit(status)
            seconds = 0.0

    def close(self) -> None:
        """End the fork server, and with it every role that still runs."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None
        self._socket.close()
        for role in self._roles.values():
            role.on_exit(-signal.SIGKILL)
        self._roles.clear()

    def _send(self, words: Sequence[object], *descriptors: int) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the fork server has ended: `receive` notices
            socket.send_fds(self._socket, [json.dumps(words).encode()], descriptors)

    def _launch(self, output: int) -> None:
        self._socket, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with remote:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import serve; serve({remote.fileno()})"],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(remote.fileno(),),
                start_new_session=True,  # Ctrl-C goes to the supervisor, which stops each role
                preexec_fn=die_with_parent(os.getpid(), signal.SIGKILL),
            )


def _kill(pid: int) -> None:
    """Send SIGKILL to a role and to its session: the processes that a server has started do not end with the server."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        os.killpg(pid, signal.SIGKILL)


def serve(line_number: int) -> None:
    """Run the fork server: fork or end a role for each message. The code after the loop runs in the forked roles.

    `line_number` is the file descriptor of the socket to the owner.
    """
    # A module that looks for GPUs at import must not open CUDA, which a fork does not inherit; vLLM sets this as well.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, TextIOWrapper)
        stream.reconfigure(line_buffering=True)
    line, own, guards = socket.socket(fileno=line_number), os.getpid(), dict[int, int]()

    def tell(number: int, role: int, status: int | None) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the owner has ended
            line.send(json.dumps([number, role, status]).encode())

    def reap(*_: object) -> None:
        for pid in list(guards):
            with suppress(ChildProcessError):  # a signal during this loop has run `reap` already
                if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    number = guards.pop(pid)
                    if status := os.waitstatus_to_exitcode(ended[1]):  # else the guard has reported how its role ended
                        end_children(keep=guards)
                        tell(number, pid, status)

    adopt_orphans()
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)  # a signal may come just before a wait
    signal.signal(signal.SIGCHLD, reap)  # also during an import
    while True:
        if line not in select.select([line, woken], [], [])[0]:
            woken.recv(MAX_MESSAGE_BYTES)
            continue
        message, outputs, _, _ = socket.recv_fds(line, MAX_MESSAGE_BYTES, 1)
        if not message:
            sys.exit()
        number, *words = json.loads(message)
        if not words:
            for pid in [pid for pid, guarded in list(guards.items()) if guarded == number]:
                os.kill(pid, signal.SIGTERM)
            continue
        niceness, name, *arguments = words
        for output in outputs:
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
        _preload(arguments[0])
        signal.pthread_sigmask(signal.SIG_BLOCK, GUARD_SIGNALS)
        pid = os.fork()
        if pid == 0:
            break
        guards[pid] = number
        signal.pthread_sigmask(signal.SIG_UNBLOCK, GUARD_SIGNALS)
    signal.set_wakeup_fd(-1)
    guard_process(own, lambda role, status: tell(number, role, status))
    for each in (line, woken, wakes):
        each.close()
    os.setsid()
    lower_priority(niceness)
    set_process_name(name)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # siblings would draw equal numbers; `random` and OpenSSL reseed
    sys.argv = ["rose", *arguments]

    import_module(COMMAND).main()


def _preload(command: str) -> None:
    for module in (COMMAND, *PRELOAD.get(command, ())):
        with suppress(Exception):  # the role imports it again and logs the error
            import_module(module)
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # the pages stay shared: the roles' collectors do not write to them


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
