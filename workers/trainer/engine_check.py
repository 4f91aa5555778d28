"""Compares engines with the trainer: the logprobs that engines recorded with those that the trainer computes.

Keeps true
- Only samples are compared of which every token was sampled with the policy's own weights, so a difference is none of
  staleness.
- An engine is judged alone only by enough of its own tokens.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import Any

import msgspec
import torch

from rose.schemas.errors import UsageError
from rose.topics.health import HEALTH
from rose.workers.trainer.algorithms import TrainingSample
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.logprobs import pad_rows
from rose.workers.trainer.passes import mask_of, pass_logprobs, passes_of
from rose.workers.trainer.ranks import ALONE, Ranks

LEAST_COMPARED_TOKENS, LEAST_OF_WORKER, MOST_OF_WORKER = 16, 64, 256
"""Least on-policy tokens to judge all engines together, least to judge one engine, and enough to judge one engine."""


class EngineMismatch(UsageError):
    """An engine computes another policy than the trainer."""


def check_engines(
    model: Any,
    samples: Sequence[TrainingSample],
    config: TrainerConfig,
    version: int,
    *,
    since: int | None = None,
    ranks: Ranks = ALONE,
) -> float | None:
    """Compare the model's logprobs with those that each worker's engine recorded. `version`: the model's version.

    `since`: the first version with the weights of `version`, as steps without a gradient change none; None: `version`.
    Workers with fewer than LEAST_OF_WORKER tokens are judged only together with the others.

    Returns the KL divergence of the engines' policy from the model's, in nats per compared token (`mismatch`).

    Raises EngineMismatch if the mean absolute difference of a worker, or of all, is more than `max_logprob_difference`.
    """
    chosen = [samples[place] for place in places_to_compare(samples, version if since is None else since)]
    found = {name: values for name, values in _differences(model, chosen, config, ranks).items() if values}
    everything = [value for values in found.values() for value in values]
    apart = {name: fmean(map(abs, values)) for name, values in found.items()}
    judged = {name: apart[name] for name, values in found.items() if len(values) >= LEAST_OF_WORKER}
    most = config.max_logprob_difference
    whole = fmean(map(abs, everything)) if len(everything) >= LEAST_COMPARED_TOKENS else 0.0
    worst = max(judged, key=lambda name: judged[name], default="")
    if judged and judged[worst] > most and any(apart[name] <= most for name in found if name != worst):
        subject, difference, tokens = f"the engine of worker {worst} computes", judged[worst], len(found[worst])
        fix = "begin again in another --namespace without that worker"
    elif max(whole, judged.get(worst, 0.0)) > most:
        subject, difference, tokens = "the engines compute", whole, len(everything)
        fix = (
            "look whether executors have the trainer's config.json, and leave executor.vllm empty; if the folder is "
            "the cause, take one that vLLM and transformers compute alike"
        )
    else:
        return mismatch(everything)
    raise EngineMismatch(
        f"{subject} another policy than the trainer: the logprobs of {tokens} tokens that version {version} sampled "
        f"differ by {difference:.2g} nats on average, and trainer.max_logprob_difference is {most:g}; nothing was "
        f"learned from these samples: {fix}. Raise the setting only for engines that compute in low precision"
    )


def mismatch(differences: Sequence[float]) -> float | None:
    """Return the mean of exp(d) - 1 - d over the differences d of logprobs, trainer minus engine; None for none.

    An estimate of the KL divergence of the sampling policy from the trainer's that is never negative (Schulman,
    "Approximating KL Divergence", 2020, called k3).
    """
    return fmean(math.expm1(one) - one for one in differences) if differences else None


def places_to_compare(samples: Sequence[TrainingSample], since: int) -> list[int]:
    """Return the places of the samples by which engines are checked.

    No version before `since` has sampled a token of them. They have about MOST_OF_WORKER tokens of each worker, from
    its longest samples: a difference far into a context does not show in short samples. A second choice among the
    chosen samples is the same.
    """
    chosen: list[int] = []
    enough: Counter[str] = Counter()
    for place in sorted(range(len(samples)), key=lambda place: -len(samples[place].tokens)):
        sample = samples[place]
        own = Counter(sample.sampled_by) if sample.oldest_version >= since else Counter[str]()
        if any(enough[name] < MOST_OF_WORKER for name in own):
            chosen.append(place)
            enough += own
    return chosen


def _differences(
    model: Any, chosen: Sequence[TrainingSample], config: TrainerConfig, ranks: Ranks
) -> dict[str, list[float]]:
    """Return the finite differences of the logprobs of sampled tokens, trainer minus engine, in nats, by worker."""
    found: dict[str, list[float]] = {}
    for indices in passes_of(model, chosen, config, ranks):
        part = [chosen[index] for index in indices]
        mask = mask_of(part)
        with torch.no_grad():
            logprobs = pass_logprobs(model, part, mask, ranks.device).cpu()
        behaviour = pad_rows([sample.behaviour_logprobs for sample in part] or [[0, 0]], dtype=torch.float32)
        values = (logprobs - behaviour)[mask].tolist()
        for name, value in zip(chain.from_iterable(sample.sampled_by for sample in part), values, strict=True):
            found.setdefault(name, []).extend([value] * math.isfinite(value))
        HEALTH.report_progress()
    together: dict[str, list[float]] = {}
    for data in ranks.gather(msgspec.msgpack.encode(found)):
        for name, values in msgspec.msgpack.decode(data, type=dict[str, list[float]]).items():
            together.setdefault(name, []).extend(values)
    return together
