"""The proof that an endpoint serves a version: accepted and refused answers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from rose.workers.lender.endpoint.server_interface import ANSWER_TOKENS, ProbeAnswer
from rose.workers.lender.endpoint.versions import ReferenceModel, probe_context, probe_error, proof_error
from tests.support.model_families import tiny_policy

TOLERANCE = 1e-3
SIZES = st.integers(1, 200)


def drawn(seed: int, size: int) -> "np.typing.NDArray[np.float64]":
    return -np.random.default_rng(seed).exponential(3.0, size)


@given(st.integers(0, 99), SIZES, st.floats(1e-5, 1.0))
def test_answers_of_new_weights_are_proven_and_of_old_weights_are_not(seed: int, size: int, moved: float) -> None:
    before = drawn(seed, size)
    new = before + moved * np.random.default_rng(seed + 1).standard_normal(size)
    noise = 1e-6 * np.random.default_rng(seed + 2).standard_normal(size)
    if np.abs(new - before).max() < 1e-5:
        return
    assert proof_error(new + noise, new, before, TOLERANCE) is None
    assert proof_error(before + noise, new, before, TOLERANCE)


@given(st.integers(0, 99), SIZES, st.floats(2 * TOLERANCE, 10.0))
def test_one_wrong_logprob_disproves_a_version(seed: int, size: int, off: float) -> None:
    new = drawn(seed, size)
    given_ = new.copy()
    given_[seed % size] -= off
    assert "off by" in str(proof_error(given_, new, None, TOLERANCE))


def test_nan_logprob_is_never_proven() -> None:
    new = drawn(0, 4)
    assert proof_error(np.array([new[0], np.nan, new[2], new[3]]), new, None, TOLERANCE)
    assert proof_error(np.full(4, -np.inf), new, None, TOLERANCE)


def test_unchanged_version_is_proven_by_the_same_answers() -> None:
    new = drawn(1, 8)
    assert proof_error(new, new, new.copy(), TOLERANCE) is None


def test_probe_is_deterministic_per_version() -> None:
    assert probe_context(48, 3) == probe_context(48, 3) != probe_context(48, 4)
    assert set(probe_context(48, 3)) <= set(range(48))


def test_incomplete_answer_proves_nothing() -> None:
    tokens = [5] * ANSWER_TOKENS
    places = [{5: -0.1, 7: -3.0}] * ANSWER_TOKENS
    assert probe_error(ProbeAnswer([1], tokens, places), 48) is None
    assert "answered with 0" in str(probe_error(ProbeAnswer([1], [], []), 48))
    assert "logprobs of 31" in str(probe_error(ProbeAnswer([1], tokens, places[1:]), 48))
    assert "without logprobs" in str(probe_error(ProbeAnswer([1], tokens, [{}, *places[1:]]), 48))
    assert "vocabulary" in str(probe_error(ProbeAnswer([1], tokens, [{5: -0.1, 48: -3.0}, *places[1:]]), 48))


@pytest.mark.parametrize("kind", ["gpt_neox", "qwen3"])
def test_expected_logprobs_follow_from_the_names_in_the_version_folder(kind: str, tmp_path: Path) -> None:
    model = tiny_policy(kind, tmp_path)
    probed = ProbeAnswer([2, 3, 4], [5, 6], [{5: 0.0, 9: 0.0}, {6: 0.0}])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=torch.arange(2, 7)[None]).logits[0, 2:-1].double(), -1)
    given_ = ReferenceModel(tmp_path).logprobs(load_file(tmp_path / "model.safetensors"), probed)
    assert given_ == pytest.approx([float(logprobs[place]) for place in ((0, 5), (0, 9), (1, 6))])
