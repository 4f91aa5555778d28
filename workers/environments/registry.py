"""Environments by name: the built-in ones, and a user's own as `package.module:Class`.

Keeps true: whatever is wrong with a name is one UnknownEnvironment that says which names there are, raised before any
trajectory starts; nothing is imported until its name is asked for.
"""

import importlib
import inspect
import signal
from collections.abc import Callable

from rose.schemas.errors import UsageError, describe_error
from rose.workers.environments.protocol import Environment

BUILT_IN = {
    "calculator": "rose.workers.environments.calculator:Calculator",
    "frozenlake": "rose.workers.environments.gymnasium_adapter:FrozenLake",
}
"""Name to `module:class`."""

ROSE = ("rose",)
"""ROSE's own package: nothing else can be imported by this name."""

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
        hint = _taken(error) or _choices()
        raise UnknownEnvironment(
            f"environment {name!r}: cannot import {module_name} ({describe_error(error)}); {hint}"
        ) from error
    if factory is None:
        raise UnknownEnvironment(f"environment {name!r}: {module_name} has no {attribute}; {_choices()}")
    if wrong := _wrong(factory):
        raise UnknownEnvironment(f"environment {name!r}: {attribute} {wrong}; {_choices()}")
    return factory  # type: ignore[no-any-return]


def _wrong(factory: object) -> str:
    """Why nothing like this makes an environment; empty when it may."""
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
        return ""
    try:
        signature.bind()
    except TypeError as error:
        return f"cannot be made without arguments ({error}): what a task needs comes to `reset`"
    return ""


def _is_plain(method: object) -> bool:
    """Whether this is a function of Python whose result cannot be awaited, as far as that shows."""
    function = inspect.unwrap(method) if inspect.isfunction(method) else method
    return inspect.isfunction(function) and not inspect.iscoroutinefunction(function)


def _taken(error: BaseException) -> str:
    """What to do about a user's module that is called like a package of ROSE; empty for any other error."""
    module = getattr(error, "obj", None) if isinstance(error, AttributeError) else error
    name = str(getattr(module, "__name__", getattr(module, "name", ""))).partition(".")[0]
    return f"{name} is a package of ROSE's own: call a module of yours otherwise" if name in ROSE else ""


def _choices() -> str:
    return f"use {', '.join(BUILT_IN)}, or package.module:Class of your own"
