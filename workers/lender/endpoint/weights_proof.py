"""Weights proof: whether an endpoint answers with the weights that it was asked to load.

The endpoint completes a random context like a turn, and returns the likeliest tokens with their logprobs at each
position. A reference model of the transformers library computes logprobs of the same tokens after the same context,
with the new weights and with the weights before.

Keeps true
- An answer that lacks a token or a logprob proves nothing.
- Logprobs that differ by more than the tolerance of the element type do not prove a version.
- Logprobs that are closer to the weights before than to the new weights do not prove a version, however close the two
  versions are.

A probe only proves what it can measure: if two versions differ by less than rounding, the newer version is refused
about half of the time.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rose.schemas.errors import UsageError
from rose.workers.model_config import match_engine_numerics

TOLERANCES = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest difference between two logprobs that count as equal, by element type of the endpoint."""

CONTEXT_TOKENS = 32
ANSWER_TOKENS = 32
"""Tokens that a probe samples, as many as a short turn."""

Logprobs = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """An endpoint's answer to a probe."""

    context: Sequence[int]
    tokens: Sequence[int]
    top_logprobs: Sequence[Mapping[int, float]]
    """Logprobs by token id, for each position of the answer."""

    @property
    def logprobs(self) -> Logprobs:
        """All logprobs of the answer, position by position, as one flat array."""
        return np.array([logprob for place in self.top_logprobs for logprob in place.values()])


def probe_context(vocabulary: int, seed: int) -> list[int]:
    """Return random token ids below `vocabulary`, the same for the same seed."""
    return random.Random(seed).choices(range(vocabulary), k=CONTEXT_TOKENS)


def probe_error(probed: ProbeAnswer, vocabulary: int) -> str | None:
    """Return why a probe's answer is incomplete or invalid; None if it can prove a version."""
    tokens, likeliest = probed.tokens, probed.top_logprobs
    if len(tokens) != ANSWER_TOKENS or len(likeliest) != ANSWER_TOKENS:
        return f"a probe for {ANSWER_TOKENS} tokens is answered with {len(tokens)}, and logprobs of {len(likeliest)}"
    if not all(token in place for token, place in zip(tokens, likeliest, strict=True)):
        return "a probe is answered with tokens whose logprobs are not told"
    if not all(0 <= token < vocabulary for place in likeliest for token in place):
        return f"a probe is answered with tokens outside the vocabulary of {vocabulary}"
    return None


def proof_error(given: Logprobs, new: Logprobs, before: Logprobs | None, tolerance: float) -> str | None:
    """Return why the logprobs `given` do not prove the new weights; None if they do.

    `new`, `before`: the reference model's logprobs of the same tokens with the new weights and the weights before;
    `before` is None if those weights are not known.
    """
    off = float(np.max(np.abs(given - new), initial=0.0))
    if not off <= tolerance:
        return f"logprobs of a probe are off by {off:.2g}, more than {tolerance:g}"
    if before is not None:
        moved = new - before
        if moved.any() and float((given - before) @ moved) < 0.5 * float(moved @ moved):
            return "a probe is answered as by the version before"
    return None


class ReferenceModel:
    """The policy's model in transformers, which computes the expected logprobs on the host in float32."""

    def __init__(self, folder: Path) -> None:
        """Import transformers, which takes seconds. Raises UsageError if it has no such model."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # there would be one for each version that is loaded
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            match_engine_numerics(config)
            with torch.random.fork_rng():
                self._kind: Any = type(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
        except (ValueError, KeyError, OSError) as error:
            raise UsageError(f"transformers makes no model of {folder}, so no version can be proven: {error}") from None
        self._config = config

    def logprobs(self, tensors: Mapping[str, Any], probed: ProbeAnswer) -> Logprobs:
        """Return the logprobs of the probe's tokens with these weights, by Hugging Face name.

        The order is that of `ProbeAnswer.logprobs`.
        """
        import torch

        from rose.workers.engine_layers import replace_unlike_layers

        # `from_pretrained` maps names of files, which need not be the model's own names.
        model = self._kind.from_pretrained(None, config=self._config, state_dict=dict(tensors), dtype=torch.float32)
        replace_unlike_layers(model)
        with torch.no_grad():
            ids = torch.tensor([[*probed.context, *probed.tokens]])
            logits = model.eval()(input_ids=ids).logits[0, len(probed.context) - 1 : -1]
            expected = torch.log_softmax(logits.double(), -1)
        return np.array(
            [expected[place, token] for place, tokens in enumerate(probed.top_logprobs) for token in tokens]
        )
