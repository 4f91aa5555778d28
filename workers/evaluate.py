"""Success of a policy on fixed tasks: environments and an engine in one process, no Kafka.

Keeps true
- Tasks, and the seed of every turn, follow from the arguments: two policies meet the same tasks with the same luck.
- Turns are played as over the bus: the same turn format, the same sampling, the same ends of a trajectory.
"""

import asyncio
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from schemas.prompts import Sampling
from workers.environments.protocol import Environment
from workers.environments.registry import load_environment
from workers.environments.turn_format import TurnFormat
from workers.executor.vllm.folder import check_folder
from workers.executor.vllm.types import EngineConfig

SEED_BYTES = 7
"""Of a turn's seed: below 2**63."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """How a policy did."""

    tasks: int
    solved: int
    turns: int
    """Over all tasks."""
    seconds: float
    """Of playing; the engine's start is not in it."""

    @property
    def success(self) -> float:
        """Share of the tasks that were solved."""
        return self.solved / self.tasks


@dataclass(slots=True, kw_only=True)
class _Played:
    """One task while it is played."""

    seed: int
    environment: Environment
    tokens: list[int] = field(default_factory=list)
    turns: int = 0
    solved: bool = False
    done: bool = False


def evaluate_policy(
    config: EngineConfig,
    *,
    environment: str,
    arguments: Mapping[str, Any],
    seeds: Sequence[int],
    sampling: Sampling,
    max_turns: int,
    max_context_tokens: int,
) -> Evaluation:
    """Play the task of every seed once with the policy of `config.model_folder`.

    Raises UsageError: a broken model folder, an unknown environment, arguments that it does not take.
    """
    check_folder(config.model_folder)
    turn_format = TurnFormat(config.model_folder)
    make = load_environment(environment)
    sampling = msgspec.structs.replace(sampling, stop_token_ids=turn_format.stop_token_ids)
    games = [_Played(seed=seed, environment=make()) for seed in seeds]
    with asyncio.Runner() as runner:  # an environment lives in one event loop
        runner.run(_open(games, arguments, turn_format))

        import workers.executor.vllm.alone  # noqa: F401
        from workers.executor.vllm.engine import Engine

        engine = Engine(config)
        table = _Table(engine, turn_format, runner, sampling, max_turns, max_context_tokens)
        try:
            began = time.perf_counter()
            table.play(games)
            seconds = time.perf_counter() - began
        finally:
            engine.close()
    return Evaluation(
        tasks=len(games),
        solved=sum(game.solved for game in games),
        turns=sum(game.turns for game in games),
        seconds=seconds,
    )


async def _open(games: Sequence[_Played], arguments: Mapping[str, Any], turn_format: TurnFormat) -> None:
    for game in games:
        observation = await game.environment.reset(game.seed, arguments)
        game.tokens = turn_format.observation_tokens(observation, first=True)


@dataclass(frozen=True, slots=True)
class _Table:
    """Where the games are played: one engine for all."""

    engine: Any
    turn_format: TurnFormat
    runner: asyncio.Runner
    sampling: Sampling
    max_turns: int
    max_context_tokens: int

    def play(self, games: Sequence[_Played]) -> None:
        """Play every game to its end."""
        for number, game in enumerate(games):
            self._ask(number, game)
        while len(self.engine):
            for finished in self.engine.step().finished:
                number = int(finished.key)
                game = games[number]
                game.tokens += finished.tokens
                self.runner.run(self._step(game, finished.tokens))
                if not game.done:
                    self._ask(number, game)

    def _ask(self, number: int, game: _Played) -> None:
        room = self.max_context_tokens - len(game.tokens)
        turn = msgspec.structs.replace(
            self.sampling, max_tokens=min(self.sampling.max_tokens, room), seed=_turn_seed(game.seed, game.turns)
        )
        self.engine.add(str(number), game.tokens, turn, policy_version=self.engine.version)

    async def _step(self, game: _Played, action: Sequence[int]) -> None:
        step = await game.environment.step(self.turn_format.action_text(action))
        game.turns += 1
        game.solved = bool(step.success)
        observation = self.turn_format.observation_tokens(step.observation, first=False, after=action)
        no_room = len(game.tokens) + len(observation) >= self.max_context_tokens
        game.done = step.done or game.turns >= self.max_turns or no_room
        if game.done:
            await game.environment.close()
        else:
            game.tokens += observation


def _turn_seed(task_seed: int, turn: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{task_seed}/{turn}".encode(), digest_size=SEED_BYTES).digest())
