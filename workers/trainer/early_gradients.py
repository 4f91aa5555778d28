"""The gradient of a step's first minibatch, computed from its groups as they become complete.

Keeps true
- When groups arrive changes nothing: the same groups in the same order give the same gradient bit for bit, so a step
  that is repeated after a restart gives the same policy.
- Nothing is divided before the minibatch is whole: losses are summed, and `finish` divides the gradient by what the
  algorithm says of the whole minibatch. The result is the gradient of the whole minibatch, but for the rounding of
  sums.
- No weight changes, so groups that are never settled are only computed again.

Groups are computed in pieces: consecutive groups of the minibatch, until they have as many tokens as one pass of each
rank takes. Fewer tokens would make passes that are not full.

Example (2 minibatches, passes of 100 tokens, one rank; groups of 60 tokens)
    add g0, g1   -> nothing: g0 alone does not fill a pass, and g1 belongs to the second minibatch
    add g2       -> one piece: g0 and g2
    finish       -> the gradient, divided by the sampled tokens of g0 and g2
"""

from collections.abc import Sequence
from itertools import chain

import msgspec

from rose.workers.trainer.algorithms import TrainingSample
from rose.workers.trainer.passes import Passes, Row, Sums, rows_of


class EarlyGradients:
    """The first groups of one step. While it is in use, nothing else may change the gradients of the parameters."""

    def __init__(self, passes: Passes) -> None:
        """Discard the gradients of the parameters."""
        passes.model.zero_grad(set_to_none=True)
        self.groups: list[Sequence[TrainingSample]] = []
        """The groups that were added, in order."""
        self.advantages: list[list[float]] = []
        """Advantages of the samples of each group that have sampled tokens; empty for a group without advantages."""
        self._passes = passes
        self._rows: list[Row] = []
        """Rows of the first minibatch."""
        self._computed = 0
        """Number of `_rows` whose gradient is computed."""
        self._live = 0
        """Number of groups with advantages."""
        self._sums = Sums()

    @property
    def tokens(self) -> int:
        """Number of sampled tokens whose gradient is computed."""
        return self._sums.tokens

    def add(self, group: Sequence[TrainingSample]) -> None:
        """Add the step's next group. Every rank adds the same groups.

        Raises as `Passes.gradients`, and UsageError if the ranks' advantages differ; do not use the object afterwards.
        """
        passes = self._passes
        with passes.ranks.agreed():
            rows = rows_of([group], passes.algorithm)[0]
        advantages = [row.advantage for row in rows or ()]
        passes.ranks.require_alike(msgspec.msgpack.encode(advantages), "the algorithm's advantages")
        self.groups.append(group)
        self.advantages.append(advantages)
        if rows is None:
            return
        place, self._live = self._live, self._live + 1
        if place % passes.config.minibatches == 0:
            self._rows += rows
            if self._waiting_tokens >= passes.config.microbatch_tokens * passes.ranks.size:
                self._compute()

    def finish(self) -> Sums:
        """Compute what is left and divide the gradient by the algorithm's denominator. Raises as `add`.

        Returns the sums over the first minibatch.
        """
        if self._computed < len(self._rows):
            self._compute()
        divisor = self._passes.divisor(self._rows)
        for parameter in self._passes.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        self._sums.denominator = divisor
        return self._sums

    @property
    def _waiting_tokens(self) -> int:
        return sum(len(row.sample.tokens) for row in self._rows[self._computed :])

    def _compute(self) -> None:
        self._sums.add(self._passes.gradients(self._rows[self._computed :], divisor=1.0))
        self._computed = len(self._rows)


def begins_with(groups: Sequence[Sequence[TrainingSample]], first: Sequence[Sequence[TrainingSample]]) -> bool:
    """Whether the first of these groups have the very samples of `first`."""
    samples, expected = chain.from_iterable(groups[: len(first)]), chain.from_iterable(first)
    alike = [len(group) for group in groups[: len(first)]] == [len(group) for group in first]
    return alike and all(mine is other for mine, other in zip(samples, expected, strict=True))
