"""Logprobs of tokens under a causal model, with memory that does not grow with the vocabulary times the context.

Keeps true
- A token's logprob is that of the distribution from which it was sampled: the logits divided by the temperature of the
  turn.
- Padding is on the right, attention is causal and angles do not follow the longest row of a pass, so a token's logprob
  does not depend on its batch.
- Logits exist for the wanted tokens only, and for at most MOST_LOGITS values at once: the backward pass computes them
  again. A model whose head cannot be applied apart computes the logits of all tokens at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MOST_LOGITS = 32 << 20
"""Most logits, tokens times vocabulary, that exist at once."""

PROBED = 8
"""Number of tokens of the pass that finds out how a model's head can be applied apart."""

LARGEST = 100.0
"""Largest logit by which the transform behind the head is found out: a soft cap shows."""


@dataclass(frozen=True, slots=True)
class Head:
    """The part of a model behind its hidden states."""

    logits: Callable[[Tensor], Tensor]
    """Maps hidden states of shape (..., hidden) to logits of shape (..., vocabulary)."""
    vocabulary: int


_heads: WeakKeyDictionary[Any, Head | None] = WeakKeyDictionary()
"""The head of each model that was asked for; None if the head cannot be applied apart."""


class LogprobModule(torch.nn.Module):
    """A causal model whose `forward` is `token_logprobs`: FSDP2 has the weights whole only inside `forward`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        head_of(model)  # needs the weights whole

    def forward(
        self,
        tokens: Tensor,
        temperatures: Tensor | None,
        wanted: Tensor | None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """See `token_logprobs`."""
        return token_logprobs(self.model, tokens, temperatures, wanted, lengths)


def token_logprobs(
    model: Any,
    tokens: Tensor,
    temperatures: Tensor | None = None,
    wanted: Tensor | None = None,
    lengths: Sequence[int] | None = None,
) -> Tensor:
    """Return the logprob of every wanted token given the tokens before it.

    0 for the first token of a row and for tokens that are not wanted.

    `model`: a `transformers.PreTrainedModel` or a LogprobModule. `tokens`, `temperatures`, `wanted` and the result have
    shape (rows, tokens); the result is float32, or float64 if the model is. `temperatures`: sampling temperature of
    each token, above 0; None: 1 for all tokens. `wanted`: bool; None: all tokens. `lengths`: the tokens of each row,
    for a model that computes packed passes (`packing`): the model computes no padding; None: a padded pass.
    """
    if isinstance(model, LogprobModule):
        result: Tensor = model(tokens, temperatures, wanted, lengths)
        return result
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    divisors = None if temperatures is None else temperatures[:, 1:, None]
    head = head_of(model)
    if head is None:
        picked = _picked(model(input_ids=inputs, use_cache=False).logits, targets, divisors)
        return torch.nn.functional.pad(picked if wanted is None else picked * wanted[:, 1:], (1, 0))
    places = torch.ones_like(targets, dtype=torch.bool) if wanted is None else wanted[:, 1:]
    if lengths is None:
        hidden = _hidden_states(model, inputs)[places]
    else:
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
        computed = [length - 1 for length in lengths]
        inside = positions < torch.tensor(computed, device=inputs.device)[:, None]
        places = places & inside
        packed = {"position_ids": positions[inside][None], "sequence_lengths": computed}
        hidden = _hidden_states(model, inputs[inside][None], **packed)[0, places[inside]]
    parts = _in_parts(head, hidden, targets[places], None if divisors is None else divisors[places])
    picked = torch.zeros(targets.shape, dtype=parts.dtype, device=inputs.device).masked_scatter(places, parts)
    return torch.nn.functional.pad(picked, (1, 0))


def _in_parts(head: Head, hidden: Tensor, targets: Tensor, divisors: Tensor | None) -> Tensor:
    """Logprobs of `targets`, shape (tokens,), from hidden states of shape (tokens, hidden)."""

    def logprobs(hidden: Tensor, targets: Tensor, divisors: Tensor | None) -> Tensor:
        return _picked(head.logits(hidden), targets, divisors)

    count = max(1, MOST_LOGITS // head.vocabulary)
    if len(hidden) <= count:
        return logprobs(hidden, targets, divisors)
    parts = [
        checkpoint(
            logprobs,
            hidden[at : at + count],
            targets[at : at + count],
            None if divisors is None else divisors[at : at + count],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for at in range(0, len(hidden), count)
    ]
    return torch.cat(parts)


def _picked(logits: Tensor, targets: Tensor, divisors: Tensor | None) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if divisors is not None:
        logits = logits / divisors
    return torch.log_softmax(logits, dim=-1).gather(-1, targets[..., None]).squeeze(-1)


def produces_nonfinite(
    model: Any, tokens: Tensor, temperatures: Tensor | None = None, lengths: Sequence[int] | None = None
) -> bool:
    """Whether logprobs of these tokens are not finite although all weights are finite; see `token_logprobs`.

    A weight that is not finite is reported by name when it is published.
    """
    with torch.no_grad():
        well = token_logprobs(model, tokens, temperatures, lengths=lengths).isfinite().all()
        return not well and all(bool(_local(parameter).isfinite().all()) for parameter in model.parameters())


def _local(tensor: Tensor) -> Tensor:
    """The part of the tensor that this process holds."""
    local: Tensor = getattr(tensor, "to_local", lambda: tensor)()
    return local


def padded_batches(lengths: Sequence[int], *, tokens: int) -> Iterator[list[int]]:
    """Return the indices of sequences in batches of like length.

    A batch has at most `tokens` tokens, padding included, or one sequence.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch and lengths[batch[0]] * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def pad_rows(rows: Sequence[Sequence[float]], *, dtype: torch.dtype, filling: float = 0) -> Tensor:
    """Rows of unequal length as one tensor, `filling` on the right."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[filling] * (width - len(row))] for row in rows], dtype=dtype)


def head_of(model: Any) -> Head | None:
    """Return what maps the model's hidden states to its logits; None if the head cannot be applied apart.

    The answer is tried on a short pass of the model when it is first asked for, and kept as long as the model.
    """
    if model not in _heads:
        _heads[model] = _tried_head(model)
    return _heads[model]


def _tried_head(model: Any) -> Head | None:
    output = model.get_output_embeddings()
    if output is None:
        return None
    device = next(model.parameters()).device
    tokens = torch.arange(min(PROBED, model.get_input_embeddings().num_embeddings), device=device)[None]
    with torch.no_grad():
        try:
            hidden = _hidden_states(model, tokens)
        except (HeadNotCalled, IndexError):  # a model may pick columns of its logits
            return None
        vocabulary = output(hidden).shape[-1]
        # The logits that the model makes of given ones show what it computes behind the head, whatever its weights are.
        given = torch.linspace(-LARGEST, LARGEST, hidden.shape[1] * vocabulary, device=device)
        given = given.reshape(1, -1, vocabulary).to(hidden.dtype)
        with _replaced(output, lambda _hidden: given):
            made = model(input_ids=tokens, use_cache=False).logits
        for transform in _transforms(model.config):
            found = transform(given)
            if found.shape == made.shape and torch.allclose(found.float(), made.float(), rtol=1e-5, atol=1e-6):
                return Head(partial(_head_logits, output, transform), vocabulary)
    return None


def _head_logits(output: Any, transform: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    logits: Tensor = output(hidden)
    return transform(logits)


def _transforms(config: Any) -> Iterator[Callable[[Tensor], Tensor]]:
    """The changes that models of transformers make to the logits behind the head: none, a factor, or a soft cap."""
    yield lambda logits: logits
    if factor := getattr(config, "logit_scale", None):  # Cohere
        yield lambda logits: logits * factor
    if divisor := getattr(config, "logits_scaling", None):  # Granite
        yield lambda logits: logits / divisor
    if multiplier := getattr(config, "lm_head_multiplier", None):  # Falcon-H1
        yield lambda logits: logits * multiplier
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        yield lambda logits: torch.tanh(logits / cap) * cap


class HeadNotCalled(Exception):
    """A model's forward pass does not call its output embedding as a module, once."""


def _hidden_states(model: Any, tokens: Tensor, **packed: Any) -> Tensor:
    """The hidden states that the model gives to its head, of shape (rows, tokens, hidden).

    `packed`: the further arguments of a packed pass. Raises HeadNotCalled.
    """
    captured: list[Tensor] = []

    def capture(hidden: Tensor) -> Tensor:
        captured.append(hidden)
        return hidden[..., :1]  # nobody uses these logits

    with _replaced(model.get_output_embeddings(), capture):
        model(input_ids=tokens, use_cache=False, **packed)
    if len(captured) != 1 or captured[0].shape[:2] != tokens.shape:
        raise HeadNotCalled
    return captured[0]


@contextmanager
def _replaced(output: Any, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Have the module compute something else meanwhile."""
    output.forward = forward
    try:
        yield
    finally:
        del output.forward
