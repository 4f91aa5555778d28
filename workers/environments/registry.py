"""Environments by name: the built-in ones, and a user's own as `package.module:Class`.

Keeps true: whatever is wrong with a name is one UnknownEnvironment that says which names there are, raised before any
trajectory starts; nothing is imported until its name is asked for.
"""

import importlib
from collections.abc import Callable

from schemas.errors import UsageError, in_words
from workers.environments.protocol import Environment

BUILT_IN = {
    "calculator": "workers.environments.calculator:Calculator",
    "frozenlake": "workers.environments.gymnasium_adapter:FrozenLake",
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
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may raise anything, as `sys.exit` does
        raise UnknownEnvironment(
            f"environment {name!r}: cannot import {module_name} ({in_words(error)}); {_choices()}"
        ) from error
    factory = getattr(module, attribute, None)
    if factory is None:
        raise UnknownEnvironment(f"environment {name!r}: {module_name} has no {attribute}; {_choices()}")
    if not callable(factory):
        raise UnknownEnvironment(f"environment {name!r}: {attribute} is not a class; {_choices()}")
    if isinstance(factory, type):
        missing = [method for method in METHODS if not callable(getattr(factory, method, None))]
        if missing:
            raise UnknownEnvironment(f"environment {name!r}: {attribute} lacks {', '.join(missing)}; {_choices()}")
    return factory  # type: ignore[no-any-return]


def _choices() -> str:
    return f"use {', '.join(BUILT_IN)}, or package.module:Class of your own"
