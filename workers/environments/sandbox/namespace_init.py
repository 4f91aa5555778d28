"""First process of a sandbox: makes the namespaces, runs commands in them, and serves their files.

Run as a program by `process.py`. It imports modules of the standard library and of this package that import no others.

Keeps true
- This process is process 1 of its PID namespace: the kernel kills all others when it ends. It ends when the other end
  of its socket is closed, when its lease file is removed, and when nobody has renewed the lease in time.
- No command reads or traces it, or has its files: all but those of a command are closed when a program begins.

Frame: 4 bytes length of the header, 8 bytes length of the payload, the header in JSON, the payload.
"""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import time
from typing import Any, NoReturn

from rose.workers.environments.sandbox.namespace_files import load, read_blocks, scan
from rose.workers.environments.sandbox.namespaces import (
    SetupError,
    build_root,
    drop_privileges,
    enter_namespaces,
    output_file,
    prepare_first_process,
)

MAX_FRAME_BYTES = 1 << 30

SETTLE_SECONDS = 0.1
"""Time that processes which a command leaves have to end by themselves before they count as left."""

LOOK_SECONDS = 0.02
"""Time between two counts of processes while a command runs or a process is left."""

IDLE_LOOK_SECONDS = 1.0
"""Time between two looks at the lease."""


def processes() -> list[str]:
    """Command lines of this process's children that run: of what commands have left, without their own children.

    A command that runs on starts and ends children at any moment; whether it runs itself does not depend on the moment.
    """
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or name == "1":
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state in (b"Z", b"X") or parent != b"1":
                continue
            with open(f"/proc/{name}/cmdline", "rb") as file:
                found.append(file.read(256).replace(b"\0", b" ").strip().decode("latin-1") or "?")
    return sorted(found)


def end_processes() -> None:
    """Kill all processes of the namespace but this one, and wait for their end."""
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            while os.waitpid(-1, 0)[0]:
                pass
        except ChildProcessError:
            if not processes():
                return


class Commands:
    """Runs one command at a time, and counts the processes that commands leave."""

    def __init__(self, line: socket.socket, lease: int, lease_seconds: float, most_processes: int) -> None:
        """`lease`: descriptor of the lease file, whose time of change is that of its last renewal."""
        self._line = line
        self._lease = lease
        self._lease_seconds = lease_seconds
        self._most = most_processes
        self.has_left = False
        """Whether processes may be left from earlier commands."""

    def check_lease(self) -> None:
        """End the sandbox if its lease has ended."""
        lease = os.fstat(self._lease)
        if lease.st_nlink == 0 or time.time() - lease.st_mtime > self._lease_seconds:
            os._exit(3)

    def run(self, asked: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Run a command to its end or its time limit, with the output of all that it starts."""
        output = output_file()
        pid = os.fork()
        if pid == 0:
            _become(asked, output)
        status, ending = self._await(pid, time.monotonic() + asked["seconds"])
        left, also = self._settled()
        size, most = os.fstat(output).st_size, asked["output_bytes"]
        if size <= most:
            text = os.pread(output, most, 0)
        else:
            text = (
                os.pread(output, most // 2, 0) + b"\0" + os.pread(output, most - most // 2, size - (most - most // 2))
            )
        os.close(output)
        self.has_left = bool(left)
        return {"status": status, "ending": ending or also, "processes": left, "output_size": size}, text

    def look(self) -> str:
        """Reap processes that have ended, check the lease, and end all processes if there are too many."""
        self.check_lease()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        return self._bounded()

    def _bounded(self) -> str:
        count = sum(name.isdigit() for name in os.listdir("/proc")) - 1
        if count <= self._most:
            return ""
        end_processes()
        return "processes"

    def _await(self, pid: int, deadline: float) -> tuple[int, str]:
        """Wait for the end of a command; return its exit status, and why it was ended or an empty text."""
        watched = select.poll()
        ended = os.pidfd_open(pid)
        watched.register(ended, select.POLLIN)
        watched.register(self._line, select.POLLRDHUP)
        ending = ""
        try:
            while True:
                events = dict(watched.poll(LOOK_SECONDS * 1000))
                if self._line.fileno() in events:
                    os._exit(0)
                if ended in events:
                    break
                self.check_lease()
                ending = self._bounded()
                if ending:
                    return -signal.SIGKILL, ending
                if not ending and time.monotonic() > deadline:
                    ending = "time"
                    os.killpg(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), ending
        finally:
            os.close(ended)

    def _settled(self) -> tuple[list[str], str]:
        """Processes that are left, and why others were ended or an empty text."""
        until, ending = time.monotonic() + SETTLE_SECONDS, ""
        while True:
            ending = self.look() or ending
            left = processes()
            if not left or time.monotonic() > until:
                return left, ending
            time.sleep(LOOK_SECONDS / 4)


def _become(asked: dict[str, Any], output: int) -> NoReturn:
    """Become the command, in the child of a fork."""
    try:
        os.setsid()
        nothing = os.open("/dev/null", os.O_RDONLY)
        for number, file in ((0, nothing), (1, output), (2, output)):
            os.dup2(file, number)
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for name, most in asked["limits"].items():
            resource.setrlimit(getattr(resource, name), (most, most))
        os.chdir("/workspace")
        drop_privileges()
        argv = asked["argv"]
        os.execve(argv[0], argv, asked["variables"])
    except BaseException as error:  # noqa: BLE001 - the child ends here whatever happens
        os.write(2, f"cannot run: {error}\n".encode(errors="replace"))
    os._exit(127)


def receive(line: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Return the header and the payload of the next frame. Raises EOFError at the end of the line."""
    lengths = struct.unpack("<IQ", _exactly(line, 12))
    if sum(lengths) > MAX_FRAME_BYTES:
        raise EOFError
    return json.loads(_exactly(line, lengths[0])), bytes(_exactly(line, lengths[1]))


def _exactly(line: socket.socket, size: int) -> bytearray:
    taken = bytearray(size)
    view, at = memoryview(taken), 0
    while at < size:
        count = line.recv_into(view[at:])
        if count == 0:
            raise EOFError
        at += count
    return taken


def send(line: socket.socket, header: dict[str, Any], payload: bytes = b"") -> None:
    """Send a frame."""
    written = json.dumps(header).encode()
    line.sendall(struct.pack("<IQ", len(written), len(payload)) + written)
    line.sendall(payload)


def serve(line: socket.socket, commands: Commands) -> NoReturn:
    """Answer requests until the other end is closed."""
    watched = select.poll()
    watched.register(line, select.POLLIN)
    while True:
        try:
            while not watched.poll(1000 * (LOOK_SECONDS if commands.has_left else IDLE_LOOK_SECONDS)):
                commands.look()
            asked, payload = receive(line)
            try:
                send(line, *_answer(commands, asked, payload))
            except (ValueError, OSError) as error:
                send(line, {"error": str(error)})
        except (EOFError, ConnectionError):
            os._exit(0)


def _answer(commands: Commands, asked: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
    what = asked["what"]
    if what == "run":
        return commands.run(asked)
    if what == "scan":
        return {}, json.dumps(scan()).encode()
    if what == "read":
        return read_blocks(asked["blocks"])
    if what == "load":
        load(asked["entries"], payload)
        return {}, b""
    raise ValueError(f"unknown request {what!r}")


def main(line_number: int, lease: int, lease_folder: int) -> NoReturn:
    """Make the namespaces, and fork the first process of them; remove the lease file at its end."""
    for number in (line_number, lease, lease_folder):  # whatever their numbers, a command must not inherit them
        os.set_inheritable(number, False)
    line = socket.socket(fileno=line_number)
    asked, _ = receive(line)
    try:
        enter_namespaces()
        pid = os.fork()
    except (SetupError, OSError) as error:
        send(line, {"error": str(error)})
        os._exit(1)
    if pid == 0:
        os.close(lease_folder)
        _first_process(line, lease, asked)
    line.close()
    os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        os.unlink(asked["lease_name"], dir_fd=lease_folder)
    os._exit(0)


def _first_process(line: socket.socket, lease: int, asked: dict[str, Any]) -> NoReturn:
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        prepare_first_process()
        build_root(asked["python_folder"], asked["disk_bytes"], asked["inodes"])
        send(line, {})
    except (SetupError, OSError) as error:
        with contextlib.suppress(OSError):  # the holder may be gone
            send(line, {"error": str(error)})
        os._exit(1)
    serve(line, Commands(line, lease, asked["lease_seconds"], asked["processes"]))
