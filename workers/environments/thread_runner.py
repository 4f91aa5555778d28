"""A thread with an event loop of its own, in which environments run; in a process of environments, the main thread.

Keeps true
- A slow environment delays no other environment. An environment that fails, hangs or returns invalid values fails only
  its own trajectory.
- No more than `max_live` environments are held or stepped at once, except for abandoned steps. The environment that was
  unused for the longest time is closed first; its next turn restores it from its trajectory's state.
- Every job of the current generation is answered once, in any order and whatever is raised, swallowed or cancelled, as
  long as no environment blocks the thread. While one does, `heartbeats` does not grow.
- A job is answered before its environment is closed, so `close` cannot delay or change an answer.
- A long observation is encoded on another thread, and only in part if it cannot fit a context.
- A child that an environment forks ends once it returns from the environment's code: it runs and answers no job.
- A step is not late because this process was frozen: a freeze counts as one check.
"""

import asyncio
import copy
import ctypes
import math
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import Context
from threading import Thread
from typing import Any, TypeVar

import structlog

from rose.schemas.arrays import pack_tokens, unpack_tokens
from rose.schemas.errors import UsageError, describe_error, is_start_refused, leaves_of, message_of
from rose.workers.environments.jobs import (
    BEATS,
    COUNTERS,
    LIVE,
    NO_JOB,
    NO_OWNER,
    OWNER,
    STUCK,
    EnvironmentFailure,
    Job,
    JobResult,
    NoOwner,
    ResetJob,
    ResetRefused,
    ResultCallback,
    RunnerLimits,
    StatusCounters,
    StepJob,
    TrackedCall,
)
from rose.workers.environments.process_integrity import (
    EnvironmentThreadPool,
    LoopRepair,
    ProcessIntegrity,
    end_if_forked,
)
from rose.workers.environments.prompt_decisions import ResetResult
from rose.workers.environments.protocol import (
    EVALUATION,
    Environment,
    FirstObservation,
    ProtocolViolation,
    check_first_observation,
    check_snapshot,
    check_step,
    raised_at,
    takes_evaluation,
)
from rose.workers.environments.transitions import FAILURE_CHARACTERS, StepResult
from rose.workers.environments.turn_format import TurnFormat

CLOSE_SECONDS = 10.0
"""Time that environments may take to close before the worker continues without them."""

LOOK_SECONDS = 1.0
"""Longest time between two checks whether a call has ended."""

LOOKS = 8
"""Least number of checks before a call counts as late, whatever the clock says."""

CANCELS = 2
"""Number of cancellations after which a call is abandoned and its environment closed."""

CANCEL_SECONDS = 5.0
"""Time that a cancelled call may take to end."""

BEAT_SECONDS = 0.05
"""Time between two heartbeats of a loop that nothing blocks."""

PIECE_CHARACTERS = 16_384
"""Longest observation that is encoded at once, within some ten milliseconds."""

CERTAINLY = 2
"""An observation whose pieces have this many times the tokens of a context cannot fit a context. The whole observation
may have fewer tokens than its pieces, but only where pieces meet."""

T = TypeVar("T")

log = structlog.get_logger()


class ThreadRunner:
    """Runs jobs on a thread. Public methods are called from other threads, methods with an underscore from its own."""

    killable = False

    def __init__(
        self,
        turn_format: TurnFormat,
        create: Callable[[str], Environment],
        answer: ResultCallback,
        limits: RunnerLimits,
        *,
        generation: int,
        signs: StatusCounters | None = None,
        integrity: ProcessIntegrity | None = None,
    ) -> None:
        """`create` makes a new environment of a name; `answer` is called on the runner's thread.

        `signs`: counters that another process reads; the tickets of jobs are numbers then. `integrity`: given in a
        process of environments, whose main thread calls `run`. Without it a thread is started.
        """
        self.heartbeats = 0
        """Counter that grows while nothing blocks the loop."""
        self.ready = True
        self.exit_reason: str | None = None
        self.load_error: str | None = None
        self._format = turn_format
        self._create = create
        self._answer = answer
        self._limits = limits
        self._generation = generation
        self._signs = [0] * COUNTERS if signs is None else signs
        self._integrity = integrity
        self._idle: OrderedDict[str, Environment] = OrderedDict()
        self._held: dict[int, Environment] = {}
        """Environments that are not closed, by `id`: they need not be hashable."""
        self._busy = 0
        self._ending = 0
        """Environments that are being closed and still occupy their slot."""
        self._slots = asyncio.Semaphore(limits.max_live)
        self._tasks: dict[asyncio.Task[None], Job | None] = {}
        """Tasks of the runner, each with the job to be answered; None if there is none. Only an environment that
        cancels all tasks of the loop cancels these."""
        self._calls: dict[asyncio.Task[Any], Job | None] = {}
        """Tasks that run code of environments, also abandoned ones, and tasks that such code has made."""
        self._withdrawn: set[str] = set()
        """Trajectories whose code no longer runs, although the blocked loop has not reported it yet."""
        self._closing = self._stopped = False
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._threads = EnvironmentThreadPool()
        self._shared = LoopRepair(self._loop, self._threads, self._make_task)
        self._loop.set_exception_handler(self._on_loop_error)
        self._beat_error: Exception | None = None
        """Error that ended a beat: a signal handler of an environment raises anywhere."""
        self._this_beat = self._next_beat = self._loop.call_soon(self._beat)
        self._thread = Thread(target=self.run, name="environments", daemon=True)
        if integrity is None:
            self._thread.start()

    @property
    def live(self) -> int:
        """Number of environments that are held or stepped, as other threads see it; for people."""
        return len(self._idle) + self._busy

    @property
    def threads_stuck(self) -> int:
        """Number of pool threads in which an abandoned call still runs."""
        return self._threads.stuck

    def start(self, jobs: Sequence[Job]) -> None:
        """Start these jobs."""
        self._loop.call_soon_threadsafe(self._begin, jobs)

    def release(self, trajectory_ids: list[str]) -> None:
        """Close the environments of ended trajectories."""
        self._loop.call_soon_threadsafe(self._drop, trajectory_ids)

    def cancel(self, trajectory_ids: list[str]) -> None:
        """Cancel these jobs without an answer, and release their environments."""
        self._withdrawn.update(trajectory_ids)
        self._loop.call_soon_threadsafe(self._withdraw, trajectory_ids)

    def begin_generation(self, generation: int) -> None:
        """Close all environments of earlier generations."""
        self._loop.call_soon_threadsafe(self._forget, generation)

    def current_job(self) -> Job | None:
        """Return the job whose own code has the thread at this moment."""
        task = asyncio.current_task(self._loop)
        if task in self._calls:
            return self._calls[task] or NO_JOB
        return None if task is None else self._tasks.get(task)

    def kill(self) -> None:
        """Have the thread end as soon as possible: after a sleep, or in the middle of a Python loop.

        On CPython 3.11 a thread with a profile or trace function (a debugger, a coverage tool) makes no progress until
        the killed thread has raised its exception. Environments in processes of their own are not affected.
        """
        self.stop()
        if self._thread.ident is not None and self._thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), ctypes.py_object(SystemExit))

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Stop everything. An environment that blocks the event loop is left behind."""
        self.stop()
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning("environments_not_closed", seconds=seconds)
            self.kill()

    def stop(self) -> None:
        """Have the thread close everything and end."""
        if not self._closing:
            self._closing = True
            asyncio.run_coroutine_threadsafe(self._shut(), self._loop)

    def run(self) -> None:
        """Run jobs in this thread until everything is closed after `stop`, or the event loop is lost."""
        while not self._stopped:  # an environment may stop the loop, too
            try:
                self._loop.run_forever()
                if self._beat_error is not None:
                    raise self._beat_error
            except (SystemExit, KeyboardInterrupt) as error:  # from a callback, or raised by `kill`
                end_if_forked(self._pid, error)
            except Exception as error:  # noqa: BLE001 - of a signal handler, or the loop's own files are closed
                end_if_forked(self._pid, error)
                self.exit_reason = f" lost its event loop ({describe_error(error)})"
                return
        self._loop.close()

    def _beat(self) -> None:
        self._this_beat = self._next_beat
        end_if_forked(self._pid)
        self.heartbeats += 1
        self._signs[BEATS], self._signs[LIVE], self._signs[STUCK] = self.heartbeats, self.live, self.threads_stuck
        self._next_beat = self._loop.call_later(BEAT_SECONDS, self._beat)

    def _begin(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if self._integrity is not None:
                self._integrity.on_use(job.trajectory_id)
            self._spawn(self._work(job), job)

    def _drop(self, trajectory_ids: list[str]) -> None:
        for trajectory_id in trajectory_ids:
            if trajectory_id in self._idle:
                self._spawn(self._close([self._idle.pop(trajectory_id)]))

    def _withdraw(self, trajectory_ids: list[str]) -> None:
        for task, job in self._tasks.items():
            if job is not None and job.trajectory_id in trajectory_ids:
                self._tasks[task] = None
        for call, job in self._calls.items():
            if job is not None and job.trajectory_id in trajectory_ids:
                call.cancel()
        self._drop(trajectory_ids)
        self._withdrawn.difference_update(trajectory_ids)

    def _forget(self, life: int) -> None:
        self._generation = life
        self._drop(list(self._idle))

    async def _shut(self) -> None:
        """Cancel calls, close environments, wait for the runner's tasks, and stop the loop."""
        try:
            for call in list(self._calls):
                call.cancel()
            self._drop(list(self._idle))
            for task in list(self._tasks):
                await _ends(task, CLOSE_SECONDS)
        finally:
            self._stopped = True
            self._loop.stop()

    async def _work(self, job: Job) -> None:
        async with self._slots:
            present = _present_task()
            if self._closing or job.generation != self._generation or self._tasks[present] is None:
                self._tasks[present] = None  # no answer is awaited any more
                return
            environment = self._idle.pop(job.trajectory_id, None)
            self._busy += 1
            try:
                while self._idle and len(self._idle) + self._busy + self._ending > self._limits.max_live:
                    await self._close([self._idle.popitem(last=False)[1]])
                environment, answer = await self._answered(job, environment)
            finally:
                self._busy -= 1
            ended = isinstance(answer, EnvironmentFailure | ResetRefused) or (
                isinstance(answer, StepResult) and answer.done
            )
            still_needed = self._tasks[present] is not None and not self._closing and not self._has_left(job)
            ended = ended or not still_needed or job.generation != self._generation
            if environment is not None and not ended:
                self._idle[job.trajectory_id] = environment
            self._tasks[present] = None
            if still_needed:
                self._answer(job, answer)
            if environment is not None and ended:
                held, environment = [environment], None
                self._ending += 1
                try:
                    await self._close(held)
                finally:
                    self._ending -= 1
            if self._integrity is not None:
                self._integrity.on_answered()

    def _worked(self, task: asyncio.Task[None]) -> None:
        """Answer the job of this task if the task ended without an answer."""
        job = self._tasks.pop(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._check_refused(error)
        if job is not None and error is not None and not self._closing:
            self._answer(job, EnvironmentFailure(_failure(job, error)))

    async def _answered(self, job: Job, environment: Environment | None) -> tuple[Environment | None, JobResult]:
        """Do the job within the time limit. Return the environment, made if `environment` is None, and the result."""
        restore = environment is None and isinstance(job, StepJob)
        if environment is None:
            made = await self._within(self._limits.timeout_seconds, lambda: self._made(job), job)
            if isinstance(made, BaseException):
                return None, EnvironmentFailure(_failure(job, made))
            if id(made) in self._held:
                shared = ProtocolViolation("its factory gave an object that another trajectory holds: make a new one")
                return None, EnvironmentFailure(_failure(job, shared))
            self._held[id(made)] = environment = made
        own = environment
        done = await self._within(self._limits.timeout_seconds, lambda: self._do(job, own, restore=restore), job)
        if isinstance(done, UsageError) and isinstance(job, ResetJob):
            return own, ResetRefused(message_of(done))
        return own, EnvironmentFailure(_failure(job, done)) if isinstance(done, BaseException) else done

    async def _within(self, seconds: float, call: Callable[[], Awaitable[T]], job: Job | None) -> T | BaseException:
        """Return the result or the exception of a call. A late call is cancelled; if it goes on, it is abandoned."""
        task = self._track(_caught(call, self._pid), job)
        in_time = ended = await _ends(task, seconds)
        for _ in range(CANCELS):
            if not ended:
                task.cancel()
                ended = await _ends(task, CANCEL_SECONDS)
        outcome = task.result() if ended and not task.cancelled() else asyncio.CancelledError()
        if isinstance(outcome, BaseException):
            self._check_refused(outcome)
        if isinstance(outcome, BaseException) and not in_time:
            return TimeoutError(f"took longer than {seconds:g} s")
        return outcome

    def _check_refused(self, error: BaseException) -> None:
        """Give a process of environments up if the error says that its resources are used up.

        The code that gets the error need not be the code that holds the resources.
        """
        if self._integrity is None:
            return
        if is_start_refused(error):
            self._integrity.on_start_refused()
        elif self._limits.memory_bytes and any(isinstance(each, MemoryError) for each in leaves_of(error)):
            self._integrity.on_memory_refused()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error that no task receives: of a callback, or of a task that nothing awaits."""
        if (error := context.get("exception")) is not None:
            self._check_refused(error)
            if context.get("handle") in (self._this_beat, self._next_beat):
                self._beat_error = error  # no beat would follow, and the runner would be silent
                self._loop.stop()
        loop.default_exception_handler(context)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, code: Coroutine[Any, Any, T], **options: Any
    ) -> "asyncio.Task[T]":
        """Make a task of the loop. A task that the code of a job makes runs code of that job."""
        context: Context | None = options.get("context")
        job = OWNER.get() if context is None else context.get(OWNER, NO_OWNER)
        if isinstance(job, NoOwner):
            return asyncio.tasks.Task(code, loop=loop, **options)
        return self._track(code, job, **options)

    def _track(self, code: Coroutine[Any, Any, T], job: Job | None, **options: Any) -> "asyncio.Task[T]":
        """Make a task that runs code of the job. None: the task closes an environment."""
        call = TrackedCall(code, self._signs, job, self._look, lambda: self._has_left(job))
        task = asyncio.tasks.Task(call, loop=self._loop, **options)
        self._calls[task] = job
        task.add_done_callback(self._calls.pop)
        return task

    def _has_left(self, job: Job | None) -> bool:
        return job is not None and job.trajectory_id in self._withdrawn

    def _look(self, after: bool) -> None:
        """Repair the loop before and after each run of a call; `after` the run, check that the process is still fit."""
        end_if_forked(self._pid)
        self.heartbeats += 1
        self._signs[BEATS] = self.heartbeats
        self._shared.repair()
        if after and self._integrity is not None:
            self._integrity.check()

    async def _made(self, job: Job) -> Environment:
        return self._create(job.environment)

    async def _do(self, job: Job, environment: Environment, *, restore: bool) -> ResetResult | StepResult:
        if self._closing:
            raise asyncio.CancelledError  # like calls that were under way
        if isinstance(job, ResetJob):
            told = {EVALUATION: job.evaluation} if takes_evaluation(environment) else {}
            first = check_first_observation(await environment.reset(job.seed, copy.deepcopy(job.arguments), **told))
            observation = await self._encoded_first(first)
            return ResetResult(pack_tokens(observation), check_snapshot(await environment.snapshot()))
        assert isinstance(job, StepJob)
        if restore:
            await environment.restore(job.state)
        sampled = unpack_tokens(job.tokens)
        action = self._format.action_text(sampled, job.stop_token_ids)
        began = time.perf_counter()
        given = await environment.step(action)
        seconds = time.perf_counter() - began
        step = check_step(given)
        return StepResult(
            observation=b"" if step.done else pack_tokens(await self._encoded(step.observation, after=sampled)),
            reward=step.reward,
            done=step.done,
            success=step.success,
            info=step.info,
            state=b"" if step.done else check_snapshot(await environment.snapshot()),
            environment_seconds=seconds,
        )

    async def _encoded_first(self, first: str | FirstObservation) -> list[int]:
        if isinstance(first, str):
            return await self._encoded(first)
        if sum(len(message.content) for message in first.messages) <= PIECE_CHARACTERS:
            return self._format.first_tokens(first)
        return await self._loop.run_in_executor(None, self._format.first_tokens, first)

    async def _encoded(self, text: str, *, after: Sequence[int] | None = None) -> list[int]:
        """Encode the observation that follows these sampled tokens; None: the first observation.

        An observation that cannot fit a context may be encoded only in part, with more tokens than a context holds.
        Raises ProtocolViolation for such a first observation.
        """
        if len(text) <= PIECE_CHARACTERS:
            return self._whole(text, after)
        return await self._loop.run_in_executor(None, self._encoded_in_pieces, text, after)

    def _whole(self, text: str, after: Sequence[int] | None) -> list[int]:
        return self._format.observation_tokens(text, first=after is None, after=after or ())

    def _encoded_in_pieces(self, text: str, after: Sequence[int] | None) -> list[int]:
        tokens: list[int] = []
        for begin in range(0, len(text), PIECE_CHARACTERS):
            tokens += self._format.observation_tokens(text[begin : begin + PIECE_CHARACTERS], first=False)
            if len(tokens) > CERTAINLY * self._limits.max_context_tokens:
                if after is None:
                    room = f"no room in max_context_tokens {self._limits.max_context_tokens}"
                    raise ProtocolViolation(f"the {len(text)} characters of its first observation leave {room}")
                return tokens
        return self._whole(text, after)

    async def _close(self, held: list[Environment]) -> None:
        """Close the environment in the list `held`, which has the last reference to the environment."""
        failure = await self._within(CLOSE_SECONDS, lambda: self._closed(held), None)
        if failure:  # the job was answered already, or needs no answer
            log.warning("environment_close_failed", reason=str(failure))

    async def _closed(self, held: list[Environment]) -> str:
        """Close the environment and drop its last reference in a tracked call: a `__del__` may block."""
        environment = held.pop()
        try:
            await environment.close()
        except BaseException as error:  # noqa: BLE001 - user code
            end_if_forked(self._pid, error)
            return describe_error(error)
        finally:
            self._held.pop(id(environment), None)
        return ""

    def _spawn(self, work: Coroutine[Any, Any, None], job: Job | None = None) -> None:
        task = self._loop.create_task(work)
        self._tasks[task] = job
        task.add_done_callback(self._worked)


async def _caught(call: Callable[[], Awaitable[T]], home: int) -> T | BaseException:
    try:
        return await call()
    except BaseException as error:  # noqa: BLE001 - user code: an exception is a result
        end_if_forked(home, error)
        return error


async def _ends(task: asyncio.Task[Any], seconds: float) -> bool:
    """Return whether the task ends within this time. The time is counted in polls, so a freeze counts as one poll."""
    look_seconds = min(LOOK_SECONDS, seconds / LOOKS)
    for _ in range(math.ceil(seconds / look_seconds) + 1):
        with suppress(asyncio.CancelledError):  # an environment may cancel all tasks of the loop
            await asyncio.wait({task}, timeout=look_seconds)
        if task.done():
            return True
    return False


def _present_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _failure(job: Job, error: BaseException) -> str:
    if isinstance(error, ProtocolViolation):
        reason, place = message_of(error), ""
    else:
        reason, place = describe_error(error), raised_at(error)[-FAILURE_CHARACTERS // 2 :]
    where = f" ({place})" if place else ""
    return f"environment {job.environment}: {reason}"[: FAILURE_CHARACTERS - len(where)] + where
