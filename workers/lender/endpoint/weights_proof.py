"""Proof: whether an endpoint answers with the weights that it was told to load.

It is asked to go on from a context that nobody else has, as a turn is, and tells of each token that it drew the
likeliest ones with their logprobs. The same tokens after the same context are given to the model of the transformers
library, once with the weights that should answer and once with those before.

Keeps true
- An answer that leaves out a token that it was asked for, or one of its logprobs, proves nothing.
- What is off by more than the tolerance of the element type is not proven, wherever the endpoint got it from.
- Nor is what lies nearer to the weights before than to the new ones, however close the two are.

A probe proves what it can see: two versions between which fewer logprobs move than rounding moves are not told apart,
and the newer one is then refused about as often as not.
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
"""By what an endpoint computes in, the largest difference of two logprobs that counts as the same."""

CONTEXT_TOKENS = 32
ANSWER_TOKENS = 32
"""Of a probe: as long as a short turn."""

Logprobs = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """What an endpoint answered to a probe."""

    context: Sequence[int]
    tokens: Sequence[int]
    top_logprobs: Sequence[Mapping[int, float]]
    """Of each token of the answer: logprobs by token id, at its place."""

    @property
    def logprobs(self) -> Logprobs:
        return np.array([logprob for place in self.top_logprobs for logprob in place.values()])


def probe_context(vocabulary: int, seed: int) -> list[int]:
    """The same for the same seed."""
    return random.Random(seed).choices(range(vocabulary), k=CONTEXT_TOKENS)


def probe_error(probed: ProbeAnswer, vocabulary: int) -> str:
    """What a probe's answer lacks to be a proof; empty when it is whole."""
    tokens, likeliest = probed.tokens, probed.top_logprobs
    if len(tokens) != ANSWER_TOKENS or len(likeliest) != ANSWER_TOKENS:
        return f"a probe for {ANSWER_TOKENS} tokens is answered with {len(tokens)}, and logprobs of {len(likeliest)}"
    if not all(token in place for token, place in zip(tokens, likeliest, strict=True)):
        return "a probe is answered with tokens whose logprobs are not told"
    if not all(0 <= token < vocabulary for place in likeliest for token in place):
        return f"a probe is answered with tokens outside the vocabulary of {vocabulary}"
    return ""


def proof_error(given: Logprobs, new: Logprobs, before: Logprobs | None, tolerance: float) -> str:
    """Why the answers do not prove the new weights; empty when they do.

    `new`, `before`: what these weights give for the same tokens; `before` is None if it is not known what they were.
    """
    off = float(np.max(np.abs(given - new), initial=0.0))
    if not off <= tolerance:
        return f"logprobs of a probe are off by {off:.2g}, more than {tolerance:g}"
    if before is not None:
        moved = new - before
        if moved.any() and float((given - before) @ moved) < 0.5 * float(moved @ moved):
            return "a probe is answered as by the version before"
    return ""


class ReferenceModel:
    """The policy's model, to say what its answers should be. Computes on the host, in float32."""

    def __init__(self, folder: Path) -> None:
        """Imports the transformers library, which takes seconds. Raises UsageError for a model that it has not."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # of each version that is loaded
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            match_engine_numerics(config)
            with torch.random.fork_rng():
                self._kind: Any = type(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
        except (ValueError, KeyError, OSError) as error:
            raise UsageError(f"transformers makes no model of {folder}, so no version can be proven: {error}") from None
        self._config = config

    def logprobs(self, tensors: Mapping[str, Any], probed: ProbeAnswer) -> Logprobs:
        """What these weights, by Hugging Face name, give for what the endpoint told."""
        import torch

        from rose.workers.engine_layers import replace_unlike_layers

        # As from a folder: names there need not be the model's own.
        model = self._kind.from_pretrained(None, config=self._config, state_dict=dict(tensors), dtype=torch.float32)
        replace_unlike_layers(model)
        with torch.no_grad():
            ids = torch.tensor([[*probed.context, *probed.tokens]])
            logits = model.eval()(input_ids=ids).logits[0, len(probed.context) - 1 : -1]
            expected = torch.log_softmax(logits.double(), -1)
        return np.array(
            [expected[place, token] for place, tokens in enumerate(probed.top_logprobs) for token in tokens]
        )
