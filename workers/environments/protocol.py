"""The interface of an environment: text out, text in, one action a turn; and checks of what an environment returns.

Keeps true
- The same seed and arguments always give the same task: all trajectories of a group start from it.
- Whatever a policy writes is an ordinary `Step`, malformed or not: a policy cannot crash an environment.
- `restore(snapshot())` on a fresh instance goes on exactly as the original would have: same observations, same rewards.
- Exceptions are for causes other than the policy: bad arguments, a snapshot that does not decode, infrastructure.
- A returned scalar of NumPy or torch is accepted as a number or boolean. No other value is converted: text is not
  parsed as a number or boolean, and no value is converted to text.

A life: `reset`, then `step` until `done`, then `close`. A restored life starts with `restore` instead of `reset`.

An environment whose `reset` also takes the keyword `evaluation` is told by it whether the task is one of an evaluation:
the value is the name of the evaluation set, or empty text for a task to train on. What a later `step` must know of it
belongs into the snapshot.
"""

import inspect
import math
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec

from rose.schemas.errors import UsageError, leaves_of, message_of
from rose.schemas.limits import MAX_INFO_BYTES

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"


class EnvironmentArgumentError(UsageError):
    """A prompt's `arguments` that its environment does not take."""


class SnapshotError(Exception):
    """Bytes that are no snapshot of this environment."""


class LifeCycleError(RuntimeError):
    """A call out of order: `step` before `reset`, or after the last step. A bug of the caller."""


ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of messages. Which of them a policy knows is said by its chat template."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a first observation."""

    role: str
    """One of ROLES."""
    content: str


class FirstObservation(msgspec.Struct, frozen=True, kw_only=True):
    """A first observation of more than one user's message: a system prompt, examples, tools."""

    messages: tuple[Message, ...]
    """Messages in order. The last one is not the assistant's: the policy speaks next."""
    tools: tuple[dict[str, Any], ...] = ()
    """Functions that the policy may call, as OpenAI's API declares them: `{"type": "function", "function": {...}}`."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one action."""

    observation: str
    """Text that the policy reads next. No policy reads the observation of the last step."""
    reward: float
    """Reward of this step; a trajectory's reward is the sum over its steps."""
    done: bool
    success: bool | None = None
    """Whether the task is solved; true only together with `done`. None: the environment has no notion of success."""
    info: dict[str, str | float | int | bool] = {}
    """Further values for people. The values of the last step are stored in the sample."""


@runtime_checkable
class Environment(Protocol):
    """Runs one task at a time. An instance is used by one trajectory, and is never called concurrently."""

    async def reset(self, seed: int, arguments: Mapping[str, JsonValue]) -> str | FirstObservation:
        """Begin the task of this seed; return the first observation. Raises EnvironmentArgumentError.

        A text is a user's message.
        """
        ...

    async def step(self, action: str) -> Step:
        """Take one action of the policy. `action` is the unchanged text that the policy wrote."""
        ...

    async def snapshot(self) -> bytes:
        """Return the whole state between two steps, in a plain format (JSON, MessagePack)."""
        ...

    async def restore(self, state: bytes) -> None:
        """Set the state to that of a snapshot. Raises SnapshotError."""
        ...

    async def close(self) -> None:
        """Release all resources of the environment; may be called twice."""
        ...


EVALUATION = "evaluation"
"""Keyword of `reset` for the name of the evaluation set."""


def takes_evaluation(environment: Environment) -> bool:
    """Return whether `reset` takes the keyword `evaluation`."""
    try:
        parameters = inspect.signature(environment.reset).parameters
    except (TypeError, ValueError):  # a method of a compiled module may have no signature
        return False
    named = parameters.get(EVALUATION)
    return named is not None and named.kind in (named.KEYWORD_ONLY, named.POSITIONAL_OR_KEYWORD)


class ProtocolViolation(Exception):
    """An environment returned a value that cannot be used; the message says why."""


def check_observation(value: object, method: str) -> str:
    """Return the observation if it is valid. Raises ProtocolViolation."""
    if not isinstance(value, str):
        hint = "; decode it" if isinstance(value, bytes | bytearray) else ""
        raise ProtocolViolation(f"{method} gave an observation of type {type(value).__name__}: it must be a str{hint}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        raise ProtocolViolation(
            f"{method} gave an observation with half a surrogate pair (U+{code:04X}, character {error.start}), which "
            "no UTF-8 text can hold: replace it, as with text.encode(errors='replace').decode()"
        ) from None
    return value


def check_first_observation(value: object) -> str | FirstObservation:
    """Return the first observation if it is valid. Raises ProtocolViolation."""
    if not isinstance(value, FirstObservation):
        return check_observation(value, "reset()")
    messages = value.messages
    if not isinstance(messages, tuple | list) or not messages or not all(isinstance(m, Message) for m in messages):
        raise ProtocolViolation(
            "reset() gave a FirstObservation without messages: give a tuple of at least one Message"
        )
    for message in messages:
        if message.role not in ROLES:
            raise ProtocolViolation(f"reset() gave a message of role {message.role!r}: use {', '.join(ROLES)}")
        check_observation(message.content, "reset()")
    if messages[-1].role == "assistant":
        raise ProtocolViolation("reset() gave a FirstObservation that ends with the assistant: the policy speaks next")
    try:
        written = msgspec.json.encode(value.tools)
        tools: Any = msgspec.json.decode(written, type=tuple[dict[str, Any], ...])
    except Exception as error:  # noqa: BLE001 - values of the environment may raise anything
        raise ProtocolViolation(f"reset() gave tools that are no JSON objects: {message_of(error)}") from None
    if len(written) > MAX_INFO_BYTES:
        raise ProtocolViolation(f"reset() gave tools of {len(written)} bytes: {MAX_INFO_BYTES} are allowed")
    return FirstObservation(messages=tuple(messages), tools=tools)


def check_snapshot(value: object) -> bytes:
    """Return the snapshot if it is valid. Raises ProtocolViolation."""
    if not isinstance(value, bytes):
        raise ProtocolViolation(f"snapshot() gave a {type(value).__name__}, not bytes")
    return value


def check_step(value: object) -> Step:
    """Return the step in plain values, without the observation of a last step. Raises ProtocolViolation."""
    if not isinstance(value, Step):
        raise ProtocolViolation(f"step() gave a {type(value).__name__}, not a Step")
    done = _truth(value.done, "done")
    return Step(
        observation="" if done else check_observation(value.observation, "step()"),
        reward=_reward(value.reward),
        done=done,
        success=None if value.success is None else _truth(value.success, "success"),
        info=_info(value.info),
    )


def _reward(given: object) -> float:
    value = _scalar(given)
    if not isinstance(value, bool | int | float):
        raise ProtocolViolation(f"step() gave a reward of type {type(given).__name__}: it must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ProtocolViolation(f"step() gave the reward {number}: it must be a finite number")
    return number


def _truth(given: object, what: str) -> bool:
    value = _scalar(given)
    if isinstance(value, int) and value in (0, 1):  # also True and False
        return bool(value)
    raise ProtocolViolation(f"step() gave {what} of type {type(given).__name__}: it must be True or False")


MAX_INFO_DEPTH = 64
"""Levels of dicts and lists in an info."""


def _info(given: Any) -> dict[str, Any]:
    if given is None or given == {}:
        return {}
    if not isinstance(given, dict) or not _has_text_keys(given):
        raise ProtocolViolation("step() gave an info that is no dict with text keys, at every depth")
    try:
        written = msgspec.msgpack.encode(given, enc_hook=_plain)
        info: dict[str, Any] = msgspec.msgpack.decode(written)
    except Exception as error:  # noqa: BLE001 - values of the environment may raise anything
        raise ProtocolViolation(f"step() gave an info that cannot be written: {message_of(error)}") from None
    if len(written) > MAX_INFO_BYTES:
        raise ProtocolViolation(f"step() gave an info of {len(written)} bytes: {MAX_INFO_BYTES} are allowed")
    return info


def _has_text_keys(value: object, depth: int = 0) -> bool:
    """Whether every dict in `value` has text keys: readers of MessagePack refuse others by default."""
    if depth > MAX_INFO_DEPTH:
        raise ProtocolViolation(f"step() gave an info of more than {MAX_INFO_DEPTH} levels")
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(each, depth + 1) for key, each in value.items())
    return not isinstance(value, list | tuple) or all(_has_text_keys(each, depth + 1) for each in value)


def _plain(value: object) -> object:
    for base in (str, int, float):  # some scalars of NumPy are of these types too
        if isinstance(value, base):
            return base(value)
    plain = _scalar(value)
    if plain is value:
        raise ProtocolViolation(f"it has a value of type {type(value).__name__}")
    return plain


def _scalar(value: object) -> object:
    """Return the Python value of a scalar of NumPy or torch, and any other value unchanged."""
    if isinstance(value, bool | int | float | str) or not callable(item := getattr(value, "item", None)):
        return value
    try:
        return item()
    except Exception:  # noqa: BLE001 - an array of several values is no scalar
        return value


_PATHS = sysconfig.get_paths()

INSTALLED = tuple({f"{_PATHS[name]}/" for name in ("purelib", "platlib")})
"""Folders of installed packages."""

LIBRARY = (*{f"{_PATHS[name]}/" for name in ("stdlib", "platstdlib")}, "<")
"""Beginnings of the file names of Python's own modules."""

CALLERS = tuple(
    str(Path(__file__).with_name(f"{name}.py"))
    for name in ("thread_runner", "jobs", "process_integrity", "runner_server", "main")
)
"""Files of ROSE from which environments are called."""


MAX_CAUSES = 8
"""Number of causes of an error that are looked through."""


def raised_at(error: BaseException) -> str:
    """Return file, line and function of the innermost frame of the user's code.

    Without such a frame, that of the error's cause; then the innermost frame of an installed package; empty text if
    there is none. For a group of errors, the first error counts.
    """
    cause = leaves_of(error)[0]
    frames = list(_frames(cause)) or list(_frames(error))
    for _ in range(MAX_CAUSES):
        if cause.__cause__ is None:
            break
        cause = cause.__cause__
        frames = [*_frames(cause), *frames]
    own = [(file, where) for file, where in frames if not file.startswith((*LIBRARY, *CALLERS))]
    users = [where for file, where in own if not _is_installed(file)]
    installed = [where for file, where in frames if _is_installed(file) and not file.startswith(CALLERS)]
    return (users or installed or [""])[-1]


def _is_installed(file: str) -> bool:
    """Whether a file is of an installed package. Cython names its sources relative to the folder of their build."""
    return file.startswith(INSTALLED) or (file.endswith(".pyx") and not Path(file).is_absolute())


def _frames(error: BaseException) -> Iterator[tuple[str, str]]:
    """Yield the file of each frame, and the place in the file; the innermost frame last."""
    at = error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        place = f"{code.co_filename}, line {at.tb_lineno}, in {code.co_name}"
        yield code.co_filename, place.encode(errors="replace").decode()
        at = at.tb_next
