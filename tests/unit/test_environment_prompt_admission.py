"""Admission of prompts: every prompt is refused in one sentence, or its group can be written and read."""

import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.schemas.errors import RecordError, UsageError
from rose.schemas.limits import MAX_GROUP_ID_CHARACTERS, MAX_RECORD_BYTES, MAX_STOP_TOKENS, RECORD_OVERHEAD_BYTES
from rose.schemas.progress import Group, GroupState
from rose.schemas.prompts import Prompt, PromptSampling, Sampling
from rose.schemas.samples import Sample
from rose.schemas.wire import decode, encode
from rose.workers.environments.outbox import group_record
from rose.workers.environments.prompt_admission import admission_error
from rose.workers.environments.trajectory import with_full_sampling
from rose.workers.environments.transitions import fail_at_opening
from tests.support.trajectory_fixtures import RULES, prompt_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def known(name: str) -> None:
    if name != "calculator":
        raise UsageError(f"unknown environment {name!r}")


def read(prompt: dict[str, Any]) -> Prompt | None:
    """Return the prompt of a JSON line; None if the line is not a prompt."""
    try:
        return decode(Prompt, msgspec.json.encode(prompt))
    except (RecordError, msgspec.MsgspecError, OverflowError):
        return None


def assert_decided(prompt: Prompt) -> str | None:
    """Assert that the prompt is refused, or that all its records are writable."""
    refusal = admission_error(prompt, replace(RULES, vocabulary=40), known)
    whole = with_full_sampling(prompt, RULES.sampling)
    if not refusal:
        group = group_record(whole, GroupState.OPEN, offset=2**40, outcomes_from=2**40, now=1e9)
        assert decode(Group, encode(group)) == group
    refused = group_record(whole, GroupState.REFUSED, offset=2**40, outcomes_from=0, now=1e9)
    assert decode(Group, encode(refused)) == refused
    sample = fail_at_opening(whole, prompt.group_size - 1, "no container", RULES, 1e9).sample
    assert sample is not None and decode(Sample, sample.wire) == sample.record
    return refusal


@pytest.mark.slow
@settings(max_examples=150)
@given(
    st.fixed_dictionaries(
        {
            "group_id": st.from_regex(rf"[A-Za-z0-9._:/@#+=,~-]{{1,{MAX_GROUP_ID_CHARACTERS}}}", fullmatch=True),
            "group_size": st.sampled_from([1, 2, 4096]),
            "environment": st.sampled_from(["calculator", "chess"]),
            "arguments": st.dictionaries(st.text(max_size=4), JSON, max_size=4),
        },
        optional={
            "seed": st.integers(0, 2**63 - 1),
            "sampling": st.fixed_dictionaries(
                {"temperature": st.sampled_from([0, 0.005, 0.7, 2]), "top_p": st.sampled_from([0.5, 1])}
            ),
        },
    )
)
def test_any_prompt_line_is_refused_or_writable(line: dict[str, Any]) -> None:
    prompt = read(line)
    if prompt is not None:
        refusal = assert_decided(prompt)
        requested_sampling = line.get("sampling", {"temperature": 1, "top_p": 1})
        priced = requested_sampling["temperature"] >= 0.01 and requested_sampling["top_p"] == 1
        assert refusal or (line["environment"] == "calculator" and priced)


@pytest.mark.parametrize("size", [MAX_RECORD_BYTES - 50, MAX_RECORD_BYTES, MAX_RECORD_BYTES + RECORD_OVERHEAD_BYTES])
def test_prompt_with_a_group_over_the_size_limit_is_refused(size: int) -> None:
    prompt = prompt_of(arguments={"text": "x" * size})
    assert bool(assert_decided(prompt)) == (size > MAX_RECORD_BYTES)


def test_every_writable_prompt_fits_its_group_record() -> None:
    wide = replace(RULES, sampling=Sampling(stop_token_ids=(2**32 - 1,) * MAX_STOP_TOKENS, seed=2**63 - 1))
    prompt = prompt_of(group_id="g" * MAX_GROUP_ID_CHARACTERS, seed=2**63 - 1, arguments={"text": ""})
    prompt = msgspec.structs.replace(prompt, arguments={"text": "x" * (Prompt.MAX_BYTES - len(encode(prompt)) - 4)})
    assert len(encode(prompt)) == Prompt.MAX_BYTES
    assert not admission_error(prompt, wide, known)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"arguments": {"n": 2**70}}, "cannot be written|can't serialize"),
        ({"sampling": PromptSampling(temperature=0)}, "temperature 0"),
        ({"sampling": PromptSampling(top_p=0.9)}, "top_p 0.9"),
        ({"environment": "os:getcwd"}, "unknown environment"),
        (
            {"sampling": PromptSampling(stop_token_ids=(39, 40))},
            "stop_token_ids: token id 40 is outside the vocabulary of 40",
        ),
    ],
)
def test_refused_prompt_has_the_reason(fields: dict[str, Any], reason: str) -> None:
    assert re.search(reason, str(assert_decided(prompt_of(**fields))))


def test_greedy_default_refuses_prompts_without_sampling_settings() -> None:
    greedy = replace(RULES, sampling=Sampling(temperature=0))
    assert "temperature" in str(admission_error(prompt_of(), greedy, known))
