"""Tasks of verifiers (`verifiers.v1`): the policy is the model of an agent that verifiers runs.

Keeps true
- verifiers runs the episode: its environment, its harness and its rewards. Each request of the agent to its model is
  one turn; the rewards come with the last one.
- An episode that verifiers does not end with `ok` is an infrastructure failure, never a reward of 0.
- A seed names a task: its number, modulo the number of tasks. `{"index": 3}` as arguments names another one.
- A restored task has played the same actions in a new episode, and has seen the same.

A role without a harness of its own talks to its model in this process, without tools. With a harness (`bash`, `null`)
verifiers starts the harness's program in the role's runtime.
"""

import asyncio
import functools
import itertools
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar

import aiohttp
import msgspec

from rose.schemas.errors import UsageError
from rose.workers.environments.agent_endpoint import AgentEndpoint
from rose.workers.environments.protocol import (
    EnvironmentArgumentError,
    FirstObservation,
    JsonValue,
    LifeCycleError,
    Step,
)
from rose.workers.environments.replayed_actions import ReplayedActions, ReplayedTask

MODEL = "policy"
"""Name of the model in the requests of an agent."""


class VerifiersArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments of a prompt."""

    index: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Number of the task; default: the seed, modulo the number of tasks."""


class EpisodeFailed(Exception):
    """verifiers has ended an episode with errors."""


class Tasks:
    """The tasks of a taskset, loaded once in a process, as many as are asked for."""

    def __init__(self, taskset: Any, most: int) -> None:
        self._source = iter(taskset if taskset.bounded else taskset.take(most))
        self._most = None if taskset.bounded else most
        self._loaded: list[Any] = []
        self._lock = threading.Lock()

    def count(self) -> int:
        """Number of tasks. A bounded taskset is loaded whole."""
        if self._most is not None:
            return self._most
        with self._lock:
            self._loaded += self._source
            return len(self._loaded)

    def task(self, index: int) -> Any:
        """Return a task by its number."""
        with self._lock:
            self._loaded += itertools.islice(self._source, max(0, index + 1 - len(self._loaded)))
            return self._loaded[index]


class Verifiers(ReplayedTask):
    """An environment of verifiers. Subclasses name it."""

    env: ClassVar[Mapping[str, Any]]
    """The block `[env]` of verifiers, such as `{"taskset": {"id": "gsm8k-v1"}}`."""
    most_tasks: ClassVar[int] = 10_000
    """Number of tasks of a taskset that generates them without an end."""
    turn_limit: ClassVar[int] = 64
    """Turns after which a task ends without the rewards of verifiers."""

    def __init_subclass__(cls) -> None:
        """Import verifiers with the module of the subclass: the import takes seconds."""
        super().__init_subclass__()
        try:
            import verifiers.v1  # noqa: F401
        except ImportError as error:
            raise UsageError(
                f"{cls.__name__} needs verifiers ({error}): install rose-rollouts[verifiers] in an environment "
                "without vLLM"
            ) from None

    def __init__(self) -> None:
        super().__init__()
        self._endpoint: AgentEndpoint | None = None
        self._episode: asyncio.Task[Any] | None = None
        self._done = False

    @property
    def origin(self) -> str:
        """Name of the package."""
        return "verifiers"

    def solved(self, reward: float) -> bool | None:
        """Whether the reward of an episode means success; None if it does not say."""
        return reward > 0

    async def reset(self, seed: int, arguments: Mapping[str, JsonValue]) -> str | FirstObservation:
        """Begin the episode; return the first request of its agent."""
        try:
            given = msgspec.convert(dict(arguments), VerifiersArguments)
        except msgspec.ValidationError as error:
            raise EnvironmentArgumentError(f"{type(self).__name__} does not take these arguments: {error}") from None
        await self.close()
        task = await asyncio.to_thread(self._task, seed, given.index)
        self._endpoint = AgentEndpoint()
        url = await self._endpoint.start()
        self._episode = asyncio.create_task(_run_episode(type(self), task, url))
        first: str | FirstObservation | None = await self._either(self._endpoint.first_observation())
        if first is None:
            raise EpisodeFailed("the episode has ended before its agent asked for a turn")
        self._played = ReplayedActions.begun(seed, arguments, first)
        return first

    async def step(self, action: str) -> Step:
        """Answer the agent's request; return its next one, or the rewards."""
        played, endpoint = self._played, self._endpoint
        if played is None or endpoint is None or self._done:
            raise LifeCycleError("step() needs a running task: call reset() or restore() first")
        endpoint.answer(action)
        seen = await self._either(endpoint.next_observation())
        ended = seen is None
        self._done = ended or len(played.actions) + 1 >= self.turn_limit
        reward, info = self._outcome() if ended else (0.0, {})
        step = Step(
            observation=seen or "",
            reward=reward,
            done=self._done,
            success=self.solved(reward) if ended else False,
            info={"turns": len(played.actions) + 1, **info},
        )
        played.stepped(action, step)
        return step

    async def close(self) -> None:
        """End the episode."""
        episode, endpoint = self._episode, self._endpoint
        self._episode, self._endpoint, self._played, self._done = None, None, None, False
        if episode is not None:
            episode.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await episode
        if endpoint is not None:
            await endpoint.close()

    def _task(self, seed: int, index: int | None) -> Any:
        tasks = _tasks(type(self))
        count = tasks.count()
        if index is not None and index >= count:
            raise EnvironmentArgumentError(f"{type(self).__name__} has {count} tasks, and no task {index}")
        return tasks.task(seed % count if index is None else index)

    async def _either(self, request: Any) -> Any:
        """Wait for the agent's request or the episode's end. Return the request; None at the end."""
        assert self._episode is not None
        asked = asyncio.ensure_future(request)
        try:
            await asyncio.wait({asked, self._episode}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            self._outcome()  # raises what has ended the episode
            return None
        finally:
            asked.cancel()

    def _outcome(self) -> tuple[float, dict[str, float]]:
        """Return reward and figures of the ended episode. Raises EpisodeFailed."""
        assert self._episode is not None
        episode = self._episode.result()
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            said = "; ".join(f"{error.type}: {error.message}" for error in errors) or "it says no reason"
            raise EpisodeFailed(f"verifiers has ended the episode without a valid result ({said})")
        [trace] = episode.traces
        rewards = {name: signal.value for name, signal in trace.rewards.items() if signal is not None}
        return float(trace.reward), {f"reward_{name}": float(value) for name, value in rewards.items()}


_TASKS: dict[type[Verifiers], Tasks] = {}
_LOADING = threading.Lock()


def _tasks(kind: type[Verifiers]) -> Tasks:
    with _LOADING:
        if kind not in _TASKS:
            _TASKS[kind] = Tasks(_load(kind).taskset, kind.most_tasks)
        return _TASKS[kind]


def _load(kind: type[Verifiers]) -> Any:
    """Return a new environment of verifiers. Raises UsageError if it does not have exactly one agent."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    given = dict(kind.env)
    config = resolve_env_config(given)
    roles = list(agent_config_fields(config))
    if len(roles) != 1:
        raise UsageError(f"environment {kind.__name__!r} has the agents {', '.join(roles)}: one policy plays one agent")
    [role] = roles
    agent = dict(given.get(role, {}))
    agent.setdefault("runtime", {"type": "subprocess"})
    environment = load_environment(resolve_env_config(given | {role: agent}))
    if "harness" not in agent:
        _talk_directly(environment, role)
    return environment


def _talk_directly(environment: Any, role: str) -> None:
    """Have the agent of this role ask its model in this process."""
    begin = environment.setup

    async def setup(agents: Any) -> None:
        await begin(agents)
        getattr(agents, role).harness = _direct_harness()

    environment.setup = setup


@functools.cache
def _direct_harness() -> Any:
    from verifiers.v1.configs.harness import HarnessConfig
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harness import Harness
    from verifiers.v1.runtimes import ProgramResult
    from verifiers.v1.types import SystemMessage, UserMessage

    class Direct(Harness[HarnessConfig]):  # type: ignore[misc]
        """One request to the model for each message of the user, without a program of its own."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or ())
            if system:
                messages.insert(0, SystemMessage(content=system))
            body = {"model": ctx.model, "messages": [message_to_wire(message) for message in messages]}
            headers = {"Authorization": f"Bearer {secret}"}
            forever = aiohttp.ClientTimeout(total=None)
            async with (
                aiohttp.ClientSession(timeout=forever) as client,
                client.post(f"{endpoint}/chat/completions", json=body, headers=headers) as answer,
            ):
                said = await answer.text()
                return ProgramResult(0 if answer.status == 200 else 1, "", said if answer.status != 200 else "")

    return Direct(HarnessConfig(id="null"))


async def _run_episode(kind: type[Verifiers], task: Any, url: str) -> Any:
    """Run one episode whose agent has its model at this URL; return it."""
    from verifiers.v1.clients import EvalClientConfig, ModelContext

    environment = await asyncio.to_thread(_load, kind)
    client = EvalClientConfig(base_url=url, api_key_var="ROSE_VERIFIERS_KEY")
    async with environment.serving():
        return await environment.run_episode(task, ModelContext(model=MODEL, client=client))
