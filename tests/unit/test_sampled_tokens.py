"""Tests of the tokens of a turn or trajectory, with their logprobs and versions."""

from hypothesis import given
from hypothesis import strategies as st

from rose.schemas.arrays import count, pack_tokens, unpack_logprobs, unpack_tokens
from rose.schemas.sampled_tokens import NOTHING_SAMPLED, SampledTokens, SampledTokensBuilder, VersionSpan
from rose.schemas.samples import Sample
from rose.schemas.turns import Part, TurnResult

LOGPROBS = st.lists(st.floats(-20, 0, width=32), max_size=20)


def built(logprobs: list[float], version: int) -> SampledTokens:
    builder = SampledTokensBuilder()
    builder.append(range(len(logprobs)), logprobs)
    return builder.build(version)


def test_every_record_with_sampled_tokens_has_all_fields_of_the_struct() -> None:
    for record in (Part, TurnResult, Sample):
        assert set(SampledTokens.__struct_fields__) <= set(record.__struct_fields__)


@given(st.lists(LOGPROBS, max_size=6))
def test_builder_with_version_changes_equals_concatenated_turns(chunks: list[list[float]]) -> None:
    builder, concatenated = SampledTokensBuilder(), NOTHING_SAMPLED
    for version, chunk in enumerate(chunks):
        builder.append(range(len(chunk)), chunk)
        builder.end_span(version)
        concatenated = concatenated.followed_by(built(chunk, version))
    assert builder.build(len(chunks)) == concatenated
    assert (concatenated.validation_error is None) == any(chunks)


@given(st.lists(st.tuples(LOGPROBS, st.lists(st.integers(0, 9), max_size=5)), max_size=6))
def test_loss_mask_covers_exactly_the_sampled_tokens(turns: list[tuple[list[float], list[int]]]) -> None:
    context, mask, tokens = NOTHING_SAMPLED, b"", list[int]()
    for version, (logprobs, observation) in enumerate(turns):
        context = context.followed_by(built(logprobs, version)).with_observation(pack_tokens(observation))
        mask += b"\x01" * len(logprobs) + bytes(len(observation))
        tokens += [*range(len(logprobs)), *observation]
    assert context.loss_mask == mask and unpack_tokens(context.tokens) == tokens
    assert all(mask[place] for place, logprob in enumerate(unpack_logprobs(context.logprobs)) if logprob)


def test_spans_of_one_version_join_only_without_an_observation_between() -> None:
    turn = built([-1.0, -1.0], 3)
    assert turn.followed_by(turn).spans == (VersionSpan(0, 4, 3),)
    apart = turn.with_observation(pack_tokens([5])).followed_by(turn)
    assert apart.spans == (VersionSpan(0, 2, 3), VersionSpan(3, 5, 3)) and count(apart.tokens) == 5


def test_sampled_tokens_round_trip_through_record_fields() -> None:
    turn = built([-1.0, -0.5], 3)
    part = Part(**turn.record_fields(), device_seconds={"dedicated": 1.0})
    assert SampledTokens.from_record(part) == turn and Part.from_record(part) == part
