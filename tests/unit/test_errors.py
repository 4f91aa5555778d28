"""Errors in words."""

from rose.schemas.errors import MAX_LEAVES, describe_error


def test_a_group_of_errors_is_told_by_what_is_in_it() -> None:
    inner = ExceptionGroup("tools", [ConnectionRefusedError("10.0.0.7 is away"), KeyError("answer")])
    group = BaseExceptionGroup("unhandled errors in a TaskGroup", [inner, ValueError("no")])
    said = describe_error(group)
    assert said.startswith("ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions): ")
    assert said.endswith("ConnectionRefusedError: 10.0.0.7 is away; KeyError: 'answer'; ValueError: no")


def test_of_many_errors_the_first_are_told_and_the_others_counted() -> None:
    said = describe_error(ExceptionGroup("all", [ValueError(f"<{number}>") for number in range(MAX_LEAVES + 3)]))
    assert f"<{MAX_LEAVES - 1}>; 3 more" in said and f"<{MAX_LEAVES}>" not in said
