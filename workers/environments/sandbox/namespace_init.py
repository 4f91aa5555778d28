"""First process of a sandbox: makes namespaces, runs commands in them, reads and writes the files there.

Run as a program by `process.py`, with the standard library alone. Linux 5.12 or later.

Keeps true
- A command has no capability, no network but its own loopback, and no file of the host but the system's programs and
  libraries, which it cannot change. It sees its own processes only, and makes no further user namespace.
- All files that a command can write are in one tmpfs of bounded size, which ends with the namespaces.
- This process is process 1 of its PID namespace: the kernel kills all others when it ends. It ends when the other end
  of its socket is closed, when its lease file is removed, and when nobody has renewed the lease in time.
- No path leads through a symbolic link of the sandbox: files are opened with O_NOFOLLOW, and links are made last.

Frame: 4 bytes length of the header, 8 bytes length of the payload, the header in JSON, the payload. Paths are bytes,
written as Latin-1 text.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from typing import Any, NoReturn

BLOCK_BYTES = 65_536
"""Files are hashed and saved in blocks of this size."""

PATH_BYTES = 1024
"""Longest path that is saved."""

MAX_FRAME_BYTES = 1 << 30

ROOTS = {"work": "/work", "tmp": "/tmp", "shm": "/dev/shm"}
"""Folders that commands can write, by their names in a tree. All are in one tmpfs."""

OUTPUT_FOLDER, OUTPUT_BYTES = "/output", 4 << 20
"""Most bytes of the output of one command, and the empty folder where its file is made."""

SETTLE_SECONDS = 0.1
"""Time that processes which a command leaves have to end by themselves before they count as left."""

LOOK_SECONDS = 0.02
"""Time between two counts of processes while a command runs or a process is left."""

IDLE_LOOK_SECONDS = 1.0
"""Time between two looks at the lease."""

_NEW_NAMESPACES = 0x00020000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""CLONE_NEWNS, NEWUSER, NEWPID, NEWNET, NEWIPC, NEWUTS (linux/sched.h)."""

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
_MNT_DETACH, _AT_RECURSIVE = 2, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_MOUNT_SETATTR = 442
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_SYS_KEYCTL = {"x86_64": 250, "aarch64": 219}
_KEYCTL_JOIN_SESSION_KEYRING = 1
_CAPABILITIES = 64

_libc = ctypes.CDLL(None, use_errno=True)


class SetupError(Exception):
    """The kernel or the container refuses a part of the sandbox."""


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise SetupError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    given = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _checked(_libc.mount(*given), f"mount of {kind or source} at {target}")


def _bind(source: str, target: str, *, read_only: bool) -> None:
    """Bind a file or folder with all that is mounted below it."""
    _mount(source, target, "", _MS_BIND | _MS_REC)
    _set_attributes(target, (_ATTR_RDONLY if read_only else 0) | _ATTR_NOSUID, recursive=True)


def _set_attributes(target: str, attributes: int, *, recursive: bool) -> None:
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    result = _libc.syscall(_SYS_MOUNT_SETATTR, -100, target.encode(), flags, wanted, ctypes.c_size_t(len(wanted)))
    _checked(result, f"mount_setattr of {target}")


def _pivot(new: str, old: str) -> None:
    _checked(_libc.syscall(_SYS_PIVOT_ROOT[os.uname().machine], new.encode(), old.encode()), "pivot_root")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def enter_namespaces() -> None:
    """Make the namespaces of this process's children, and of itself all but the PID namespace. Raises SetupError."""
    user, group = os.geteuid(), os.getegid()
    _checked(_libc.unshare(_NEW_NAMESPACES), "unshare of user, mount, PID, network, IPC and UTS namespaces")
    try:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {user} 1")
        _write("/proc/self/gid_map", f"0 {group} 1")
    except OSError as error:
        raise SetupError(f"map of user ids: {error.strerror}") from None


def build_root(python_folder: str, disk_bytes: int, inodes: int) -> None:
    """Build the folders that commands see, and make them the root. Raises SetupError."""
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=1m")
    for folder in ("/tmp/new", "/tmp/old"):
        os.mkdir(folder)
    _pivot("/tmp", "/tmp/old")
    os.chdir("/")
    _mount("/new", "/new", "", _MS_BIND | _MS_REC)
    _system_folders(python_folder)
    _mount(
        "tmpfs", _made("/new/state"), "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode=755,size={disk_bytes},nr_inodes={inodes}"
    )
    for name, seen in ROOTS.items():
        os.mkdir(f"/new/state/{name}")
        os.chmod(f"/new/state/{name}", 0o755 if name == "work" else 0o1777)
        _mount(f"/new/state/{name}", _made(f"/new{seen}"), "", _MS_BIND)
    _checked(_libc.umount2(b"/new/state", _MNT_DETACH), "umount of the tmpfs's root")
    _proc()
    _checked(_libc.umount2(b"/old", _MNT_DETACH), "umount of the host's files")
    os.chdir("/new")
    _pivot(".", ".")
    _checked(_libc.umount2(b".", _MNT_DETACH), "umount of the first root")
    os.chdir("/")
    _set_attributes("/", _ATTR_RDONLY | _ATTR_NOSUID, recursive=False)


def _made(folder: str) -> str:
    os.makedirs(folder, exist_ok=True)
    return folder


def _system_folders(python_folder: str) -> None:
    for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64"):
        source = f"/old/{name}"
        if os.path.islink(source):
            os.symlink(os.readlink(source), f"/new/{name}")
        elif os.path.isdir(source):
            _bind(source, _made(f"/new/{name}"), read_only=True)
    if not python_folder.startswith("/usr/") and os.path.isdir(f"/old{python_folder}"):
        _bind(f"/old{python_folder}", _made(f"/new{python_folder}"), read_only=True)
    _made(f"/new{OUTPUT_FOLDER}")
    _made("/new/etc")
    _write("/new/etc/passwd", "root:x:0:0::/work:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n")
    _write("/new/etc/group", "root:x:0:\nnogroup:x:65534:\n")
    _write("/new/etc/hosts", "127.0.0.1 localhost\n")
    for name in ("alternatives", "ld.so.cache"):
        source, target = f"/old/etc/{name}", f"/new/etc/{name}"
        if os.path.isdir(source):
            _bind(source, _made(target), read_only=True)
        elif os.path.isfile(source):
            _write(target, "")
            _bind(source, target, read_only=True)
    _made("/new/dev")
    for name in ("null", "zero", "full", "random", "urandom"):
        _write(f"/new/dev/{name}", "")
        _mount(f"/old/dev/{name}", f"/new/dev/{name}", "", _MS_BIND)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"/new/dev/{name}")


def _proc() -> None:
    """Mount /proc; the kernel's settings there cannot be written, and no further user namespaces can be made."""
    _mount("proc", _made("/new/proc"), "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    # System V and POSIX message objects outlive processes and are in no file: none can be made.
    for name in ("user/max_user_namespaces", "kernel/shmmni", "kernel/msgmni", "fs/mqueue/queues_max"):
        with contextlib.suppress(OSError):
            _write(f"/new/proc/sys/{name}", "0")
    for name in ("sys", "irq", "bus", "fs", "sysrq-trigger"):
        if os.path.exists(f"/new/proc/{name}"):
            _bind(f"/new/proc/{name}", f"/new/proc/{name}", read_only=True)
    for name in ("kcore", "keys", "kmsg", "timer_list", "sched_debug"):
        if os.path.exists(f"/new/proc/{name}"):
            _mount("/new/dev/null", f"/new/proc/{name}", "", _MS_BIND)


def raise_loopback() -> None:
    """Bring the loopback device of the network namespace up. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING


def drop_privileges() -> None:
    """Give up every capability, for good. Called in a command's process."""
    for number in range(_CAPABILITIES):
        _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _checked(_libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("IIIIII", 0, 0, 0, 0, 0, 0)), "capset")


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


def _output_file() -> int:
    """A file of bounded size, in no folder that a command sees: a full disk does not hide what a command says."""
    _mount("tmpfs", OUTPUT_FOLDER, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, f"size={OUTPUT_BYTES},nr_inodes=8")
    try:
        return os.open(OUTPUT_FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
    finally:
        _checked(_libc.umount2(OUTPUT_FOLDER.encode(), _MNT_DETACH), "umount of the output")


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
        output = _output_file()
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
        os.closerange(3, 256)
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for name, most in asked["limits"].items():
            resource.setrlimit(getattr(resource, name), (most, most))
        os.chdir("/work")
        drop_privileges()
        argv = asked["argv"]
        os.execve(argv[0], argv, asked["variables"])
    except BaseException as error:  # noqa: BLE001 - the child ends here whatever happens
        os.write(2, f"cannot run: {error}\n".encode(errors="replace"))
    os._exit(127)


def scan() -> list[list[Any]]:
    """Every file below the roots: path, kind, mode, time of change (ns), size, target, digests of its blocks.

    Raises ValueError for a file that cannot be saved.
    """
    found: list[list[Any]] = []
    inodes: dict[int, str] = {}
    stack = list(reversed(ROOTS))
    while stack:
        name = stack.pop()
        path = path_of(name)
        if len(name) > PATH_BYTES:
            raise ValueError(f"a path has more than {PATH_BYTES} bytes")
        about = os.lstat(path)
        mode, kind = stat.S_IMODE(about.st_mode), stat.S_IFMT(about.st_mode)
        entry = [name, "", mode, about.st_mtime_ns, 0, "", ""]
        if kind == stat.S_IFDIR:
            entry[1], entry[3] = "d", 0
            stack += sorted((f"{name}/{each.decode('latin-1')}" for each in os.listdir(path)), reverse=True)
        elif kind == stat.S_IFLNK:
            entry[1], entry[2], entry[3], entry[5] = "l", 0, 0, os.readlink(path).decode("latin-1")
        elif kind == stat.S_IFIFO:
            entry[1], entry[3] = "p", 0
        elif kind != stat.S_IFREG:
            continue  # a socket, which is nothing without its process
        elif about.st_nlink > 1 and about.st_ino in inodes:
            entry[1:6] = "h", 0, 0, 0, inodes[about.st_ino]
        else:
            entry[1], entry[4], entry[6] = "f", about.st_size, _block_digests(path)
            inodes[about.st_ino] = name
        found.append(entry)
    return found


def path_of(name: str) -> bytes:
    """The path, as commands see it, of a path in a tree."""
    root, slash, rest = name.partition("/")
    return (ROOTS[root] + slash).encode() + rest.encode("latin-1")


def _opened(path: bytes) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)


def _block_digests(path: bytes) -> str:
    """Digests of a file's blocks (BLAKE2b, 16 bytes each) in hexadecimal digits."""
    file = _opened(path)
    try:
        digests = []
        while block := os.read(file, BLOCK_BYTES):
            digests.append(hashlib.blake2b(block, digest_size=16).hexdigest())
        return "".join(digests)
    finally:
        os.close(file)


def read_blocks(asked: list[list[Any]]) -> tuple[dict[str, Any], bytes]:
    """Return blocks, each given by path and number."""
    blocks = []
    for name, number in asked:
        file = _opened(path_of(name))
        blocks.append(os.pread(file, BLOCK_BYTES, number * BLOCK_BYTES))
        os.close(file)
    return {"sizes": [len(block) for block in blocks]}, b"".join(blocks)


def load(entries: list[list[Any]], content: bytes) -> None:
    """Replace all files by these, whose contents are given in the order of the regular files. Raises OSError."""
    for folder in ROOTS.values():
        for each in os.listdir(folder.encode()):
            _remove(folder.encode() + b"/" + each)
    at = 0
    links, folders = [], []
    for name, kind, mode, mtime_ns, size, target, _ in entries:
        path = path_of(name)
        if kind == "d":
            folders.append((path, mode))
            if name not in ROOTS:
                os.mkdir(path, 0o700)
        elif kind == "f":
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(file, "wb") as writer:
                writer.write(content[at : at + size])
                writer.flush()
                os.fchmod(file, mode)
                os.utime(file, ns=(mtime_ns, mtime_ns))
            at += size
        elif kind == "p":
            os.mkfifo(path, mode)
            os.chmod(path, mode)
        else:
            links.append((path, kind, target))
    for path, kind, to in sorted(links, key=lambda link: link[1]):  # hard links, then symbolic links
        if kind == "h":
            os.link(path_of(to), path, follow_symlinks=False)
        else:
            os.symlink(to.encode("latin-1"), path)
    for path, mode in reversed(folders):
        os.chmod(path, mode)


def _remove(path: bytes) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        for each in os.listdir(path):
            _remove(path + b"/" + each)
        os.rmdir(path)
    else:
        os.unlink(path)


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
    line = socket.socket(fileno=line_number)
    asked, _ = receive(line)
    try:
        if os.uname().machine not in _SYS_PIVOT_ROOT:
            raise SetupError(f"processors of type {os.uname().machine} are not supported")
        enter_namespaces()
        pid = os.fork()
    except (SetupError, OSError) as error:
        send(line, {"error": str(error)})
        os._exit(1)
    if pid == 0:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
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
        _checked(_libc.sethostname(b"sandbox", 7), "sethostname")
        # The worker's session keyring would be inherited. A kernel or container without keyrings refuses the call.
        _libc.syscall(_SYS_KEYCTL[os.uname().machine], _KEYCTL_JOIN_SESSION_KEYRING, None)
        raise_loopback()
        build_root(asked["python_folder"], asked["disk_bytes"], asked["inodes"])
        send(line, {})
    except (SetupError, OSError) as error:
        with contextlib.suppress(OSError):  # the holder may be gone
            send(line, {"error": str(error)})
        os._exit(1)
    serve(line, Commands(line, lease, asked["lease_seconds"], asked["processes"]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
