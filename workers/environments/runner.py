"""A thread in which environments run, on an event loop of its own.

Keeps true
- A slow environment holds nobody up, and one that fails, hangs or lies fails its own trajectory alone.
- No more than `max_live` environments are held or stepped at once, but for steps that were given up. The longest unused
  is closed first; it is restored from its trajectory's state when its next turn comes.
- Every job of the present life is answered once, in whatever order they end and whatever is raised, swallowed or
  cancelled, for as long as no environment blocks the thread. That shows from outside: `beats` stands still.
- A step is not late because this process was frozen: of a freeze no more counts than of any look.
"""

import asyncio
import copy
import ctypes
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any, TypeVar

import structlog

from schemas.arrays import pack_tokens, unpack_tokens
from schemas.errors import UsageError, in_words, said_by
from workers.environments.home import Begun
from workers.environments.protocol import Environment, Step
from workers.environments.steps import Stepped
from workers.environments.turn_format import TurnFormat

CLOSE_SECONDS = 10.0
"""How long environments may take to close before the worker goes on without them."""

LOOK_SECONDS = 1.0
"""The longest time between two looks at whether a call has ended."""

LOOKS = 8
"""So many at least make a call late, whatever the clock says."""

CANCELS = 2
"""A call that goes on after so many cancellations is given up: its environment is closed beneath it."""

CANCEL_SECONDS = 5.0
"""How long a call that was cancelled may take to end."""

BEAT_SECONDS = 0.05
"""Between two beats of a loop that nobody blocks."""

T = TypeVar("T")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One thing to do with one trajectory's environment."""

    life: int
    """Of the homes for which it is done."""
    trajectory_id: str
    environment: str
    ticket: object
    """Comes back with the answer, untouched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset(Job):
    """Begin the task."""

    seed: int
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance(Job):
    """Take an action."""

    tokens: bytes
    """As sampled, packed."""
    stop_token_ids: tuple[int, ...] = ()
    """Of the turn, beside the model's own."""
    state: bytes
    """To restore from when the environment is not held any more."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The environment does not take the prompt's arguments."""

    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The environment failed; the trajectory cannot go on."""

    failure: str


Answer = Begun | Stepped | Refused | Failed


class Runner:
    """Runs jobs. All but the methods with an underscore are called from outside its thread."""

    def __init__(
        self,
        turn_format: TurnFormat,
        create: Callable[[str], Environment],
        answer: Callable[[Job, Answer], None],
        *,
        life: int,
        max_live: int,
        timeout_seconds: float,
    ) -> None:
        """`create` makes a new environment of a name; `answer` is called in its thread."""
        self.beats = 0
        """Grows while nobody blocks the loop."""
        self._format = turn_format
        self._create = create
        self._answer = answer
        self._max_live = max_live
        self._timeout_seconds = timeout_seconds
        self._life = life
        self._idle: OrderedDict[str, Environment] = OrderedDict()
        self._busy = 0
        self._slots = asyncio.Semaphore(max_live)
        self._tasks: dict[asyncio.Task[Answer | None], Job | None] = {}
        """The runner's own. Nobody but an environment that cancels whatever it finds cancels these."""
        self._calls: dict[asyncio.Task[Any], Job | None] = {}
        """Into environments, given up or not."""
        self._closing = self._stopped = False
        self._loop = asyncio.new_event_loop()
        self._loop.call_soon(self._beat)
        self._thread = Thread(target=self._run, name="environments", daemon=True)
        self._thread.start()

    @property
    def live(self) -> int:
        """Environments that are held or stepped; as another thread sees it, so a figure for people."""
        return len(self._idle) + self._busy

    def start(self, jobs: Sequence[Job]) -> None:
        """Begin with these jobs."""
        self._loop.call_soon_threadsafe(self._begin, jobs)

    def let_go(self, trajectory_ids: Iterable[str]) -> None:
        """Close the environments of trajectories that have ended."""
        self._loop.call_soon_threadsafe(self._drop, list(trajectory_ids))

    def new_life(self, life: int) -> None:
        """Close all environments: what was held of earlier lives does not count any more."""
        self._loop.call_soon_threadsafe(self._forget, life)

    def running(self) -> Job | None:
        """The job whose own code has the thread at this moment."""
        task = asyncio.current_task(self._loop)
        return None if task is None else self._calls.get(task) or self._tasks.get(task)

    def abandon(self) -> None:
        """Have the thread end when it can: a sleep has to be slept, a loop in Python is broken off."""
        self._leave()
        if self._thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), ctypes.py_object(SystemExit))

    def close(self) -> None:
        """Stop everything. An environment that blocks the event loop is left behind."""
        self._leave()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("environments_not_closed", seconds=CLOSE_SECONDS)
            self.abandon()
        else:
            self._loop.close()

    def _leave(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.run_coroutine_threadsafe(self._shut(), self._loop)

    def _run(self) -> None:
        while not self._stopped:  # an environment may stop the loop, too
            with suppress(SystemExit, KeyboardInterrupt):  # of its callback, or as `abandon` raises it in whatever runs
                self._loop.run_forever()

    def _beat(self) -> None:
        self.beats += 1
        self._loop.call_later(BEAT_SECONDS, self._beat)

    def _begin(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._spawn(self._work(job), job)

    def _drop(self, trajectory_ids: list[str]) -> None:
        for trajectory_id in trajectory_ids:
            environment = self._idle.pop(trajectory_id, None)
            if environment is not None:
                self._spawn(self._close(environment))

    def _forget(self, life: int) -> None:
        self._life = life
        self._drop(list(self._idle))

    async def _shut(self) -> None:
        """End the thread, with everything closed as far as that goes."""
        try:
            for call in list(self._calls):
                call.cancel()
            self._drop(list(self._idle))
            for task in list(self._tasks):
                await _ends(task, CLOSE_SECONDS)
        finally:
            self._stopped = True
            self._loop.stop()

    async def _work(self, job: Job) -> Answer | None:
        async with self._slots:
            if self._closing or job.life != self._life:
                return None  # nobody waits for it any more
            environment = self._idle.pop(job.trajectory_id, None)
            self._busy += 1
            try:
                while len(self._idle) + self._busy > self._max_live:
                    await self._close(self._idle.popitem(last=False)[1])
                if environment is None:
                    return await self._with_new(job)
                return await self._guarded(job, environment, restore=False)
            finally:
                self._busy -= 1

    def _worked(self, task: asyncio.Task[Answer | None]) -> None:
        """Answer the job that this task was for, however it ended."""
        job = self._tasks.pop(task)
        if job is None or self._closing:
            return
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        answer = task.result() if error is None else Failed(_failure(job, error))
        if answer is not None:
            self._answer(job, answer)

    async def _with_new(self, job: Job) -> Answer:
        try:
            environment = self._create(job.environment)
        except BaseException as error:  # noqa: BLE001 - user code: whatever it raises fails this trajectory
            return Failed(_failure(job, error))
        return await self._guarded(job, environment, restore=isinstance(job, Advance))

    async def _guarded(self, job: Job, environment: Environment, *, restore: bool) -> Answer:
        """Do the job within the time allowed; hold the environment afterwards or close it."""
        done = await self._within(self._timeout_seconds, lambda: self._do(job, environment, restore=restore), job)
        ended = isinstance(done, BaseException) or (isinstance(done, Stepped) and done.done)
        if ended or self._closing or job.life != self._life:
            await self._close(environment, job)
        else:
            self._idle[job.trajectory_id] = environment
        if isinstance(done, UsageError) and isinstance(job, Reset):
            return Refused(said_by(done))
        return Failed(_failure(job, done)) if isinstance(done, BaseException) else done

    async def _within(self, seconds: float, call: Callable[[], Awaitable[T]], job: Job | None) -> T | BaseException:
        """What the call gives or raises. One that is late is cancelled; one that goes on all the same is given up."""
        task = self._loop.create_task(_caught(call))
        self._calls[task] = job
        task.add_done_callback(self._calls.pop)
        in_time = ended = await _ends(task, seconds)
        for _ in range(CANCELS):
            if not ended:
                task.cancel()
                ended = await _ends(task, CANCEL_SECONDS)
        outcome = task.result() if ended and not task.cancelled() else asyncio.CancelledError()
        if isinstance(outcome, BaseException) and not in_time:
            return TimeoutError(f"took longer than {seconds:g} s")
        return outcome

    async def _do(self, job: Job, environment: Environment, *, restore: bool) -> Begun | Stepped:
        if self._closing:
            raise asyncio.CancelledError  # as what was under way is
        if isinstance(job, Reset):
            text = await environment.reset(job.seed, copy.deepcopy(job.arguments))
            return Begun(pack_tokens(self._format.observation_tokens(text, first=True)), await _state(environment))
        assert isinstance(job, Advance)
        if restore:
            await environment.restore(job.state)
        sampled = unpack_tokens(job.tokens)
        action = self._format.action_text(sampled, job.stop_token_ids)
        began = time.perf_counter()
        step = await environment.step(action)
        seconds = time.perf_counter() - began
        if not isinstance(step, Step):
            raise TypeError(f"step() gave a {type(step).__name__}, not a Step")
        return Stepped(
            observation=b""
            if step.done
            else pack_tokens(self._format.observation_tokens(step.observation, first=False, after=sampled)),
            reward=float(step.reward),
            done=bool(step.done),
            success=None if step.success is None else bool(step.success),
            info=step.info,
            state=b"" if step.done else await _state(environment),
            environment_seconds=seconds,
        )

    async def _close(self, environment: Environment, job: Job | None = None) -> None:
        error = await self._within(CLOSE_SECONDS, lambda: environment.close(), job)
        if isinstance(error, BaseException):  # its trajectory has been decided already
            log.warning("environment_close_failed", error=in_words(error))

    def _spawn(self, work: Coroutine[Any, Any, Answer | None], job: Job | None = None) -> None:
        task = self._loop.create_task(work)
        self._tasks[task] = job
        task.add_done_callback(self._worked)


async def _caught(call: Callable[[], Awaitable[T]]) -> T | BaseException:
    try:
        return await call()
    except BaseException as error:  # noqa: BLE001 - user code: whatever it raises is what came of it
        return error


async def _ends(task: asyncio.Task[Any], seconds: float) -> bool:
    """Whether it ends within this time, told by looks: a freeze takes one at most, and there is one to spare."""
    look_seconds = min(LOOK_SECONDS, seconds / LOOKS)
    for _ in range(math.ceil(seconds / look_seconds) + 1):
        with suppress(asyncio.CancelledError):  # of an environment that cancels whatever it finds
            await asyncio.wait({task}, timeout=look_seconds)
        if task.done():
            return True
    return False


async def _state(environment: Environment) -> bytes:
    state = await environment.snapshot()
    if not isinstance(state, bytes):
        raise TypeError(f"snapshot() gave a {type(state).__name__}, not bytes")
    return state


def _failure(job: Job, error: BaseException) -> str:
    return f"environment {job.environment}: {in_words(error)}"
