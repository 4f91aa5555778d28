"""An engine and the transformers model whose weights the engine should serve."""

import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import rose.workers.executor.vllm.process_env  # noqa: F401
from rose.schemas.arrays import unpack_logprobs, unpack_tokens
from rose.schemas.prompts import Sampling
from rose.workers.executor.vllm.engine import Engine
from rose.workers.executor.vllm.types import EngineConfig, FinishedTurn
from tests.support.policy_folders import VOCABULARY, logprobs_of, new_policy, save_policy, tensors_of

TOLERANCE = 1e-4
"""Largest difference of two logprobs that counts as equal."""

BLOCK = 32
MAX_MODEL_LEN = 256
MAX_RUNNING = 16


@dataclass
class EngineFixture:
    """An engine, and the transformers model whose weights it should serve."""

    engine: Engine
    model: Any
    tied: bool
    seed: int = 0

    def swap(self) -> None:
        """Swap to the next random policy under the next version."""
        self.seed += 1
        self.model = new_policy(self.seed, tied=self.tied)
        self.engine.swap(self.engine.version + 1, tensors_of(self.model).items())

    def add(self, key: str, context: Sequence[int], **sampling: Any) -> None:
        self.engine.add(key, context, Sampling(**sampling), policy_version=self.engine.version)

    def drain(self) -> dict[str, FinishedTurn]:
        done: dict[str, FinishedTurn] = {}
        while len(self.engine):
            done |= {turn.name: turn for turn in self.engine.step().finished}
        return done

    def run(self, context: Sequence[int], **sampling: Any) -> FinishedTurn:
        self.add("only", context, **sampling)
        return self.drain()["only"]

    def clear(self) -> None:
        """Abort the turns that a test left."""
        for key in list(self.engine._turns):
            self.engine.abort(key)

    def check(self, seed: int, turns: int = 40) -> float:
        """Run many turns of different lengths together. Return the largest difference to the logprobs of
        transformers."""
        rng = random.Random(seed)
        contexts = {f"t{i}": contexts_of(rng, rng.randint(1, 150)) for i in range(turns)}
        for key, context in contexts.items():
            self.add(key, context, max_tokens=rng.randint(1, 40))
            if rng.random() < 0.3:
                self.engine.step()
        ended = [(contexts[key], turn) for key, turn in self.drain().items() if key in contexts]
        differences = torch.tensor([difference(self.model, context, turn) for context, turn in ended])
        return float(differences.max())  # torch returns NaN if one value is NaN; the built-in `max` does not


@contextmanager
def started_engine(folder: Path, *, tied: bool) -> Iterator[EngineFixture]:
    """Save a small policy in the folder and start an engine that serves it as version 0."""
    model = new_policy(0, tied=tied)
    engine = Engine(folder_config(save_policy(folder, model), policy_version=0))
    with closing(engine):
        yield EngineFixture(engine, model, tied)


def contexts_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def tokens_of(turn: FinishedTurn) -> list[int]:
    return unpack_tokens(turn.sampled.tokens)


def sampled_logprobs(turn: FinishedTurn) -> NDArray[np.float32]:
    return unpack_logprobs(turn.sampled.logprobs).copy()


def difference(model: Any, context: Sequence[int], turn: FinishedTurn, temperature: float = 1.0) -> float:
    expected = logprobs_of(model, context, tokens_of(turn), temperature)
    return float((expected - torch.from_numpy(sampled_logprobs(turn))).abs().max())


def folder_config(folder: Path, **settings: Any) -> EngineConfig:
    standard = {"max_model_len": MAX_MODEL_LEN, "max_running": MAX_RUNNING, "step_tokens": 512, "seed": 1}
    return EngineConfig(model_folder=folder, **(standard | settings))
