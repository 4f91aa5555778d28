"""Algorithms by name: the built-in ones, and a user's own as `package.module:Class`.

Keeps true: whatever is wrong with a name or a class is one UnknownAlgorithm or AlgorithmError, raised before the
trainer reads or fences anything.
"""

import torch

from rose.schemas.errors import RoseError, UsageError, describe_error
from rose.workers.import_path import Registry, binding_error, class_error
from rose.workers.trainer.algorithms.base import Algorithm, AlgorithmError, TokenBatch, checked_advantages, checked_loss
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.training_sample import TrainingSample

BUILT_IN = {
    "grpo": "rose.workers.trainer.algorithms.grpo:Grpo",
    "rloo": "rose.workers.trainer.algorithms.rloo:Rloo",
}
"""Name to `module:class`."""

METHODS = ("advantages", "loss")


class UnknownAlgorithm(UsageError):
    """A name that leads to no algorithm."""


ALGORITHMS = Registry(kind="algorithm", built_in=BUILT_IN, error=UnknownAlgorithm)


def make_algorithm(config: TrainerConfig) -> Algorithm:
    """Make the algorithm that `config.algorithm` names and try it on one group of two short samples.

    Raises UnknownAlgorithm, or AlgorithmError for results that a step cannot use.
    """
    name = config.algorithm
    factory = ALGORITHMS.load(name, _factory_error)
    try:
        algorithm: Algorithm = factory(config)
        if wrong := _method_error(algorithm):
            raise UnknownAlgorithm(f"algorithm {name!r}: {type(algorithm).__name__} {wrong}")
        _try(algorithm)
    except RoseError:
        raise
    except (Exception, SystemExit) as error:  # a user's class may raise anything
        raise UnknownAlgorithm(f"algorithm {name!r} does not compute: {describe_error(error)}") from error
    return algorithm


def _factory_error(factory: object) -> str | None:
    """Why nothing like this makes an algorithm; None if it may."""
    unbound = "cannot be made with the trainer's settings as its one argument ({error})"
    return class_error(factory, methods=METHODS, arguments=1, unbound=unbound)


def _method_error(algorithm: object) -> str | None:
    """Why this object cannot be called as an algorithm; None if it can."""
    for name in METHODS:
        method = getattr(algorithm, name, None)
        if not callable(method):
            return f"lacks {name}"
        if error := binding_error(method, 1):
            return f"has a method {name} that does not take one argument ({error})"
    return None


def _try(algorithm: Algorithm) -> None:
    samples = [
        TrainingSample(
            tokens=[0, 0, 0],
            loss_mask=[0, 1, 1],
            behaviour_logprobs=[0.0, -1.0, -1.0],
            temperatures=[1.0] * 3,
            reward=reward,
        )
        for reward in (0.0, 1.0)
    ]
    advantages = checked_advantages(algorithm, samples)
    logprobs = torch.full((2, 3), -1.0)
    batch = TokenBatch(
        logprobs=logprobs.clone().requires_grad_(),
        behaviour_logprobs=logprobs,
        advantages=torch.tensor(advantages)[:, None],
        loss_mask=torch.tensor([sample.loss_mask for sample in samples], dtype=torch.bool),
    )
    (slopes,) = torch.autograd.grad(checked_loss(algorithm, batch).summed, batch.logprobs, allow_unused=True)
    if any(advantages) and (slopes is None or not slopes[batch.loss_mask].any()):
        raise AlgorithmError(
            f"{type(algorithm).__name__}.loss has no gradient for sampled tokens with advantages of "
            f"{' and '.join(map(str, advantages))}, so nothing would be learned: compute `summed` from `batch.logprobs`"
        )
