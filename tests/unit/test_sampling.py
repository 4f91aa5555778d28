"""Sampling settings that the loss can evaluate, in a configuration and in a prompt."""

import pytest

from rose.schemas.prompts import Sampling, sampling_error


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (Sampling(), ""),
        (Sampling(temperature=0.7, max_tokens=9, stop_token_ids=(1,), seed=3), ""),
        (Sampling(temperature=0.01), ""),
        (Sampling(temperature=0), "temperature 0"),
        (Sampling(temperature=0.005), "temperature 0.005"),
        (Sampling(top_p=0.9), "top_p 0.9"),
    ],
)
def test_greedy_and_cut_sampling_cannot_be_priced(sampling: Sampling, reason: str) -> None:
    error = sampling_error(sampling)
    assert reason in error if error else not reason
