"""Measures a training step whose gradients are computed while groups are awaited against one that begins with its last
group.

    python -m bench.stream_gradients

Both kinds train the same policy on the same groups from a scratch broker, in turns, each in a process of its own with
one thread. The last group is written once the trainer holds the others and, if it streams, has computed them.

after_last  Seconds from the last group on the log to the version that was trained on it, visible on the log.
processor   Processor seconds of the trainer from its first group to the exported policy.
streamed    Share of the trained tokens whose gradient was computed before the last group.
weights     Largest difference between the two final policies.
`--json FILE` stores the result.
"""

import argparse
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event as ProcessEvent
from pathlib import Path
from queue import Queue
from statistics import median
from threading import Event
from typing import Any

import structlog
import torch
from safetensors.torch import load_file

from bench.broker import scratch_broker
from bench.check import Check, options, say, tell
from rose.schemas.arrays import pack_logprobs, pack_tokens
from rose.schemas.prompts import trajectory_id
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.samples import Sample
from rose.topics.admin import create_topics
from rose.topics.catalog import MANIFESTS, SAMPLES, Partitions
from rose.topics.reader import Reader
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.loop import Trainer
from rose.workers.trainer.metrics import TRAINER, read_step_log
from rose.workers.weights.config import WeightsConfig
from tests.support.sample_fixtures import turns_of
from tests.support.trainer_fixtures import make_policy

AFTER_LAST, PROCESSOR, STREAMED, WEIGHTS = 0.5, 1.1, 0.8, 1e-4
"""Bounds: of the first two relative to the step that begins with its last group."""

VOCABULARY, TOKENS, MEMBERS = 512, 192, 4
LOOK_SECONDS = 0.02
LONGEST_SECONDS = 600.0
KINDS = ("whole", "streamed")


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one step."""

    after_last: float
    processor: float
    streamed: float
    weights: torch.Tensor


def samples_of(groups: int) -> list[list[Sample]]:
    """Return groups of random samples with two rewards each."""
    draw = torch.Generator().manual_seed(1)
    mask = [0] + [1] * (TOKENS - 1)
    return [
        [
            Sample(
                trajectory_id=trajectory_id(f"g{number}", index),
                group_id=f"g{number}",
                group_size=MEMBERS,
                model_id="policy",
                environment="random",
                seed=number,
                tokens=pack_tokens(torch.randint(3, VOCABULARY, (TOKENS,), generator=draw).tolist()),
                loss_mask=bytes(mask),
                logprobs=pack_logprobs([-6.2 * one for one in mask]),
                spans=(VersionSpan(1, TOKENS, 0),),
                turns=turns_of(mask, None),
                reward=float(index % 2),
                success=None,
                completed_at=0.0,
            )
            for index in range(MEMBERS)
        ]
        for number in range(groups)
    ]


def write(settings: BusSettings, groups: list[list[Sample]]) -> None:
    """Write these groups to the log."""
    writer = Writer(settings, "bench")
    for sample in (sample for group in groups for sample in group):
        writer.write(SAMPLES, sample, key=sample.group_id, trajectory_id=sample.trajectory_id)
    writer.flush()


def train(settings: BusSettings, config: TrainerConfig, ready: ProcessEvent, held: int, results: Any) -> None:
    """Train one step in this process. `ready` is set when `held` samples are read and, if streamed, computed."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    torch.set_num_threads(1)
    computed = held * (TOKENS - 1) if config.stream_gradients else 0

    def look() -> None:
        figures = ("rose_trainer_held_samples", held), ("rose_trainer_early_tokens", computed)
        while any((TRAINER.get_sample_value(name) or 0) < least for name, least in figures):
            time.sleep(LOOK_SECONDS)  # a metric reports no change, so it is polled
        ready.set()

    trainer = Trainer(settings, config, WeightsConfig(), Event())
    threading.Thread(target=look, daemon=True).start()
    began = time.process_time()
    trainer.run()
    results.put(time.process_time() - began)


@contextmanager
def versions(settings: BusSettings) -> Iterator["Queue[float]"]:
    """Give the times at which manifests become visible on the log: `time.monotonic()`."""
    seen, stop = Queue[float](), Event()

    def read() -> None:
        reader = Reader(settings, "bench")
        reader.assign({(MANIFESTS, 0): 0})
        while not stop.is_set():
            for _ in reader.read(1, LOOK_SECONDS):
                seen.put(time.monotonic())
        reader.close()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def measure(settings: BusSettings, kind: str, policy: Path, run_folder: Path, groups: list[list[Sample]]) -> Measured:
    """Train one step of this kind."""
    create_topics(settings, Partitions(home=1, slots=1, samples=1, chunks=2))
    config = TrainerConfig(
        model_folder=policy,
        run_folder=run_folder,
        groups_per_step=len(groups),
        total_groups=len(groups),
        minibatches=1,
        microbatch_tokens=TOKENS * MEMBERS,
        max_logprob_difference=1e9,
        stream_gradients=kind == "streamed",
    )
    context = multiprocessing.get_context("spawn")
    ready, results = context.Event(), context.Queue()
    held = MEMBERS * (len(groups) - 1)
    process = context.Process(target=train, args=(settings, config, ready, held, results))
    with versions(settings) as seen:
        process.start()
        seen.get(timeout=LONGEST_SECONDS)  # version 0
        write(settings, groups[:-1])
        assert ready.wait(LONGEST_SECONDS)
        write(settings, groups[-1:])
        began = time.monotonic()
        after_last = seen.get(timeout=LONGEST_SECONDS) - began
    processor = results.get(timeout=LONGEST_SECONDS)
    process.join()
    [line] = read_step_log(run_folder)
    tensors = load_file(run_folder / "model" / "model.safetensors")
    weights = torch.cat([tensors[name].flatten() for name in sorted(tensors)])
    say(f"{kind}: {after_last:.2f} s after the last group, {processor:.2f} s of processor time")
    return Measured(after_last, processor, line["streamed_tokens"] / line["tokens"], weights)


def measure_all(arguments: argparse.Namespace) -> tuple[dict[str, list[Measured]], str]:
    """Return the measurements of each kind in the order of the rounds, and the name of the broker."""
    found: dict[str, list[Measured]] = {kind: [] for kind in KINDS}
    groups = samples_of(arguments.groups)
    with scratch_broker() as broker, tempfile.TemporaryDirectory(prefix="rose-bench-") as name:
        folder = Path(name)
        sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6}
        policy = make_policy(
            folder / "policy", vocabulary=VOCABULARY, max_position_embeddings=256, head_dim=32, **sizes
        )
        for number in range(arguments.rounds):
            for kind in KINDS:
                place = f"{kind}{number}"
                settings = broker.settings(f"{place}.")
                found[kind].append(measure(settings, kind, policy, folder / place, groups))
    return found, broker.name


def checks_of(found: dict[str, list[Measured]]) -> list[Check]:
    """Return the checks; ratios are medians over the rounds."""
    pairs = list(zip(found["streamed"], found["whole"], strict=True))
    seconds = {kind: [round(one.after_last, 3) for one in found[kind]] for kind in KINDS}
    processor = {kind: [round(one.processor, 2) for one in found[kind]] for kind in KINDS}
    against = "a step that begins with its last group"
    apart = max(float((mine.weights - other.weights).abs().max()) for mine, other in pairs)
    return [
        Check(
            "after_last",
            median(mine.after_last / other.after_last for mine, other in pairs),
            "of the seconds from the last group to the version on the log",
            AFTER_LAST,
            "max",
            against,
            seconds,
        ),
        Check(
            "processor",
            median(mine.processor / other.processor for mine, other in pairs),
            "of the processor time",
            PROCESSOR,
            "max",
            against,
            processor,
        ),
        Check("streamed", min(one.streamed for one in found["streamed"]), "of the tokens", STREAMED, "min", "none"),
        Check(
            "weights", apart, "largest difference of a weight", WEIGHTS, "max", against, {"difference": f"{apart:.1g}"}
        ),
    ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--groups", type=int, default=8, help="groups of the step")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each kind")
    arguments = parser.parse_args()
    found, broker = measure_all(arguments)
    tell(checks_of(found), broker=broker, file=arguments.json)


if __name__ == "__main__":
    main()
