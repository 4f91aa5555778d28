"""Environments by name: the built-in ones, and a user's own as `package.module:Class`.

Keeps true: whatever is wrong with a name is one UnknownEnvironment that says which names there are, raised before any
trajectory starts.
"""

import inspect
from collections.abc import Callable

from rose.schemas.errors import UsageError
from rose.workers.environments.protocol import Environment
from rose.workers.import_path import Registry, binding_error, class_error

BUILT_IN = {
    "calculator": "rose.workers.environments.calculator:Calculator",
    "frozenlake": "rose.workers.environments.gymnasium_adapter:FrozenLake",
    "sandbox": "rose.workers.environments.sandbox.environment:SandboxEnvironment",
}
"""Name to `module:class`."""

METHODS = {
    "reset": ("seed", "arguments"),
    "step": ("action",),
    "snapshot": (),
    "restore": ("state",),
    "close": (),
}
"""Methods of an environment, with the arguments that they are called with, by position."""


class UnknownEnvironment(UsageError):
    """A name that leads to no environment."""


ENVIRONMENTS = Registry(kind="environment", built_in=BUILT_IN, error=UnknownEnvironment)


def load_environment(name: str) -> Callable[[], Environment]:
    """The class (or other callable without arguments) that makes this environment. Raises UnknownEnvironment."""
    return ENVIRONMENTS.load(name, _factory_error)  # type: ignore[no-any-return]


def _factory_error(factory: object) -> str | None:
    """Why nothing like this makes an environment; None if it may."""
    unbound = "cannot be made without arguments ({error}): what a task needs comes to `reset`"
    if wrong := class_error(factory, methods=tuple(METHODS), arguments=0, unbound=unbound):
        return wrong
    if not isinstance(factory, type):
        return None
    for name, arguments in METHODS.items():
        method = getattr(factory, name)
        is_static = isinstance(inspect.getattr_static(factory, name), staticmethod)
        is_plain = inspect.isfunction(method) and not hasattr(method, "__wrapped__")  # a decorator may add arguments
        if is_plain and (error := binding_error(method, len(arguments) + (not is_static))):
            return f"has a {name} that does not take ({', '.join(('self', *arguments))}) by position: {error}"
    if plain := [name for name in METHODS if _is_plain(getattr(factory, name), name)]:
        return f"has a plain {', '.join(plain)}: write `async def {plain[0]}(...)`, without `yield`"
    return None


def _is_plain(method: object, name: str) -> bool:
    """Whether a method is defined as a plain function instead of a coroutine function.

    False for a function of another name: a decorator such as `functools.partialmethod` has made it, and only a call
    shows whether it returns an awaitable.
    """
    function = inspect.unwrap(method) if inspect.isfunction(method) else method
    return inspect.isfunction(function) and function.__name__ == name and not inspect.iscoroutinefunction(function)
