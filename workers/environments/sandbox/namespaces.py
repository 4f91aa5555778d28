"""Namespaces of a sandbox: what its commands may see and do. Linux 5.12 or later.

Keeps true
- A command has no capability, no network but its own loopback, and no file of the host but the system's programs and
  libraries, which it cannot change. It sees its own processes only, and makes no further user namespace.
- All files that a command can write are in one tmpfs of bounded size, which ends with the namespaces.

The standard library alone is imported.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct

from rose.workers.environments.sandbox.namespace_files import ROOTS

OUTPUT_FOLDER, OUTPUT_BYTES = "/output", 4 << 20
"""Most bytes of the output of one command, and the empty folder where its file is made."""

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
    if os.uname().machine not in _SYS_PIVOT_ROOT:
        raise SetupError(f"processors of type {os.uname().machine} are not supported")
    user, group = os.geteuid(), os.getegid()
    _checked(_libc.unshare(_NEW_NAMESPACES), "unshare of user, mount, PID, network, IPC and UTS namespaces")
    try:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"0 {user} 1")
        _write("/proc/self/gid_map", f"0 {group} 1")
    except OSError as error:
        raise SetupError(f"map of user ids: {error.strerror}") from None


def prepare_first_process() -> None:
    """Give the first process of the namespaces its own name, loopback and keyring. Raises SetupError or OSError.

    The kernel kills it with its parent, and lets no other process of its user read or trace it.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _checked(_libc.sethostname(b"sandbox", 7), "sethostname")
    # The worker's session keyring would be inherited. A kernel or container without keyrings refuses the call.
    _libc.syscall(_SYS_KEYCTL[os.uname().machine], _KEYCTL_JOIN_SESSION_KEYRING, None)
    _raise_loopback()


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
    _write("/new/etc/passwd", "root:x:0:0::/workspace:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n")
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
        # Read-only, because a worker of root owns the host's device: a command could change its mode. Data is written.
        _bind(f"/old/dev/{name}", f"/new/dev/{name}", read_only=True)
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


def _raise_loopback() -> None:
    """Bring the loopback device of the network namespace up. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING


def drop_privileges() -> None:
    """Give up every capability, for good. Called in a command's process."""
    for number in range(_CAPABILITIES):
        _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _checked(_libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("IIIIII", 0, 0, 0, 0, 0, 0)), "capset")


def output_file() -> int:
    """A file of bounded size, in no folder that a command sees: a full disk does not hide what a command says."""
    _mount("tmpfs", OUTPUT_FOLDER, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, f"size={OUTPUT_BYTES},nr_inodes=8")
    try:
        return os.open(OUTPUT_FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
    finally:
        _checked(_libc.umount2(OUTPUT_FOLDER.encode(), _MNT_DETACH), "umount of the output")
