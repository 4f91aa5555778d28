"""Passes without padding: the sequences of a pass are packed into one row, one behind the other.

Keeps true
- A token's position is counted from the beginning of its own sequence, and the token attends to that sequence only.
- Attention is transformers' `sdpa`, called once for each sequence without a mask, so its work and memory grow with the
  squares of the sequences' lengths, and not with the square of the pass.
- A model computes packed passes only if its layers have full attention, its masks are causal and nothing else, and a
  trial gives the logprobs of a padded pass. Other models, such as those with sliding windows, sparse attention or
  recurrent layers, compute padded passes.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rose.workers.trainer.logprobs import PROBED, LogprobModule, head_of, token_logprobs

IMPLEMENTATION = "rose_packed"
"""The name under which transformers knows the attention of packed passes."""

PADDED = "sdpa"
"""The attention of a padded pass, which a packed pass computes for each sequence."""

MOST_PADDED = 16
"""Most padded tokens of a packed pass, over the tokens of a pass: an algorithm sees padded rows of logprobs."""

TOLERANCE = 1e-4
"""Largest difference, in nats, between the logprobs of a packed and a padded pass in float32."""


class NotPackable(Exception):
    """A model's attention is not that of one causal sequence."""


def pack_passes(model: Any) -> str | None:
    """Have a model compute packed passes. Return why the model cannot; None if it does.

    `model`: a `transformers.PreTrainedModel` in float32 and evaluation mode, with whole weights.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    if is_packed(model):
        return None
    before = model.config._attn_implementation
    if before != PADDED:
        return f"its attention is {before}"
    others = {*(getattr(model.config.get_text_config(), "layer_types", None) or ())} - {"full_attention"}
    if others:  # the trial is too short for some, and the weights of others may be zero now
        return f"it has layers of the type {min(others)}"
    if head_of(model) is None:
        return "its head cannot be applied apart"
    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, causal_mask)
    try:
        reason = _trial(model)
    except Exception as error:  # noqa: BLE001  models raise any type for arguments that they do not know
        reason = str(error) or type(error).__name__
    if reason is not None:
        pad_passes(model)
    return reason


def pad_passes(model: Any) -> None:
    """Have a model that `pack_passes` was called with compute padded passes."""
    if is_packed(model):
        model.set_attn_implementation(PADDED)


def _trial(model: Any) -> str | None:
    """Compute two sequences in a padded and in a packed pass. Return why the packed pass is wrong; None if it is not.

    Whether a sequence depends on the other shows in its gradient, which is zero only without a path between the two;
    logprobs may hide a dependence while weights are small.
    """
    size = min(PROBED, model.get_input_embeddings().num_embeddings)
    tokens, lengths = torch.arange(size).repeat(2, 1), (size - 1, size)
    wanted = torch.arange(size) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        padded = token_logprobs(model, tokens, wanted=wanted)
    embedded: list[Tensor] = []

    def keep(_module: Any, _input: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    hook = model.get_input_embeddings().register_forward_hook(keep)
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        with torch.enable_grad():
            packed = token_logprobs(model, tokens, wanted=wanted, lengths=lengths)
            (slope,) = torch.autograd.grad(packed[1].sum(), embedded[0])
    finally:
        hook.remove()
    if slope[0, : lengths[0] - 1].any():
        return "its tokens depend on other sequences of a packed pass"
    if not torch.allclose(packed, padded, rtol=0.0, atol=TOLERANCE):
        return "its logprobs differ in a packed pass"
    return None


def is_packed(model: Any) -> bool:
    """Whether the model computes packed passes. `model`: a `transformers.PreTrainedModel` or a LogprobModule."""
    own = model.model if isinstance(model, LogprobModule) else model
    return bool(own.config._attn_implementation == IMPLEMENTATION)


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_lengths: Sequence[int] | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of each sequence of a packed pass; transformers calls this for each layer.

    `query`, `key` and `value` have shape (rows, heads, tokens, head size). `sequence_lengths`: the tokens of each
    sequence of the only row; None for rows that are one sequence each. The result has shape (rows, tokens, heads, head
    size). Raises NotPackable.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is not None or position_bias is not None:
        raise NotPackable("it has masks or biases of its own")
    lengths = [query.shape[2]] if sequence_lengths is None else list(sequence_lengths)
    parts = zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([sdpa_attention_forward(module, *part, None, **kwargs)[0] for part in parts], dim=1), None


def causal_mask(
    *,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: Any,
) -> None:
    """Return no mask for layers of causal attention; transformers calls this for each kind of layer.

    `local_size`: the window of a layer. `use_vmap`: whether the model changes the causal mask. Raises NotPackable for a
    mask that is not causal alone.
    """
    if attention_mask is not None or local_size is not None or use_vmap:
        raise NotPackable("it has masks that are not causal alone")


def packed_batches(lengths: Sequence[int], *, tokens: int) -> Iterator[list[int]]:
    """Return the indices of sequences in batches of at most `tokens` tokens (or one sequence), the longest first.

    A sequence joins the fullest batch that has room for it.
    """
    batches: list[list[int]] = []
    room: list[tuple[int, int]] = []
    """Free tokens of the batches that may grow, with the batch's place; in ascending order."""
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        found = bisect_left(room, (lengths[index], -1))
        left, place = room.pop(found) if found < len(room) else (tokens, len(batches))
        if place == len(batches):
            batches.append([])
        batch = batches[place]
        batch.append(index)
        if left > lengths[index] and lengths[batch[0]] * (len(batch) + 1) <= MOST_PADDED * tokens:
            insort(room, (left - lengths[index], place))
    return iter(batches)
