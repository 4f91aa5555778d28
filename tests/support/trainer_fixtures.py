"""A tiny policy, a fixed set of samples, and a trainer of both, in this process or in a process to be killed."""

import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch

from rose.schemas.arrays import pack_logprobs, pack_tokens
from rose.schemas.prompts import Prompt, Sampling, trajectory_id
from rose.schemas.sampled_tokens import VersionSpan
from rose.schemas.samples import Outcome, Sample, SampleOutcome
from rose.schemas.weights import WeightManifest
from rose.topics.admin import create_topics
from rose.topics.catalog import MANIFESTS, OUTCOMES, PROMPTS, SAMPLES, Partitions
from rose.topics.log_reader import read_whole_topics
from rose.topics.settings import BusSettings
from rose.topics.writer import Writer
from rose.workers.trainer.checkpoint import Checkpoints, Identity, Progress
from rose.workers.trainer.config import TrainerConfig
from rose.workers.trainer.groups import CompleteGroup
from rose.workers.trainer.learner import Learner
from rose.workers.trainer.loop import Trainer
from rose.workers.trainer.main import run_trainer
from rose.workers.weights.config import WeightsConfig
from tests.support.brokers import AnyBroker
from tests.support.sample_fixtures import turns_of

VOCABULARY = 40
GROUPS, GROUP_SIZE = 10, 4
GROUPS_PER_STEP = 3
STEPS = 4  # three steps of three groups and one of the last
FILTERED_GROUP, FAILED_GROUP = 2, 5
PRELOADED = [
    "rose.workers.trainer.loop",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    __name__,
]
"""Imports of a trainer, made before the fork of a process to be killed."""
POINTS = ("before_checkpoint", "after_checkpoint", "in_transaction", "after_transaction")


def make_policy(folder: Path, *, vocabulary: int = VOCABULARY, seed: int = 11, **sizes: int) -> Path:
    """Save a random Qwen3 of some thousand parameters as a model folder. `sizes`: other sizes, by the names of its
    configuration."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    fields = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    ends = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    config = Qwen3Config(vocab_size=vocabulary, tie_word_embeddings=True, **ends, **(fields | sizes))
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "turn_format.json").write_text("{}")
    return folder


def group_name(number: int) -> str:
    return f"g{number:02d}"


def make_samples(
    seed: int = 5, *, groups: Iterable[int] = range(GROUPS), sampling: Sampling | None = None
) -> list[Sample]:
    """Return complete groups in a shuffled order, one with equal rewards and one with a failed member."""
    source = random.Random(seed)
    samples = [_sample(source, number, index, sampling) for number in groups for index in range(GROUP_SIZE)]
    source.shuffle(samples)
    return samples


def _sample(source: random.Random, number: int, index: int, sampling: Sampling | None) -> Sample:
    length = source.randint(6, 20)
    mask = [0, 0, *(source.randint(0, 1) for _ in range(length - 3)), 1]
    failed = number == FAILED_GROUP and index == 0
    reward = 1.0 if number == FILTERED_GROUP else float(index % 2)
    return Sample(
        trajectory_id=trajectory_id(group_name(number), index),
        group_id=group_name(number),
        group_size=GROUP_SIZE,
        model_id="policy",
        environment="calculator",
        seed=number,
        tokens=pack_tokens([source.randrange(VOCABULARY) for _ in range(length)]),
        loss_mask=bytes(mask),
        logprobs=pack_logprobs([on * source.uniform(-4.0, -3.5) for on in mask]),
        spans=(VersionSpan(2, length, 0),),
        turns=turns_of(mask, sampling),
        reward=None if failed else reward,
        success=reward == 1.0 and not failed,
        failure="the environment broke" if failed else "",
        completed_at=0.0,
    )


def write_samples(settings: BusSettings, samples: Iterable[Sample]) -> None:
    writer = Writer(settings, "test")
    for sample in samples:
        writer.write(SAMPLES, sample, key=sample.group_id, trajectory_id=sample.trajectory_id)
    writer.flush()


def write_prompts(settings: BusSettings, groups: Iterable[int] = range(GROUPS)) -> None:
    writer = Writer(settings, "test")
    for number in groups:
        prompt = Prompt(group_id=group_name(number), group_size=GROUP_SIZE, environment="calculator", seed=number)
        writer.write(PROMPTS, prompt, key=prompt.group_id)
    writer.flush()


def config_of(model_folder: Path, run_folder: Path, **change: Any) -> TrainerConfig:
    """Return a configuration with another learning rate in every step, so that a resumed run shows a resumed
    schedule."""
    fields: dict[str, Any] = {"groups_per_step": GROUPS_PER_STEP, "total_groups": GROUPS, "max_staleness": 100}
    fields |= {"max_logprob_difference": 1e9}  # the logprobs of these samples come from no engine
    fields |= {"learning_rate_warmup_steps": 1, "learning_rate_schedule": "cosine", "learning_rate_decay_steps": 8}
    return TrainerConfig(model_folder=model_folder, run_folder=run_folder, learning_rate=1e-3, **(fields | change))


def trainer_of(settings: BusSettings, model_folder: Path, run_folder: Path, **change: Any) -> Trainer:
    """Return a trainer that is not started."""
    return Trainer(settings, config_of(model_folder, run_folder, **change), WeightsConfig(), Event())


@dataclass(frozen=True)
class Result:
    """The log after a run."""

    digests: dict[int, bytes]
    """Digests of the manifests by version."""
    outcomes: list[tuple[str, Outcome, int]]
    """Trajectory, outcome and step, in the order of the log."""

    @property
    def counts(self) -> Counter[Outcome]:
        return Counter(outcome for _, outcome, _ in self.outcomes)


def result_of(settings: BusSettings) -> Result:
    records = [envelope.record for envelope in read_whole_topics(settings, [MANIFESTS, OUTCOMES])]
    manifests = [record for record in records if isinstance(record, WeightManifest)]
    digests = {manifest.version: manifest.digest for manifest in manifests}
    assert all(digests[one.version] == one.digest for one in manifests), "a version number stands for two policies"
    return Result(
        digests,
        [(r.trajectory_id, r.outcome, r.step) for r in records if isinstance(r, SampleOutcome)],
    )


def train_in_a_process_that_is_killed(
    settings: BusSettings, model_folder: Path, run_folder: Path, *, point: str, version: int
) -> int | None:
    """Return the exit status of a trainer that is killed by SIGKILL at this point of this version."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_train_armed, args=(settings, model_folder, run_folder, point, version))
    process.start()
    process.join(600)
    return process.exitcode


def _train_armed(settings: BusSettings, model_folder: Path, run_folder: Path, point: str, version: int) -> None:
    _arm(point, version)
    run_trainer(settings, config_of(model_folder, run_folder), Event())


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(point: str, version: int) -> None:
    """Make this process die when the trainer reaches the point."""
    from rose.workers.trainer.checkpoint import Checkpoints, Progress

    current: list[Trainer] = []
    begin: Callable[..., None] = Trainer.__init__
    save: Callable[..., None] = Checkpoints.save
    commit: Callable[..., None] = Writer.commit

    def armed_begin(self: Trainer, *arguments: Any) -> None:
        begin(self, *arguments)
        current.append(self)

    def armed_save(self: Checkpoints, progress: Progress, *arguments: Any) -> None:
        if (point, version) == ("before_checkpoint", progress.version):
            _die()
        save(self, progress, *arguments)
        if (point, version) == ("after_checkpoint", progress.version):
            _die()

    def armed_commit(self: Writer, *arguments: Any, **named: Any) -> None:
        # No version is made while the stream starts.
        at = (point, current[0].versions.current) if current else None
        if at == ("in_transaction", version):
            self.flush()
            _die()
        commit(self, *arguments, **named)
        if at == ("after_transaction", version):
            _die()

    Trainer.__init__ = armed_begin  # type: ignore[method-assign,assignment]
    Checkpoints.save = armed_save  # type: ignore[method-assign,assignment]
    Writer.commit = armed_commit  # type: ignore[method-assign]


def log_with_samples(broker: AnyBroker, namespace: str, *, partitions: int = 1) -> BusSettings:
    """Write a log on which all samples exist and none is trained."""
    settings = broker.settings(namespace)
    create_topics(settings, Partitions(home=1, slots=1, samples=partitions, chunks=2))
    write_prompts(settings)
    write_samples(settings, make_samples())
    return settings


def newest_of(settings: BusSettings) -> WeightManifest:
    records = [envelope.record for envelope in read_whole_topics(settings, [MANIFESTS])]
    return max((one for one in records if isinstance(one, WeightManifest)), key=lambda manifest: manifest.order)


def outcomes_of(groups: Iterable[CompleteGroup]) -> list[SampleOutcome]:
    return [
        SampleOutcome(
            trajectory_id=sample.trajectory_id,
            group_id=group.group_id,
            outcome=Outcome.TRAINED,
            step=1,
            policy_version=0,
            recorded_at=0.0,
        )
        for group in groups
        for sample in group.samples
    ]


def on_log(settings: BusSettings) -> list[str]:
    """Return the trajectories with an outcome, one entry per outcome."""
    records = [envelope.record for envelope in read_whole_topics(settings, [OUTCOMES])]
    return sorted(record.trajectory_id for record in records if isinstance(record, SampleOutcome))


def everyone(groups: Iterable[int]) -> list[str]:
    return sorted(sample.trajectory_id for sample in make_samples(groups=groups))


def save_first_version(learner: Learner, checkpoints: Checkpoints, *, folder_digest: bytes = b"") -> Progress:
    """Save a checkpoint of version 1 in the learner's present state. Return the progress as it is read back."""
    progress = Progress(
        identity=Identity(run="run", namespace="", model_id="policy"),
        version=1,
        epoch=0,
        weights_digest=b"",
        abandoned=(),
        outcomes=(),
        step_line=b"",
        schedule_steps=learner.schedule_steps,
        folder_digest=folder_digest,
    )
    learner.save(checkpoints, progress)
    return next(checkpoints.newest_first())
