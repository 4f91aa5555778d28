"""Text from other programs is shown on a terminal without an effect, and a command works with any standard streams."""

import errno
import io
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rose.pipeline.cli import main
from rose.pipeline.monitor.diagnosis import Finding, Severity
from rose.pipeline.monitor.screen import Screen, finding_lines
from rose.pipeline.process_setup import configure_logging
from rose.pipeline.terminal import escape_control_chars, file_error, print_line
from tests.unit.test_imports import ROOT

NASTY = "\x1b]0;mine\x07 [/opt/model] is none \x9b2J [bold]\u202etxt"


@given(st.text())
def test_terminal_control_characters_are_escaped_and_other_text_is_unchanged(text: str) -> None:
    shown = escape_control_chars(text)
    assert all(each.isprintable() or each in "\t\n" for each in shown if ord(each) < 0xA0)
    assert escape_control_chars(shown) == shown
    if text.isprintable():
        assert shown == text


def test_external_text_is_escaped_and_printed_without_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_line(NASTY)
    shown = "\\x1b]0;mine\\x07 [/opt/model] is none \\x9b2J [bold]\\u202etxt\n"
    assert capsys.readouterr().out == shown
    console = Console(file=io.StringIO(), width=200)
    nothing: Any = None
    Screen(nothing, console, title="")._print(NASTY)
    console.print(*finding_lines([Finding(Severity.UNWELL, "executor-0", NASTY)]))
    printed, found = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert f"{printed}\n" == shown and found.endswith(shown.strip())


def test_log_lines_have_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    try:
        structlog.get_logger("test").warning("prompt_refused", reason=NASTY, home=3)
    finally:
        structlog.reset_defaults()
    errors = capsys.readouterr().err
    assert "[/opt/model]" in errors and "home=3" in errors and "\x1b" not in errors and "\x9b" not in errors


@pytest.mark.parametrize(
    ("number", "file", "status"),
    [
        (errno.ENOSPC, None, 1),
        (errno.EDQUOT, "runs/x", 1),
        (errno.EACCES, "runs/x", 2),
        (errno.EROFS, "runs/x", 2),
        (errno.EIO, "runs/x", 1),
        (errno.ECONNREFUSED, None, None),
    ],
)
def test_file_and_disk_errors_are_one_sentence_and_other_errors_are_not(
    number: int, file: str | None, status: int | None
) -> None:
    refused = file_error(OSError(number, "why", file))
    assert (refused and refused.exit_status) == status
    assert refused is None or ("why" in str(refused) and (file or "") in str(refused))


ROSE = f"{sys.executable} -m rose.pipeline.cli.main"


def ran(words: str, *, cwd: Path = ROOT, python: str = "", **variables: str) -> subprocess.CompletedProcess[bytes]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ROSE_", "PYTHON", "LC_"))}
    environment = inherited | {"PYTHONPATH": str(ROOT)} | variables
    command = f"{sys.executable} {python} -m rose.pipeline.cli.main {words}"
    return subprocess.run(["/bin/sh", "-c", command], cwd=cwd, env=environment, capture_output=True, check=False)


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("config >&-", 0),
        ("config 2>&-", 0),
        ("config <&- >&- 2>&-", 0),
        ("config --set run.seed=x 2>&-", 2),
        ("config --set run.seed=x <&- >&- 2>&-", 2),
        ("config --set run.seed=x 2>/dev/full", 2),
        ("config >/dev/full", 1),
        ("topics asyncapi >/dev/full", 1),
        ("config >&0 </dev/null", 2),
        ("topics acl --role router >/dev/full", 1),
        ("config | true", 0),
    ],
)
def test_closed_or_full_streams_change_no_exit_status_and_print_no_traceback(words: str, status: int) -> None:
    done = ran(words)
    assert done.returncode == status
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr
    if status == 1:
        assert done.stderr.count(b"\n") == 1 and b"No space left on device" in done.stderr


def test_character_outside_the_locale_is_printed_as_a_toml_escape() -> None:
    done = ran("config --set tasks.environment='\u00e9\u732b\U0001f408:K'", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert tomllib.loads(done.stdout.decode("ascii"))["tasks"]["environment"] == "\u00e9\u732b\U0001f408:K"


def test_missing_working_directory_is_reported_in_one_sentence(tmp_path: Path) -> None:
    done = ran(f"--help >/dev/null; mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir {tmp_path}/gone; {ROSE} up")
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and done.stderr.startswith(b"rose: ")


@pytest.mark.parametrize("words", ["--help", "topics --help", "topics asyncapi"])
def test_help_and_records_are_described_the_same_without_docstrings(words: str) -> None:
    assert ran(words, python="-OO").stdout == ran(words).stdout


@pytest.mark.parametrize("seconds", ["inf", "nan", "3601", "-1"])
def test_drain_with_an_invalid_time_is_refused_by_its_option(seconds: str) -> None:
    done = ran(f"drain w --within {seconds}")
    assert done.returncode == 2 and b"--within" in done.stderr and b"finish_seconds" not in done.stderr


def test_impossible_grant_names_its_option() -> None:
    done = ran("grant w --kv-bytes 99999999999999999999")
    assert done.returncode == 2 and b"--kv-bytes" in done.stderr and b"$" not in done.stderr


@pytest.mark.parametrize("command", ["settle g:0", "drain w", "grant w --no-lend"])
def test_non_text_reason_is_refused_in_one_sentence(command: str) -> None:
    done = ran(f"{command} --reason $(printf '\\377')", LC_ALL="C.UTF-8")
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1), done.stderr
    assert b"--reason is not UTF-8 text" in done.stderr


AT_THE_FIRST_IMPORT = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == "rose.pipeline.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from rose.pipeline.cli.__main__ import main
main()
"""


def test_command_interrupted_during_its_start_prints_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", AT_THE_FIRST_IMPORT], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


INHERITS = """
import os, subprocess, sys
from rose.pipeline.cli import main
from rose.pipeline.terminal import repair_streams
repair_streams()
subprocess.run([sys.executable, "-c", "import os; [os.fstat(number) for number in range(3)]"], check=True)
os._exit(0)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_stream_closed_at_the_start_is_open_for_child_processes(closed: str) -> None:
    command = ["/bin/sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, INHERITS]
    subprocess.run(command, check=True, cwd=ROOT, stderr=subprocess.DEVNULL)


LOGS = """
import sys
from rose.pipeline.process_setup import configure_logging
from rose.pipeline.cli import main
from rose.pipeline.terminal import repair_streams
import structlog
repair_streams()
configure_logging()
sys.stdin.read()
for _ in range(3):
    structlog.get_logger().warning("still_here", padding="x" * 9000)
    sys.stderr.write("and here\\n")
"""


def test_program_continues_after_its_log_reader_has_gone() -> None:
    reads, writes = os.pipe()
    with subprocess.Popen([sys.executable, "-c", LOGS], cwd=ROOT, stdin=subprocess.PIPE, stderr=writes) as program:
        os.close(writes)
        os.close(reads)
        program.communicate(timeout=60)
    assert program.returncode == 0


def test_command_that_can_start_no_thread_ends_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1 and "no further thread can be started: raise the limit" in capsys.readouterr().err
