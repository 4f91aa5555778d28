"""The built-in algorithms: one advantage, one loss and one aggregation of the menu, with shaping and rejection.

Keeps true
- Every name in `menu.PRESETS` is this class with the three parts of that name.
- Rewards are shaped after the selection of samples: a group whose own rewards are equal is not trained on because its
  samples differ in length.
- A rejected token has no loss and no gradient, and still counts in the mean.
- The aggregation weights tokens and gives the denominator, so a minibatch has one mean however it is put into passes.
"""

from collections.abc import Sequence

import torch

from rose.workers.trainer.algorithms import StepAlgorithm, TokenBatch, TokenLoss, TrainingSample
from rose.workers.trainer.algorithms.advantages import STEP_ADVANTAGES, RewardedGroup, group_advantage
from rose.workers.trainer.algorithms.losses import LOSSES, PROXIMAL_LOSSES, reference_divergence, rejected
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.menu import STANDARD


class Combined(StepAlgorithm):
    """The parts that the settings choose.

    A class of yours may derive from this one, which then has the parts of `grpo`, and replace a method.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._parts = config.parts or STANDARD
        self._loss = LOSSES[self._parts.loss]
        self.needs_proximal = self._parts.loss in PROXIMAL_LOSSES
        self.needs_reference = config.kl_coefficient > 0

    def advantages(self, group: Sequence[TrainingSample]) -> Sequence[float]:
        """Return the chosen advantages of one group's shaped rewards; see `algorithms.advantages`."""
        rewards = self._rewards(group)
        if within := group_advantage(self._parts.advantages, self._config):
            return within(rewards)
        return self._over_the_step([group])[0]

    def step_advantages(self, groups: Sequence[Sequence[TrainingSample]]) -> Sequence[Sequence[float]]:
        """Return the chosen advantages of all groups of a step."""
        if self._parts.advantages in STEP_ADVANTAGES:
            return self._over_the_step(groups)
        return [self.advantages(group) for group in groups]

    def loss(self, batch: TokenBatch) -> TokenLoss:
        """Return the chosen loss, aggregated as chosen, of the tokens that are not rejected; see `algorithms.losses`.

        With `kl_coefficient`, the divergence from the reference policy is added to these tokens' losses.
        """
        losses, clipped = self._loss(batch, self._config)
        if self.needs_reference:
            losses = losses + self._config.kl_coefficient * reference_divergence(batch)
        left_out = rejected(batch, self._config) if self._config.rejects else None
        if left_out is not None:
            losses, clipped = torch.where(left_out, 0.0, losses), clipped | left_out
        if self._parts.aggregation == "sequence":
            losses = losses / batch.loss_mask.sum(-1, keepdim=True).clamp(min=1)
        return TokenLoss(losses.sum(), clipped, left_out)

    def denominator(self, *, tokens: int, sequences: int) -> float:
        """Return what the sum of a minibatch's losses is divided by.

        `token` (DAPO, arXiv 2503.14476): a mean over tokens, so long sequences have more weight.
        `sequence` (GRPO, arXiv 2402.03300): a mean over sequences of each one's mean. `constant` (Dr. GRPO,
        arXiv 2503.20783): the sum over tokens by sequences times `aggregation_tokens`, so a token's
        weight depends neither on its sequence's length nor on those of others.
        """
        match self._parts.aggregation:
            case "sequence":
                return sequences
            case "constant":
                return sequences * self._config.aggregation_tokens
            case _:
                return tokens

    def _over_the_step(self, groups: Sequence[Sequence[TrainingSample]]) -> list[list[float]]:
        rewarded = [
            RewardedGroup(self._rewards(group), [sum(sample.loss_mask) for sample in group]) for group in groups
        ]
        return STEP_ADVANTAGES[self._parts.advantages](rewarded)

    def _rewards(self, group: Sequence[TrainingSample]) -> list[float]:
        return [sample.reward - overlong_penalty(sample, self._config) for sample in group]


def overlong_penalty(sample: TrainingSample, config: TrainerConfig) -> float:
    """Return what is taken from the reward of a sample that is too long.

    DAPO's soft overlong punishment (arXiv 2503.14476): `overlong_penalty` for a truncated
    sample and for one with more than `overlong_tokens` sampled tokens, and less in a straight line over the
    `overlong_buffer_tokens` before that.
    """
    if not config.overlong_penalty:
        return 0.0
    if sample.truncated:
        return config.overlong_penalty
    if not config.overlong_tokens:
        return 0.0
    beyond = sum(sample.loss_mask) - (config.overlong_tokens - config.overlong_buffer_tokens)
    if beyond > config.overlong_buffer_tokens:
        return config.overlong_penalty
    return config.overlong_penalty * max(beyond, 0) / max(config.overlong_buffer_tokens, 1)
