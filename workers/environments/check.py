"""`rose environment check`: plays an environment as a worker would, and names each rule that it breaks.

Keeps true
- The same seeds and actions are played each time, so a finding can be repeated.
- Every finding comes from results of the worker's own processes, and says with which seed and turn it was made.
- Checks do not depend on how good the actions are, but see more of an environment with actions that it knows.

    nonsense      malformed actions, arguments and snapshots
    play          lives of some tasks, side by side in one process
    determinism   lives of the same tasks in another process, one by one and in another order
    restore       every turn of these lives again, in a new instance that is restored from the snapshot before the turn
    blocking      the longest time in which no other environment of the process could run
    leaks         what a process holds after many environments, closed, more than after few
    process       whether an environment ended or changed its process
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.schemas.arrays import pack_tokens, unpack_tokens
from rose.schemas.errors import UsageError
from rose.workers.environments.check_player import Holdings, Life, Player
from rose.workers.environments.jobs import EnvironmentFailure, JobResult, ResetRefused
from rose.workers.environments.prompt_decisions import ResetResult
from rose.workers.environments.runner_supervisor import APART_SECONDS, FIRST_SECONDS
from rose.workers.environments.transitions import StepResult

NONSENSE = (
    "",
    " \n\t ",
    "?",
    "[1",
    "{}{}",
    '{"a": NaN, "a": -Infinity}',
    "[" * 5_000,
    '{"name": "no such tool", "arguments": "none"}',
    "<tool_call>\nnull\n</tool_call>",
    "-1" * 2_000,
    "9" * 5_000,
    "\x00\x1b[31m\x07",
    "\u202eright to left\u202c \ufffe",
    "e\u0301" * 500 + "\U0001f469\u200d\U0001f4bb",
    "import os; os._exit(3)",
    "--help",
    "a" * 100_000,
)
"""Actions that policies write, and no environment asks for."""

BAD_VALUES: tuple[Any, ...] = (None, [], {"a": 1}, "nonsense", -1, 1e300)
"""Values that replace the value of each argument in turn."""

MARK = re.compile(r"<[|｜][^|｜]*[|｜]>")
"""A special token in the text of an observation; it is no word of the environment."""

UNKNOWN_ARGUMENT = "no_such_argument_of_the_check"

BAD_SNAPSHOTS = (b"", b"no snapshot", b"\xff\x00\x80")

NONSENSE_SHARE = 0.25
"""Share of malformed actions in the lives."""

MOST_FAILURES = 3
"""Number of malformed actions that fail after which no more are tried: each may end a process."""

WARM_LIVES, LEAK_LIVES, LEAK_TURNS = 4, 16, 3
"""Lives before and between the two looks at what a process holds, and turns of each."""

LEAK_BYTES = 1 << 20
"""Growth of a process's memory for each life that counts as a leak: smaller growth may be of the allocator."""

SHOWN_CHARACTERS = 60
"""Longest text of an action in a finding."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    check: str
    passed: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPlan:
    """The environment to play, and how it is played."""

    environment: str
    model_folder: Path
    """Folder with the tokenizer and chat template that observations are framed with."""
    import_paths: tuple[Path, ...]
    seeds: tuple[int, ...]
    arguments: dict[str, Any]
    actions: tuple[str, ...]
    """Actions that the environment knows; without any, words of its observations are tried."""
    turns: int
    """Most turns of a life."""
    timeout_seconds: float


def check_environment(plan: CheckPlan) -> Iterator[Finding]:
    """Yield the findings of all checks.

    After a block, or the end of a process, the remaining checks are left out: each of their turns would take seconds.
    Raises UsageError if the environment cannot be loaded, or refuses the plan's arguments.
    """
    with _player(plan) as first, _player(plan) as second:
        opened, failure = _begun(first, plan)
        if failure is None:
            nonsense, steps = _nonsense(first, opened[0], plan)
            yield nonsense
            failure = _play(first, opened, plan, steps)
        played, ended = sum(len(life.turns) for life in opened), sum(life.done for life in opened)
        yield Finding(
            "play", failure is None, failure or f"{len(opened)} tasks, {played} turns, {ended} tasks to their end"
        )
        blocking, process = _blocking([first, second]), _process([first, second])
        if failure is None and blocking.passed and process.passed:
            yield _determinism(second, opened, plan)
            yield _restore(second, opened)
            yield _leaks(first, plan, steps)
            blocking, process = _blocking([first, second]), _process([first, second])
        yield blocking
        yield process


def _player(plan: CheckPlan) -> Player:
    return Player(
        plan.environment, plan.model_folder, import_paths=plan.import_paths, timeout_seconds=plan.timeout_seconds
    )


def _begun(player: Player, plan: CheckPlan) -> tuple[list[Life], str | None]:
    """Begin the tasks of all seeds side by side. Return them, and why one could not begin; None if all could."""
    jobs = [player.reset(seed, plan.arguments) for seed in plan.seeds]
    lives: list[Life] = []
    for seed, job, answer in zip(plan.seeds, jobs, player.run(jobs), strict=True):
        if isinstance(answer, ResetRefused):
            raise UsageError(f"{plan.environment} refuses the arguments {plan.arguments}: {answer.reason}")
        if not isinstance(answer, ResetResult):
            return lives, f"seed {seed}: reset fails: {_why(answer)}"
        lives.append(Life(job.trajectory_id, seed, answer))
    return lives, None


def _play(player: Player, lives: Sequence[Life], plan: CheckPlan, steps: Sequence[str]) -> str | None:
    """Play the lives side by side. Return why a step failed; None if none did.

    `steps`: malformed actions that may be drawn.
    """
    draws = [random.Random(f"rose {life.seed}") for life in lives]
    for turn in range(plan.turns):
        running = [(life, draw) for life, draw in zip(lives, draws, strict=True) if not life.done]
        actions = [_drawn(player, life, draw, plan.actions, steps) for life, draw in running]
        jobs = [
            player.step(life.trajectory_id, action, life.state(turn))
            for (life, _), action in zip(running, actions, strict=True)
        ]
        for (life, _), action, answer in zip(running, actions, player.run(jobs), strict=True):
            if not isinstance(answer, StepResult):
                return f"{_where(player, life, turn, action)}: the step fails: {_why(answer)}"
            life.turns.append((action, answer))
    player.release([life.trajectory_id for life in lives])
    return None


def _drawn(player: Player, life: Life, draw: random.Random, known: Sequence[str], steps: Sequence[str]) -> bytes:
    """Return the next action, as packed tokens: a known one, or a word of the observation, or a malformed one."""
    seen = life.turns[-1][1].observation if life.turns else life.first.observation
    text = player.turn_format.text([int(token) for token in unpack_tokens(seen)])
    choices: Sequence[str] = known or MARK.sub(" ", text).split()
    if steps and (not choices or draw.random() < NONSENSE_SHARE):
        choices = steps
    return _tokens(player, draw.choice(choices or ("?",)))


def _tokens(player: Player, text: str) -> bytes:
    return pack_tokens(player.turn_format.action_tokens(text))


def _determinism(player: Player, lives: Sequence[Life], plan: CheckPlan) -> Finding:
    """Play the same actions again in another process, one life after the other, the last one first."""
    for life in reversed(lives):
        begun = player.reset(life.seed, plan.arguments)
        [first] = player.run([begun])
        if difference := _difference(life.first, first):
            return Finding("determinism", False, f"seed {life.seed}: another process has {difference}")
        state = life.first.state
        for turn, (action, before) in enumerate(life.turns):
            [again] = player.run([player.step(begun.trajectory_id, action, state)])
            if difference := _difference(before, again):
                where = _where(player, life, turn, action)
                return Finding("determinism", False, f"{where}: another process has {difference}")
            assert isinstance(again, StepResult)
            state = again.state
        player.release([begun.trajectory_id])
    return Finding("determinism", True, "another process gives the same observations, rewards and ends")


def _restore(player: Player, lives: Sequence[Life]) -> Finding:
    """Take every turn in an instance of its own; and from the middle on, the rest of each life in one instance."""
    turns = [(life, turn) for life in lives for turn in range(len(life.turns))]
    jobs = [player.restored(life.state(turn), life.turns[turn][0]) for life, turn in turns]
    answers = player.run(jobs)
    player.release([job.trajectory_id for job in jobs])
    for (life, turn), answer in zip(turns, answers, strict=True):
        action, live = life.turns[turn]
        if difference := _difference(live, answer):
            where = _where(player, life, turn, action)
            return Finding("restore", False, f"{where}: restored from the snapshot before it, it has {difference}")
    for life in lives:
        middle = len(life.turns) // 2
        trajectory_id = player.new_id()
        for turn in range(middle, len(life.turns)):
            action, live = life.turns[turn]
            [answer] = player.run([player.step(trajectory_id, action, life.state(turn))])
            if difference := _difference(live, answer):
                where = _where(player, life, turn, action)
                return Finding("restore", False, f"{where}: restored before turn {middle}, it has {difference}")
        player.release([trajectory_id])
    largest = max((len(life.state(turn)) for life, turn in turns), default=0)
    return Finding(
        "restore", True, f"{len(turns)} snapshots continue like the original; the largest has {largest} bytes"
    )


def _nonsense(player: Player, life: Life, plan: CheckPlan) -> tuple[Finding, list[str]]:
    """Try malformed actions in the first state, malformed arguments, and bytes that are no snapshot.

    Return the finding, and the malformed actions that are steps.
    """
    steps: list[str] = []
    failures: list[str] = []
    for text in NONSENSE:
        job = player.restored(life.first.state, _tokens(player, text))
        [answer] = player.run([job])
        player.release([job.trajectory_id])
        if isinstance(answer, StepResult):
            steps.append(text)
        else:
            failures.append(f"the action {_shown(text)} fails its trajectory instead of being a step: {_why(answer)}")
        if len(failures) == MOST_FAILURES or not _blocking([player]).passed:
            break
    if failures:
        return Finding("nonsense", False, failures[0]), steps
    failure, is_refused = _bad_arguments(player, life.seed, plan)
    failure = failure or _bad_snapshots(player)
    if failure is not None:
        return Finding("nonsense", False, failure), steps
    taken = "refused" if is_refused else "taken, so that a misspelt one is not noticed"
    return Finding("nonsense", True, f"{len(steps)} malformed actions are steps; an unknown argument is {taken}"), steps


def _bad_arguments(player: Player, seed: int, plan: CheckPlan) -> tuple[str | None, bool]:
    """Return how malformed arguments fail, None if they do not; and whether an unknown argument is refused."""
    bad = [plan.arguments | {UNKNOWN_ARGUMENT: 1}]
    bad += [plan.arguments | {name: value} for name in plan.arguments for value in BAD_VALUES]
    jobs = [player.reset(seed, arguments) for arguments in bad]
    answers = player.run(jobs)
    player.release([job.trajectory_id for job in jobs])
    for arguments, answer in zip(bad, answers, strict=True):
        if isinstance(answer, EnvironmentFailure):
            what = f"the arguments {_shown(str(arguments))} fail instead of raising EnvironmentArgumentError"
            return f"{what}: {_why(answer)}", False
    return None, isinstance(answers[0], ResetRefused)


def _bad_snapshots(player: Player) -> str | None:
    """Return which bytes that are no snapshot are taken as one; None if none are."""
    jobs = [player.restored(state, _tokens(player, "?")) for state in BAD_SNAPSHOTS]
    answers = player.run(jobs)
    player.release([job.trajectory_id for job in jobs])
    for state, answer in zip(BAD_SNAPSHOTS, answers, strict=True):
        if isinstance(answer, StepResult):
            return f"restore() takes {state!r}, which is no snapshot: raise SnapshotError"
    return None


def _blocking(players: Sequence[Player]) -> Finding:
    """Judge the longest silence of a process as a worker does, which starts the other environments again elsewhere."""
    warm = max((player.silence for player in players), key=lambda each: each.seconds)
    cold = max((player.cold_silence for player in players), key=lambda each: each.seconds)
    for silence, most, advice in (
        (cold, FIRST_SECONDS, "load data at the import of the module"),
        (warm, APART_SECONDS, "put long work into asyncio.to_thread or a process"),
    ):
        if silence.seconds > most:
            reason = f"other environments of the process wait for {silence.seconds:.1f} s: {advice}"
            return Finding("blocking", False, reason)
    return Finding("blocking", True, f"the others of a process wait for {warm.seconds:.2f} s at most")


def _leaks(player: Player, plan: CheckPlan, steps: Sequence[str]) -> Finding:
    """Compare what a process holds after a few lives with what it holds after many more."""
    if failure := _lived(player, plan, steps, WARM_LIVES):
        return Finding("leaks", False, failure)
    before = player.holdings()
    if failure := _lived(player, plan, steps, LEAK_LIVES):
        return Finding("leaks", False, failure)
    after = player.holdings(at_most=before)
    grown = Holdings(*(now - then for now, then in zip(after, before, strict=True)))
    most = LEAK_LIVES // 2
    for what, count in (("descriptors", grown.descriptors), ("threads", grown.threads), ("processes", grown.children)):
        if count >= most:
            return Finding("leaks", False, f"{LEAK_LIVES} closed environments leave {count} {what} behind")
    if grown.memory_bytes >= LEAK_LIVES * LEAK_BYTES:
        size = grown.memory_bytes / (1 << 20)
        return Finding("leaks", False, f"{LEAK_LIVES} closed environments leave {size:.0f} MiB of memory behind")
    return Finding("leaks", True, f"{LEAK_LIVES} closed environments leave nothing behind")


def _lived(player: Player, plan: CheckPlan, steps: Sequence[str], lives: int) -> str | None:
    """Play and close short lives one after the other. Return why that failed; None if it did not."""
    for number in range(lives):
        seed = plan.seeds[number % len(plan.seeds)]
        begun = player.reset(seed, plan.arguments)
        [first] = player.run([begun])
        if not isinstance(first, ResetResult):
            return f"seed {seed}: reset fails after some lives: {_why(first)}"
        life, draw = Life(begun.trajectory_id, seed, first), random.Random(f"leak {number}")
        while not life.done and len(life.turns) < LEAK_TURNS:
            action = _drawn(player, life, draw, plan.actions, steps)
            [answer] = player.run([player.step(begun.trajectory_id, action, life.state(len(life.turns)))])
            if not isinstance(answer, StepResult):
                return f"{_where(player, life, len(life.turns), action)}: the step fails: {_why(answer)}"
            life.turns.append((action, answer))
        player.release([begun.trajectory_id])
    return None


def _process(players: Sequence[Player]) -> Finding:
    endings = [ending for player in players for ending in player.endings]
    if endings:
        return Finding("process", False, f"the environment's process {endings[0]}")
    return Finding("process", True, "no process ended or was replaced")


def _difference(before: JobResult, after: JobResult) -> str | None:
    """Return what differs between two results of the same job, as a noun; None if nothing does."""
    if isinstance(before, ResetResult) and isinstance(after, ResetResult):
        return None if before.observation == after.observation else "another first observation"
    if not (isinstance(before, StepResult) and isinstance(after, StepResult)):
        return f"a failure: {_why(after)}"
    for name in ("reward", "done", "success"):
        if getattr(before, name) != getattr(after, name):
            return f"{name} {getattr(after, name)} instead of {getattr(before, name)}"
    return None if before.observation == after.observation else "another observation"


def _where(player: Player, life: Life, turn: int, action: bytes) -> str:
    text = player.turn_format.action_text([int(token) for token in unpack_tokens(action)])
    return f"seed {life.seed}, turn {turn}, action {_shown(text)}"


def _why(answer: JobResult) -> str:
    if isinstance(answer, EnvironmentFailure):
        return answer.failure.partition(": ")[2]
    return answer.reason if isinstance(answer, ResetRefused) else "it is a result of another kind"


def _shown(text: str) -> str:
    written = repr(text)
    return written if len(written) <= SHOWN_CHARACTERS else f"{written[:SHOWN_CHARACTERS]}..."
