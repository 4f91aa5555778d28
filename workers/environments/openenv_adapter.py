r"""Environments on a server of OpenEnv, over its WebSocket.

Keeps true
- Each trajectory has a session of its own, which ends with it: the server closes a session when its connection ends.
- An action that the server's action type does not take is a turn with the observation MALFORMED. Any other error of the
  server is an infrastructure failure.
- A restored task has played the same actions in a new session, and has seen the same.
- Nothing of OpenEnv is imported: the messages are JSON.

Example, with `action_field = "guess"` and `observation_field = "hint"`
    reset            -> {"type": "reset", "data": {"seed": 7}}
    observation      <- {"type": "observation", "data": {"observation": {"hint": "1 to 100"}, "done": false}}
    action `50`      -> {"type": "step", "data": {"guess": "50"}}
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar

import aiohttp
import msgspec

from rose.workers.environments.protocol import (
    EnvironmentArgumentError,
    FirstObservation,
    JsonValue,
    LifeCycleError,
    Step,
)
from rose.workers.environments.replayed_actions import ReplayedActions, ReplayedTask

MALFORMED = "?"
"""Observation after an action that the server does not take."""

MAX_MESSAGE_BYTES = 1 << 24
"""Most bytes of a message of the server."""

VALIDATION, CAPACITY = "VALIDATION_ERROR", "CAPACITY_REACHED"
"""Codes of OpenEnv: a message that its types do not take; more sessions than the server has."""


class _Observation(msgspec.Struct, frozen=True):
    observation: dict[str, Any]
    reward: Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)] | bool | None = None
    done: bool = False


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    code: str = ""


class _Answer(msgspec.Struct, frozen=True):
    type: str
    data: msgspec.Raw = msgspec.Raw(b"{}")


class ServerError(Exception):
    """The server reports an error, or breaks its protocol."""

    def __init__(self, sentence: str, code: str = "") -> None:
        super().__init__(sentence)
        self.code = code


class OpenEnv(ReplayedTask):
    """An environment on a server. Subclasses say where, and how actions and observations read."""

    url: ClassVar[str]
    """Address of the server's WebSocket, such as `ws://localhost:8000/ws`."""
    action_field: ClassVar[str] = ""
    """Field of the server's action that holds the policy's text. Without it the policy writes the action as JSON."""
    observation_field: ClassVar[str] = ""
    """Field of the server's observation that the policy reads. Without it the policy reads the observation as JSON."""
    argument_types: ClassVar[Mapping[str, Any]] = {}
    """Arguments of prompts that the server's `reset` takes besides the seed, with their types as msgspec reads them,
    such as `Annotated[int, msgspec.Meta(ge=1)]`."""
    turn_limit: ClassVar[int] = 64
    """Turns after which a task ends, whether or not the server ends it."""

    def __init__(self) -> None:
        super().__init__()
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._done = False

    @property
    def origin(self) -> str:
        """Address of the server."""
        return self.url

    def encode_action(self, action: str) -> dict[str, Any] | None:
        """Return the server's action for a policy's text; None if there is none."""
        if self.action_field:
            return {self.action_field: action}
        try:
            parsed = json.loads(action, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return None
        return parsed if isinstance(parsed, dict) else None

    def describe(self, observation: Mapping[str, Any]) -> str:
        """Return the text of an observation, which the policy reads."""
        if not self.observation_field:
            return json.dumps(observation, ensure_ascii=False, sort_keys=True)
        if self.observation_field not in observation:
            raise ServerError(f"an observation of {self.url} has no {self.observation_field}: {', '.join(observation)}")
        return str(observation[self.observation_field])

    def first_observation(self, observation: Mapping[str, Any]) -> str | FirstObservation:
        """Return what the policy reads first, such as a `FirstObservation` with a system prompt."""
        return self.describe(observation)

    def solved(self, reward: float) -> bool | None:
        """Whether the last reward of a task means success; None if it does not say."""
        return reward > 0

    async def reset(self, seed: int, arguments: Mapping[str, JsonValue]) -> str | FirstObservation:
        """Begin the task in a new session."""
        self._check_arguments(arguments)
        await self.close()
        self._client = aiohttp.ClientSession()
        try:
            self._socket = await self._client.ws_connect(self.url, max_msg_size=MAX_MESSAGE_BYTES)
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"no OpenEnv server answers at {self.url} ({error}): start it, or set url") from error
        try:
            seen = await self._ask("reset", {"seed": seed, **arguments})
        except ServerError as error:
            if error.code == VALIDATION:
                raise EnvironmentArgumentError(f"{self.url} does not take {dict(arguments)}: {error}") from None
            raise
        first = self.first_observation(seen.observation)
        self._played = ReplayedActions.begun(seed, arguments, first)
        return first

    async def step(self, action: str) -> Step:
        """Take one action."""
        played = self._played
        if played is None or self._done:
            raise LifeCycleError("step() needs a running task: call reset() or restore() first")
        seen = await self._act(action)
        reward = float(seen.reward or 0.0) if seen is not None else 0.0
        ended = seen is not None and seen.done
        self._done = ended or len(played.actions) + 1 >= self.turn_limit
        step = Step(
            observation=MALFORMED if seen is None else self.describe(seen.observation),
            reward=reward,
            done=self._done,
            success=self.solved(reward) if ended else False,
            info={"turns": len(played.actions) + 1},
        )
        played.stepped(action, step)
        return step

    async def close(self) -> None:
        """End the session."""
        client, socket = self._client, self._socket
        self._client, self._socket, self._played, self._done = None, None, None, False
        with suppress(aiohttp.ClientError, OSError):
            if socket is not None and not socket.closed:
                await socket.send_str('{"type": "close"}')
                await socket.close()
        if client is not None:
            await client.close()

    def _check_arguments(self, arguments: Mapping[str, JsonValue]) -> None:
        """Raises EnvironmentArgumentError."""
        for name, value in arguments.items():
            if name not in self.argument_types:
                known = ", ".join(self.argument_types) or "none"
                raise EnvironmentArgumentError(f"{type(self).__name__} takes no argument {name!r}: it takes {known}")
            try:
                msgspec.convert(value, self.argument_types[name])
            except msgspec.ValidationError as error:
                raise EnvironmentArgumentError(f"{type(self).__name__}, argument {name!r}: {error}") from None

    async def _act(self, action: str) -> _Observation | None:
        """Return the server's observation; None if it does not take the action."""
        encoded = self.encode_action(action)
        if encoded is None:
            return None
        try:
            return await self._ask("step", encoded)
        except ServerError as error:
            if error.code == VALIDATION:
                return None
            raise

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> _Observation:
        assert self._socket is not None
        try:
            await self._socket.send_str(json.dumps({"type": kind, "data": data}, ensure_ascii=True))
            message = await self._socket.receive()
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(f"the session of {self.url} has ended: {error}") from error
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ServerError(f"{self.url} has ended the session ({message.type.name}) instead of answering {kind}")
        return self._read(message.data, kind)

    def _read(self, text: str, kind: str) -> _Observation:
        try:
            answer = msgspec.json.decode(text, type=_Answer)
            if answer.type != "error":
                return msgspec.json.decode(answer.data, type=_Observation)
            error = msgspec.json.decode(answer.data, type=_Error)
        except msgspec.DecodeError as wrong:
            raise ServerError(
                f"{self.url} answers {kind} with something that is no message of OpenEnv: {wrong}"
            ) from None
        advice = ""
        if error.code == CAPACITY:
            advice = "; raise max_concurrent_envs of its create_app to environment.max_live_environments of all workers"
        raise ServerError(f"{self.url} reports {error.code} to {kind}: {error.message}{advice}", error.code)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
