"""A turn sampled in parts equals the turn sampled at once."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.schemas.arrays import count, pack_logprobs, pack_tokens
from rose.schemas.limits import MAX_SPANS
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.turns import MAX_DEVICE_SECONDS, MAX_WORKER_CLASSES, Part, TurnDispatch
from rose.schemas.wire import decode, encode
from rose.workers.executor.records import concatenate_parts, dispatch_error, remaining_sampling, resumed_context
from tests.support.routing_fixtures import dispatched, request

TOKENS = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.floats(-20, 0, width=32), st.integers(0, 5)), max_size=40)
"""Tokens with logprobs and, sorted, the version that sampled each."""
Token = tuple[int, float, int]


def part_of(tokens: list[Token], seconds: dict[str, float] | None = None) -> Part:
    spans: list[VersionSpan] = []
    for place, (_, _, version) in enumerate(tokens):
        start = spans.pop().start if spans and spans[-1].version == version else place
        spans.append(VersionSpan(start, place + 1, version))
    return Part(
        tokens=pack_tokens([token for token, _, _ in tokens]),
        logprobs=pack_logprobs([logprob for _, logprob, _ in tokens]),
        spans=tuple(spans),
        device_seconds=seconds or {},
    )


def in_order(tokens: list[Token]) -> list[Token]:
    versions = sorted(version for _, _, version in tokens)
    return [(token, logprob, version) for (token, logprob, _), version in zip(tokens, versions, strict=True)]


@given(TOKENS.map(in_order), st.lists(st.integers(0, 40), max_size=6))
def test_partial_turns_concatenate_to_the_same_result_at_any_cut(tokens: list[Token], cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    so_far: Part | None = None
    for start, end in pairwise(places):
        so_far = concatenate_parts(so_far, part_of(tokens[start:end]))
    whole = part_of(tokens)
    assert so_far == whole
    assert (whole.validation_error is None) == bool(tokens)


@given(TOKENS.map(in_order), TOKENS.map(in_order), TOKENS.map(in_order))
def test_concatenation_of_partial_turns_is_associative(one: list[Token], two: list[Token], three: list[Token]) -> None:
    a, b, c = part_of(one), part_of(two), part_of(three)
    assert concatenate_parts(concatenate_parts(a, b), c) == concatenate_parts(a, concatenate_parts(b, c))


@given(TOKENS.map(in_order), st.integers(1, 30), st.integers(1, 60))
def test_engine_resumes_behind_the_sampled_tokens(tokens: list[Token], context: int, most: int) -> None:
    dispatch_of_turn = dispatched(request("g0:0", context=context, max_tokens=most))
    whole = dispatch_of_turn.request.appended
    assert (resumed_context(dispatch_of_turn, whole), remaining_sampling(dispatch_of_turn)) == (
        whole,
        dispatch_of_turn.request.sampling,
    )
    part = part_of(tokens)
    dispatch: TurnDispatch = decode(TurnDispatch, encode(msgspec.structs.replace(dispatch_of_turn, partial=part)))
    assert resumed_context(dispatch, whole) == whole + part.tokens
    assert remaining_sampling(dispatch).max_tokens + count(part.tokens) == most
    assert msgspec.structs.replace(remaining_sampling(dispatch), max_tokens=most) == dispatch_of_turn.request.sampling


def test_device_seconds_add_up_by_class() -> None:
    first = part_of([(1, -1.0, 0)], {"serving": 1.0, "dedicated": 0.5})
    then = part_of([(2, -1.0, 0)], {"dedicated": 0.25, "other": 2.0})
    assert concatenate_parts(first, then).device_seconds == {"serving": 1.0, "dedicated": 0.75, "other": 2.0}


@pytest.mark.parametrize("end", [0, 2])
def test_partial_turn_with_incomplete_spans_is_reported(end: int) -> None:
    part = part_of([(1, -1.0, 3)])
    assert msgspec.structs.replace(part, spans=(VersionSpan(0, end, 3),)).validation_error


def test_unanswerable_turn_is_refused_before_acceptance() -> None:
    dispatch_of_turn = dispatched(request("g0:0", max_tokens=MAX_SPANS + 1))
    assert not dispatch_error(dispatch_of_turn, homes=1)
    assert "home 7" in str(dispatch_error(dispatched(request("g0:0", home=7)), homes=7))
    one, many = part_of([(1, -1.0, 3)]), part_of([(1, -1.0, version) for version in range(MAX_SPANS)])
    classes = {f"class-{number}": 1.0 for number in range(MAX_WORKER_CLASSES)}
    for partial, refused in (
        (one, ""),
        (msgspec.structs.replace(one, device_seconds={"serving": MAX_DEVICE_SECONDS}), ""),
        (msgspec.structs.replace(one, logprobs=b""), "malformed"),
        (msgspec.structs.replace(one, device_seconds=classes), "8 worker classes"),
        (msgspec.structs.replace(one, device_seconds={"serving": 1e12}), "device-seconds"),
        (many, "2048 spans"),
    ):
        dispatch = msgspec.structs.replace(dispatch_of_turn, partial=partial)
        flaw = dispatch_error(dispatch, homes=1)
        assert refused in flaw if flaw else not refused
        if not flaw:
            whole = concatenate_parts(dispatch.partial, part_of([(1, -1.0, 4)], {"serving": MAX_DEVICE_SECONDS}))
            assert encode(msgspec.structs.replace(dispatch, partial=whole))
