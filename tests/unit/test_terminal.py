"""What others wrote is shown on a terminal, and does nothing there."""

import errno
import io
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rose.pipeline.monitor.diagnosis import Finding, Severity
from rose.pipeline.monitor.screen import Screen, finding_lines
from rose.pipeline.process.process_setup import configure_logging
from rose.pipeline.process.terminal import escape_control_chars, file_error, print_line

NASTY = "\x1b]0;mine\x07 [/opt/model] is none \x9b2J [bold]\u202etxt"


@given(st.text())
def test_nothing_steers_a_terminal_and_all_else_stays_as_it_was(text: str) -> None:
    shown = escape_control_chars(text)
    assert all(each.isprintable() or each in "\t\n" for each in shown if ord(each) < 0xA0)
    assert escape_control_chars(shown) == shown
    if text.isprintable():
        assert shown == text


def test_what_others_wrote_is_said_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_line(NASTY)
    shown = "\\x1b]0;mine\\x07 [/opt/model] is none \\x9b2J [bold]\\u202etxt\n"
    assert capsys.readouterr().out == shown
    console = Console(file=io.StringIO(), width=200)
    nothing: Any = None
    Screen(nothing, console, title="")._print(NASTY)
    console.print(*finding_lines([Finding(Severity.UNWELL, "executor-0", NASTY)]))
    said, found = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert f"{said}\n" == shown and found.endswith(shown.strip())


def test_logs_are_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    try:
        structlog.get_logger("test").warning("prompt_refused", reason=NASTY, home=3)
    finally:
        structlog.reset_defaults()
    told = capsys.readouterr().err
    assert "[/opt/model]" in told and "home=3" in told and "\x1b" not in told and "\x9b" not in told


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
def test_what_is_wrong_with_a_file_or_a_disk_is_a_sentence_and_nothing_else_is(
    number: int, file: str | None, status: int | None
) -> None:
    refused = file_error(OSError(number, "why", file))
    assert (refused and refused.exit_status) == status
    assert refused is None or ("why" in str(refused) and (file or "") in str(refused))
