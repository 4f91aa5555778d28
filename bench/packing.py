"""Measures training steps with packed passes against padded passes: tokens computed, and processor time.

Keeps true
- Both kinds train copies of one policy on the same samples, in turns, in one process on one thread.
- Padded passes hold sequences of like length, as the trainer forms them.
"""

import copy
import random
import statistics
import time
from pathlib import Path

import torch

from bench.check import Check, options, say, tell
from rose.workers.trainer.algorithms import TrainingSample, make_algorithm
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.logprobs import padded_batches
from rose.workers.trainer.packing import pack_passes
from rose.workers.trainer.policy import load_policy
from rose.workers.trainer.step import train_step

FOLDER = Path(__file__).parents[1] / "workers" / "models" / "calculator"
MEMBERS = 8
ROUNDS = 3
LENGTHS = {"short": (16, 45, 0.4, 4096), "long-tailed": (8, 400, 0.9, 16_384)}
"""Groups, median tokens of a trajectory, deviation of their logarithm, and tokens of a pass."""
MOST_TOKENS = 4_000
"""Most tokens of a trajectory."""


def groups_of(count: int, median: float, deviation: float, generator: random.Random) -> list[list[TrainingSample]]:
    """Return groups of random samples whose lengths have a log-normal distribution; half of the tokens are sampled."""
    return [[_sample(median, deviation, generator) for _ in range(MEMBERS)] for _ in range(count)]


def _sample(median: float, deviation: float, generator: random.Random) -> TrainingSample:
    tokens = min(MOST_TOKENS, max(8, int(median * generator.lognormvariate(0.0, deviation))))
    return TrainingSample(
        tokens=[generator.randrange(10) for _ in range(tokens)],
        loss_mask=[int(place >= tokens // 2) for place in range(tokens)],
        behaviour_logprobs=[-1.0] * tokens,
        temperatures=[1.0] * tokens,
        reward=float(generator.random() < 0.5),
        oldest_version=0,
    )


def measure(name: str, seed: int) -> list[Check]:
    """Return the checks for one distribution of lengths."""
    count, median, deviation, tokens = LENGTHS[name]
    groups = groups_of(count, median, deviation, random.Random(seed))
    config = TrainerConfig(model_folder=FOLDER, run_folder=Path(), microbatch_tokens=tokens, minibatches=1)
    models = {"padded": load_policy(FOLDER)}
    models["packed"] = copy.deepcopy(models["padded"])
    assert pack_passes(models["packed"]) is None
    seconds: dict[str, list[float]] = {kind: [] for kind in models}
    for _ in range(ROUNDS):
        for kind, model in models.items():
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            began = time.process_time()
            train_step(model, optimizer, groups, algorithm=make_algorithm(config), config=config)
            seconds[kind].append(time.process_time() - began)
            say(f"{name}, {kind}: {seconds[kind][-1]:.2f} s of processor time")
    lengths = [len(sample.tokens) for group in groups for sample in group]
    batches = padded_batches(lengths, tokens=tokens)
    padded = sum(max(lengths[index] for index in batch) * len(batch) for batch in batches)
    ratio = statistics.median(
        packed / other for packed, other in zip(seconds["packed"], seconds["padded"], strict=True)
    )
    against = "padded passes of the same samples"
    return [
        Check(f"{name}_tokens", sum(lengths) / padded, "of the tokens", 1.0, "max", against),
        Check(f"{name}_time", ratio, "of the processor time", 1.0, "max", against, {"rounds": ROUNDS}),
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    checks = [check for name in LENGTHS for check in measure(name, arguments.seed)]
    tell(checks, broker="none", file=arguments.json)


if __name__ == "__main__":
    main()
