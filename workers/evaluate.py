"""Success rate of a policy on fixed tasks, with environments and an engine in one process and no Kafka.

Keeps true
- The tasks and the seed of every turn follow from the arguments: two policies get the same tasks and the same seeds.
- Turns run as they run over the bus: the same runner, turn format, sampling and rules for the end of a trajectory.
- An environment that fails ends the evaluation without a result, because the remaining tasks would not be comparable.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec

from rose.schemas.arrays import pack_tokens, unpack_tokens
from rose.schemas.errors import RoseError, UsageError
from rose.schemas.prompts import Sampling
from rose.workers.environments.jobs import (
    EnvironmentFailure,
    Job,
    JobResult,
    ResetJob,
    ResetRefused,
    RunnerLimits,
    StepJob,
)
from rose.workers.environments.prompt_decisions import ResetResult
from rose.workers.environments.protocol import Environment
from rose.workers.environments.registry import load_environment
from rose.workers.environments.thread_runner import ThreadRunner
from rose.workers.environments.transitions import StepResult
from rose.workers.environments.turn_format import TurnFormat
from rose.workers.executor.vllm.types import EngineConfig
from rose.workers.tokenizer import check_reading
from rose.workers.weights.model_folder import check_folder

if TYPE_CHECKING:
    from rose.workers.executor.vllm.engine import Engine

SEED_BYTES = 7
"""Bytes of a turn's seed: the seed stays below 2**63."""

HELD_OUT = "held-out"
"""Name of the evaluation set, as environments are told it."""

REASON_CHARACTERS = 300
"""Longest part of an environment's error message that is reported."""

LOOKS = 8
"""The timeout is waited for in this many parts. A runner whose heartbeats stand still for longer than all of them is
blocked by an environment."""


class EnvironmentFailed(RoseError):
    """An environment raised an exception, returned an invalid value or exceeded its time limit."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an evaluation."""

    tasks: int
    solved: int
    turns: int
    """Number of turns of all tasks."""
    seconds: float
    """Seconds from the first turn to the last, without the start of the engine."""

    @property
    def success(self) -> float:
        """Share of the tasks that the policy solved."""
        return self.solved / self.tasks


@dataclass(slots=True, kw_only=True)
class _Game:
    """State of one running task."""

    seed: int
    tokens: list[int] = field(default_factory=list)
    turns: int = 0
    solved: bool = False


def evaluate_policy(
    config: EngineConfig,
    *,
    environment: str,
    arguments: Mapping[str, Any],
    seeds: Sequence[int],
    sampling: Sampling,
    max_turns: int,
    max_context_tokens: int,
    step_timeout_seconds: float,
) -> Evaluation:
    """Run the task of every seed once with the policy of `config.model_folder`.

    `max_turns` and `max_context_tokens` end a task as they end a trajectory.

    Raises UsageError if the model folder is broken, the environment is unknown or the environment refuses the
    arguments. Raises EnvironmentFailed if an environment fails.
    """
    check_folder(config.model_folder)
    turn_format = TurnFormat(config.model_folder)
    make = load_environment(environment)
    sampling = msgspec.structs.replace(sampling, stop_token_ids=turn_format.stop_token_ids)
    games = [_Game(seed=seed) for seed in seeds]
    limits = RunnerLimits(
        max_live=len(games), timeout_seconds=step_timeout_seconds, max_context_tokens=max_context_tokens
    )
    with closing(_Environments(environment, make, turn_format, games, limits)) as environments:
        environments.begin(arguments)

        import rose.workers.executor.vllm.process_env  # noqa: F401
        from rose.workers.executor.vllm.engine import Engine

        check_reading(config.model_folder)
        engine = Engine(config)
        table = _GameLoop(engine, environments, sampling, max_turns, max_context_tokens)
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


class _Environments:
    """One environment for each task, in the thread runner that environment workers use."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Environment],
        turn_format: TurnFormat,
        games: Sequence[_Game],
        limits: RunnerLimits,
    ) -> None:
        self._name = name
        self._games = games
        self._timeout_seconds = limits.timeout_seconds
        self._answers: SimpleQueue[tuple[int, JobResult]] = SimpleQueue()
        self._runner = ThreadRunner(
            turn_format,
            lambda _: make(),
            lambda job, answer: self._answers.put((int(job.trajectory_id), answer)),
            limits,
            generation=0,
        )

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """Reset the environment of every task. Raises UsageError or EnvironmentFailed."""
        games = enumerate(self._games)
        jobs = [
            ResetJob(**self._of(number), seed=game.seed, arguments=dict(arguments), evaluation=HELD_OUT)
            for number, game in games
        ]
        for number, reset in self._run_jobs(jobs):
            self._games[number].tokens = unpack_tokens(reset.observation)

    def step(self, actions: Mapping[int, Sequence[int]]) -> list[tuple[int, StepResult]]:
        """Step the environments of these tasks, each with its sampled tokens. Raises EnvironmentFailed."""
        jobs = [  # no state to restore: all environments are live
            StepJob(**self._of(number), tokens=pack_tokens(action), state=b"") for number, action in actions.items()
        ]
        return [(number, stepped) for number, stepped in self._run_jobs(jobs) if isinstance(stepped, StepResult)]

    def release(self, number: int) -> None:
        """Close the environment of a task that has ended."""
        self._runner.release([str(number)])

    def close(self) -> None:
        """Close the runner and all environments."""
        self._runner.close()

    def _of(self, number: int) -> dict[str, Any]:
        return {"generation": 0, "trajectory_id": str(number), "environment": self._name, "ticket": None}

    def _run_jobs(self, jobs: Sequence[Job]) -> list[tuple[int, ResetResult | StepResult]]:
        self._runner.start(jobs)
        done: list[tuple[int, ResetResult | StepResult]] = []
        for _ in jobs:
            number, answer = self._answer()
            if isinstance(answer, ResetRefused):
                raise UsageError(f"tasks.arguments: {' '.join(answer.reason.split())[:REASON_CHARACTERS]}")
            if isinstance(answer, EnvironmentFailure):
                reason = " ".join(answer.failure.split())[:REASON_CHARACTERS]
                raise EnvironmentFailed(
                    f"{reason} (task of seed {self._games[number].seed}): an environment that fails leaves no "
                    "figure; mend it and evaluate again"
                )
            done.append((number, answer))
        return done

    def _answer(self) -> tuple[int, JobResult]:
        """The next result.

        The runner answers within the timeout unless an environment blocks its thread; then this raises
        EnvironmentFailed.
        """
        heartbeats, looks = self._runner.heartbeats, 0
        while True:
            try:
                return self._answers.get(timeout=self._timeout_seconds / LOOKS)
            except Empty:
                heartbeats, looks = self._runner.heartbeats, 0 if self._runner.heartbeats != heartbeats else looks + 1
            if looks > LOOKS:
                raise EnvironmentFailed(
                    f"environment {self._name} blocks the thread in which all of them run for longer than "
                    f"environment.step_timeout_seconds ({self._timeout_seconds:g}): mend it and evaluate again"
                )


@dataclass(frozen=True, slots=True)
class _GameLoop:
    """Runs all tasks on one engine."""

    engine: "Engine"
    environments: _Environments
    sampling: Sampling
    max_turns: int
    max_context_tokens: int

    def play(self, games: Sequence[_Game]) -> None:
        """Run every task to its end."""
        for number, game in enumerate(games):
            self._ask(number, game)
        while len(self.engine):
            actions = {int(turn.name): unpack_tokens(turn.sampled.tokens) for turn in self.engine.step().finished}
            for number, action in actions.items():
                games[number].tokens += action
            for number, stepped in self.environments.step(actions):
                self._apply(number, games[number], stepped)

    def _ask(self, number: int, game: _Game) -> None:
        room = self.max_context_tokens - len(game.tokens)
        turn = msgspec.structs.replace(
            self.sampling, max_tokens=min(self.sampling.max_tokens, room), seed=_turn_seed(game.seed, game.turns)
        )
        self.engine.add(str(number), game.tokens, turn, policy_version=self.engine.version)

    def _apply(self, number: int, game: _Game, stepped: StepResult) -> None:
        game.turns += 1
        game.solved = bool(stepped.success)
        observation = unpack_tokens(stepped.observation)
        no_room = len(game.tokens) + len(observation) >= self.max_context_tokens
        if stepped.done or game.turns >= self.max_turns or no_room:
            self.environments.release(number)
            return
        game.tokens += observation
        self._ask(number, game)


def _turn_seed(task_seed: int, turn: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{task_seed}/{turn}".encode(), digest_size=SEED_BYTES).digest())
