"""Environments by name: the built-in ones, and a user's own as `package.module:Class`.

Keeps true: whatever is wrong with a name is one UnknownEnvironment that says which names there are, raised before any
trajectory starts; nothing is imported until its name is asked for.
"""

import importlib
import inspect
import signal
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path

from rose.schemas.errors import UsageError, describe_error
from rose.workers.environments.protocol import Environment

BUILT_IN = {
    "calculator": "rose.workers.environments.calculator:Calculator",
    "frozenlake": "rose.workers.environments.gymnasium_adapter:FrozenLake",
}
"""Name to `module:class`."""

METHODS = ("reset", "step", "snapshot", "restore", "close")


class UnknownEnvironment(UsageError):
    """A name that leads to no environment."""


def load_environment(name: str) -> Callable[[], Environment]:
    """The class (or other callable without arguments) that makes this environment. Raises UnknownEnvironment."""
    target = BUILT_IN.get(name, name)
    module_name, colon, attribute = target.partition(":")
    if not (module_name and colon and attribute):
        raise UnknownEnvironment(f"unknown environment {name!r}: {_choices()}")
    try:
        module = importlib.import_module(module_name)
        factory = getattr(module, attribute, None)
    except BaseException as error:  # a user's module may raise anything, as `sys.exit` does
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            raise  # it may be of Ctrl-C, which a program with a handler of its own hears otherwise
        hint = _collision_advice(_module_of(error), module_name) or _choices()
        raise UnknownEnvironment(
            f"environment {name!r}: cannot import {module_name} ({describe_error(error)}); {hint}"
        ) from error
    if factory is None:
        raise UnknownEnvironment(
            f"environment {name!r}: {module_name} has no {attribute}; {_collision_advice(module_name) or _choices()}"
        )
    if wrong := _factory_error(factory):
        raise UnknownEnvironment(f"environment {name!r}: {attribute} {wrong}; {_choices()}")
    return factory  # type: ignore[no-any-return]


def _factory_error(factory: object) -> str | None:
    """Why nothing like this makes an environment; None when it may."""
    if not callable(factory):
        return "is not a class"
    if isinstance(factory, type):
        if missing := [method for method in METHODS if not callable(getattr(factory, method, None))]:
            return f"lacks {', '.join(missing)}"
        if plain := [method for method in METHODS if _is_plain(getattr(factory, method))]:
            return f"has {', '.join(plain)} that nobody can await: write `async def {plain[0]}(...)`, without `yield`"
        if inspect.isabstract(factory):
            return "has abstract methods"
    elif inspect.iscoroutinefunction(factory):
        return "is a coroutine function: it must give the environment at once"
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # of native code
        return None
    try:
        signature.bind()
    except TypeError as error:
        return f"cannot be made without arguments ({error}): what a task needs comes to `reset`"
    return None


def _is_plain(method: object) -> bool:
    """Whether this is a function of Python whose result cannot be awaited, as far as that shows."""
    function = inspect.unwrap(method) if inspect.isfunction(method) else method
    return inspect.isfunction(function) and not inspect.iscoroutinefunction(function)


def _collision_advice(*names: str) -> str | None:
    """What to do about a user's module whose name another module had before; None where there is none."""
    for name in names:
        top = name.partition(".")[0]
        loaded = getattr(sys.modules.get(top), "__spec__", None)
        users = PathFinder.find_spec(top) if top else None
        if loaded and users and users.origin and loaded.origin and not _same(loaded.origin, users.origin):
            return f"{top} is taken by a module that Python or ROSE has loaded already: call {users.origin} otherwise"
    return None


def _same(file: str, other: str) -> bool:
    try:
        return Path(file).samefile(other)
    except OSError:  # built in
        return file == other


def _module_of(error: BaseException) -> str:
    """The module of which the import of another one wanted what it has not; empty where the error tells of none."""
    module = getattr(error, "obj", None) if isinstance(error, AttributeError) else error
    return str(getattr(module, "__name__", None) or getattr(module, "name", None) or "")


def _choices() -> str:
    return f"use {', '.join(BUILT_IN)}, or package.module:Class of your own"
