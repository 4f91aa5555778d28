"""Losses: what each sampled token adds to the loss, from its logprobs and the advantage of its sample.

Notation: w is the probability ratio of the current policy to the policy that sampled the token, which may be some
versions older and runs in another engine; A is the advantage; sg stops the gradient.

Keeps true
- A token outside of the loss mask has a loss of 0 and no gradient, whatever its values.
- A token's loss depends on its own row only, so it does not depend on how rows are put into passes.

Example (A = 1, clip range 0.8 to 1.28, importance_cap 2)
    w      truncated          ppo                cispo
    1.2    gradient -1.2      gradient -1.2      gradient -1.2
    1.5    none               none               gradient -1.5
    50     none               none               gradient -2
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from rose.workers.trainer.algorithms import TokenBatch
from rose.workers.trainer.config import TrainerConfig

MOST_LOG_RATIO = 20.0
"""Ratios beyond e^20 are computed as e^20, without a gradient: a product with a larger one may overflow."""


class TokenLosses(NamedTuple):
    """The losses of the tokens of a batch; both of shape (rows, tokens)."""

    losses: Tensor
    """Loss of each token; 0 outside of the loss mask. Carries the gradient."""
    clipped: Tensor
    """Bool; True where a sampled token has no gradient because of a bound."""


Loss = Callable[[TokenBatch, TrainerConfig], TokenLosses]


def truncated(batch: TokenBatch, config: TrainerConfig) -> TokenLosses:
    """Return -min(w, importance_cap) A, without the tokens whose w has left the clip range in the direction of A.

    Truncated importance sampling, as TRL's `vllm_importance_sampling_cap`, with the token mask of PPO and the wider
    upper bound of DAPO (arXiv 2503.14476). The gradient is that of the logprobs, weighted.
    """
    log_ratio = _log_ratio(batch, batch.behaviour_logprobs)
    ratio = log_ratio.detach().exp()
    clipped = batch.loss_mask & _beyond(ratio, batch.advantages, config.clip_low, config.clip_high)
    pull = ratio.clamp(max=config.importance_cap) * torch.exp(log_ratio - log_ratio.detach()) * batch.advantages
    return TokenLosses(-torch.where(batch.loss_mask & ~clipped, pull, 0.0), clipped)


def ppo(batch: TokenBatch, config: TrainerConfig) -> TokenLosses:
    """Return -min(w A, clip(w, clip_low, clip_high) A).

    PPO (arXiv 1707.06347); with `clip_high` above 2 - `clip_low` it is DAPO's clip-higher (arXiv
    2503.14476).
    """
    ratio = _ratio(_log_ratio(batch, batch.behaviour_logprobs))
    return _clipped_surrogate(batch, ratio, config.clip_low, config.clip_high)


def dual_clip(batch: TokenBatch, config: TrainerConfig) -> TokenLosses:
    """Return PPO's loss, at most -dual_clip A where A is negative.

    Dual-clip PPO (arXiv 1912.09729): PPO alone does not bound the weight of a token that has become
    likely although its advantage is negative.
    """
    ratio = _ratio(_log_ratio(batch, batch.behaviour_logprobs))
    losses, clipped = _clipped_surrogate(batch, ratio, config.clip_low, config.clip_high)
    likely = batch.loss_mask & (batch.advantages < 0) & (ratio.detach() > config.dual_clip)
    return TokenLosses(torch.where(likely, -config.dual_clip * batch.advantages, losses), clipped | likely)


def cispo(batch: TokenBatch, config: TrainerConfig) -> TokenLosses:
    """Return -sg(min(w, importance_cap)) A logprob: every token keeps a gradient.

    CISPO (MiniMax-M1, arXiv 2506.13585), which has no lower bound either.
    """
    weight = _log_ratio(batch, batch.behaviour_logprobs).detach().exp().clamp(max=config.importance_cap)
    return TokenLosses(_weighted_logprobs(batch, weight), torch.zeros_like(batch.loss_mask))


def gspo(batch: TokenBatch, config: TrainerConfig) -> TokenLosses:
    """Return -min(s A, clip(s, gspo_clip_low, gspo_clip_high) A) for each token, s of its sequence.

    GSPO (arXiv 2507.18071): s is the geometric mean of w over the sampled tokens of the sequence,
    which is clipped whole. The paper's bounds are much closer to 1 than those of a token's ratio.
    """
    ratio = _ratio(_row_means(_log_ratio(batch, batch.behaviour_logprobs), batch.loss_mask))
    return _clipped_surrogate(batch, ratio.expand_as(batch.logprobs), config.gspo_clip_low, config.gspo_clip_high)


def sapo(batch: TokenBatch, config: TrainerConfig) -> TokenLosses:
    """Return -4 / t sigmoid(t (w - 1)) A, with the temperature t for positive or for other advantages.

    SAPO (arXiv 2511.20347): a soft gate instead of a clip range, with a slope of 1 at w = 1.
    """
    ratio = _ratio(_log_ratio(batch, batch.behaviour_logprobs))
    positive, other = config.sapo_temperature_positive, config.sapo_temperature_negative
    temperature = torch.full_like(batch.advantages, other).masked_fill(batch.advantages > 0, positive)
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return TokenLosses(-torch.where(batch.loss_mask, gate * batch.advantages, 0.0), torch.zeros_like(batch.loss_mask))


def dppo(batch: TokenBatch, config: TrainerConfig) -> TokenLosses:
    """Return -sg(min(w, importance_cap)) A logprob, without the tokens whose probability has moved too far with A.

    DPPO with the binary total variation (arXiv 2602.04879): a token is left out if its probability has
    grown by more than `dppo_threshold` and A is positive, or fallen by more and A is negative. Rare tokens, whose
    ratio is noisy, stay; likely tokens are bounded. The paper advises a large cap (20), if any.
    """
    log_ratio = _log_ratio(batch, batch.behaviour_logprobs).detach()
    behaviour = torch.where(batch.loss_mask, batch.behaviour_logprobs, 0.0)
    moved = batch.logprobs.detach().exp() - behaviour.exp()
    clipped = batch.loss_mask & _beyond(moved, batch.advantages, -config.dppo_threshold, config.dppo_threshold)
    losses = _weighted_logprobs(batch, log_ratio.exp().clamp(max=config.importance_cap))
    return TokenLosses(torch.where(clipped, 0.0, losses), clipped)


def decoupled(batch: TokenBatch, config: TrainerConfig) -> TokenLosses:
    """Return -min(v, importance_cap) min(u A, clip(u, clip_low, clip_high) A).

    Decoupled PPO (Hilton et al., arXiv 2110.00641; for stale samples AReaL, arXiv 2505.24298): u is the ratio of the
    current policy to the proximal one, which is that of the step's start, and v the ratio of the proximal policy to the
    one that sampled the token. Only moves within the step are clipped. The cap is not of the papers. With one minibatch
    u is 1.
    """
    assert batch.proximal_logprobs is not None
    proximal = torch.where(batch.loss_mask, batch.proximal_logprobs, 0.0)
    behaviour = torch.where(batch.loss_mask, batch.behaviour_logprobs, 0.0)
    losses, clipped = _clipped_surrogate(batch, _ratio(_log_ratio(batch, proximal)), config.clip_low, config.clip_high)
    return TokenLosses((proximal - behaviour).exp().clamp(max=config.importance_cap) * losses, clipped)


LOSSES: Mapping[str, Loss] = {
    "truncated": truncated,
    "ppo": ppo,
    "dual_clip": dual_clip,
    "cispo": cispo,
    "gspo": gspo,
    "sapo": sapo,
    "dppo": dppo,
    "decoupled": decoupled,
}
"""The losses by their name in the menu."""

PROXIMAL_LOSSES = frozenset({"decoupled"})
"""The losses that read `TokenBatch.proximal_logprobs`."""


def rejected(batch: TokenBatch, config: TrainerConfig) -> Tensor:
    """Return the sampled tokens that are left out by the ratio of the trainer to the engine; bool, (rows, tokens).

    The ratio is that of the proximal policy, if the batch has one, else of the current policy, to the policy that
    sampled the token. A token is left out if its ratio is outside of `reject_tokens_below` and `reject_tokens_above`
    (IcePop; "Every Step Evolves", arXiv 2510.18855), and a whole sequence if the geometric mean of its
    ratios is outside of the two bounds for sequences (masked importance sampling of sequences, as in TRL and verl).
    """
    current = batch.logprobs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs
    log_ratio = torch.where(batch.loss_mask, current - batch.behaviour_logprobs, 0.0)
    tokens = _outside(log_ratio.exp(), config.reject_tokens_below, config.reject_tokens_above)
    means = _row_means(log_ratio, batch.loss_mask).exp()
    sequences = _outside(means, config.reject_sequences_below, config.reject_sequences_above)
    return batch.loss_mask & (tokens | sequences)


def reference_divergence(batch: TokenBatch) -> Tensor:
    """Return an estimate of the KL divergence of the current policy from the reference, for each sampled token.

    exp(d) - d - 1, d being the reference's logprob minus the current one: GRPO's term (arXiv 2402.03300),
    called k3. 0 outside of the loss mask. Shape (rows, tokens).
    """
    assert batch.reference_logprobs is not None
    apart = -_log_ratio(batch, batch.reference_logprobs)
    return _ratio(apart) - apart - 1


def _log_ratio(batch: TokenBatch, other: Tensor) -> Tensor:
    """Return the current logprobs minus others; 0 outside of the loss mask, where the others may be NaN."""
    return torch.where(batch.loss_mask, batch.logprobs - torch.where(batch.loss_mask, other, 0.0), 0.0)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=MOST_LOG_RATIO).exp()


def _row_means(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each row's values in the mask, outside of which they are 0; of shape (rows, 1)."""
    means: Tensor = values.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return means


def _beyond(values: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return where values have left the range in the direction of the advantage."""
    return ((advantages > 0) & (values > high)) | ((advantages < 0) & (values < low))


def _clipped_surrogate(batch: TokenBatch, ratio: Tensor, low: float, high: float) -> TokenLosses:
    pull = torch.minimum(ratio * batch.advantages, ratio.clamp(low, high) * batch.advantages)
    clipped = batch.loss_mask & _beyond(ratio.detach(), batch.advantages, low, high)
    return TokenLosses(-torch.where(batch.loss_mask, pull, 0.0), clipped)


def _weighted_logprobs(batch: TokenBatch, weight: Tensor) -> Tensor:
    return -torch.where(batch.loss_mask, weight * batch.advantages * batch.logprobs, 0.0)


def _outside(ratio: Tensor, below: float | None, above: float | None) -> Tensor:
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    if below is not None:
        outside = outside | (ratio < below)
    return outside if above is None else outside | (ratio > above)
