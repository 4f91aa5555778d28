"""Descriptions of errors."""

import subprocess

import pytest

from rose.schemas.errors import MAX_LEAVES, describe_error, is_start_refused


def test_exception_group_is_described_by_its_members() -> None:
    inner = ExceptionGroup("tools", [ConnectionRefusedError("10.0.0.7 is away"), KeyError("answer")])
    group = BaseExceptionGroup("unhandled errors in a TaskGroup", [inner, ValueError("no")])
    description = describe_error(group)
    assert description.startswith("ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions): ")
    assert description.endswith("ConnectionRefusedError: 10.0.0.7 is away; KeyError: 'answer'; ValueError: no")


def test_exception_group_names_the_first_errors_and_counts_the_others() -> None:
    description = describe_error(ExceptionGroup("all", [ValueError(f"<{number}>") for number in range(MAX_LEAVES + 3)]))
    assert f"<{MAX_LEAVES - 1}>; 3 more" in description and f"<{MAX_LEAVES}>" not in description


def test_refused_start_of_a_process_is_distinguished_from_another_blocking_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> int:
        raise BlockingIOError

    monkeypatch.setattr(subprocess, "_fork_exec", refuse)
    with pytest.raises(BlockingIOError) as refused:
        subprocess.Popen(["true"])
    assert is_start_refused(refused.value) and not is_start_refused(BlockingIOError())
