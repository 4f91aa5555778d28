"""Samples that no step can compute, or whose loss is undefined. Pure."""

import numpy as np
from numpy.typing import NDArray

from rose.schemas.arrays import logprob_error, unpack_logprobs, unpack_tokens
from rose.schemas.errors import RecordError
from rose.schemas.prompts import sampling_error
from rose.schemas.samples import Sample


def sample_error(sample: Sample, *, vocabulary: int, context_tokens: int) -> str | None:
    """Why a sample cannot be trained on whatever its age: an infrastructure failure. None if it can be.

    `vocabulary`: token ids are below it. `context_tokens`: most tokens of a sample that the model takes.
    """
    if sample.failure:
        return sample.failure
    if sample.reward is None:
        return "it has no reward"
    try:
        tokens, logprobs = np.asarray(unpack_tokens(sample.tokens)), unpack_logprobs(sample.logprobs)
    except RecordError as error:
        return str(error)
    mask = np.frombuffer(sample.loss_mask, dtype=np.uint8)
    if not len(tokens) == len(mask) == len(logprobs):
        return f"{len(tokens)} tokens, a mask of {len(mask)} and {len(logprobs)} logprobs do not fit"
    if len(tokens) > context_tokens:
        return f"its {len(tokens)} tokens are more than the {context_tokens} that the model takes"
    if tokens.max(initial=0) >= vocabulary:
        return f"token {tokens.max()} is outside of the vocabulary of {vocabulary}"
    if mask.max(initial=0) > 1:
        return "the loss mask holds more than 0 and 1"
    return logprob_error(logprobs[mask == 1]) or _turns_error(sample, mask)


def _turns_error(sample: Sample, mask: NDArray[np.uint8]) -> str | None:
    if mask[:1].any():
        return "its first token is a sampled one, and nothing says of what"
    covered = np.zeros_like(mask)
    for turn in sample.turns:
        if not turn.start <= turn.end <= len(mask) or covered[turn.start : turn.end].any():
            return f"turn {turn.turn} lies outside of its tokens or on another turn"
        covered[turn.start : turn.end] = 1
    if not (covered == mask).all():
        return "its turns are not the tokens that were sampled"
    known = np.zeros_like(mask)
    for span in sample.spans:
        known[span.start : span.end] = 1
    unknown = np.flatnonzero(mask > known)
    return f"nothing says under which version token {unknown[0]} was sampled" if len(unknown) else None


def untrainable_request(sample: Sample) -> str | None:
    """Why a sample without a failure cannot be trained on because of its request. None if it can be."""
    if not any(sample.loss_mask):
        return "no token of it was sampled"
    return next((reason for turn in sample.turns if (reason := sampling_error(turn.sampling))), None)
