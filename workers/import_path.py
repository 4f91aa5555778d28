"""Classes by name: the built-in ones of a kind, and a user's own as `package.module:Class`.

Keeps true
- Whatever is wrong with a name is one sentence that says which names there are.
- Nothing is imported until its name is asked for.
"""

import _thread
import importlib
import inspect
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from rose.schemas.errors import UsageError, describe_error, message_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """The classes of one kind."""

    kind: str
    """Name of the kind in sentences."""
    built_in: Mapping[str, str]
    """Name to `module:class`."""
    error: type[UsageError]
    """Raised for a name that leads to no usable class."""

    def load(self, name: str, factory_error: Callable[[object], str | None]) -> Any:
        """Import the class, or other callable, that `name` leads to.

        `factory_error` returns why the imported object cannot be used; None if it can.

        Raises the registry's `error`.
        """
        target = self.built_in.get(name, name)
        module_name, colon, attribute = target.partition(":")
        if not (module_name and colon and attribute):
            raise self.error(f"unknown {self.kind} {name!r}: {self._choices()}")
        start_thread = _thread.start_new_thread
        try:
            module = importlib.import_module(module_name)
            factory = getattr(module, attribute, None)
        except BaseException as error:  # a user's module may raise anything, as `sys.exit` does
            if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                raise  # it may be of Ctrl-C, which a program with a handler of its own hears otherwise
            advice = _name_taken(_module_of(error), module_name)
            if "attempted relative import" in message_of(error):
                advice = "name the parent folder of its package in `import_paths`, and use package.module:Class"
            if isinstance(error, ImportError):
                advice = advice or self._choices()
            cause = f"cannot import {module_name} ({describe_error(error)})"
            raise self.error(f"{self.kind} {name!r}: {cause}{f'; {advice}' if advice else ''}") from error
        if _thread.start_new_thread is not start_thread:
            _thread.start_new_thread = start_thread
            raise self.error(
                f"{self.kind} {name!r}: {module_name} replaces Python's threads, as gevent.monkey.patch_all() does: do "
                "that in a child process"
            )
        if factory is None:
            hint = _name_taken(module_name) or self._choices()
            raise self.error(f"{self.kind} {name!r}: {module_name} has no {attribute}; {hint}")
        if wrong := factory_error(factory):
            raise self.error(f"{self.kind} {name!r}: {attribute} {wrong}; {self._choices()}")
        return factory

    def _choices(self) -> str:
        return f"use {', '.join(self.built_in)}, or package.module:Class of your own"


def class_error(factory: object, *, methods: Sequence[str], arguments: int, unbound: str) -> str | None:
    """Return why `factory` makes no object with these methods; None if it does.

    `arguments`: number of positional arguments that `factory` will be given. `unbound`: the sentence for a factory that
    does not take them, with `{error}` in place of Python's message.
    """
    if not callable(factory):
        return "is not a class"
    if isinstance(factory, type):
        if missing := [method for method in methods if _lacks(factory, method)]:
            return f"lacks {', '.join(missing)}"
        if inspect.isabstract(factory):
            return "has abstract methods"
    elif inspect.iscoroutinefunction(factory):
        return "is a coroutine function: it must return the object at once"
    if error := binding_error(factory, arguments):
        return unbound.format(error=error)
    return None


def _lacks(factory: type, method: str) -> bool:
    """Whether the class has no such method, or has only the empty one of ROSE's protocol, from which it is derived."""
    owner = next((kind for kind in factory.__mro__ if method in vars(kind)), None)
    is_empty = owner is not None and owner.__module__.startswith("rose.") and vars(owner).get("_is_protocol", False)
    return is_empty or not callable(getattr(factory, method, None))


def binding_error(function: Callable[..., Any], arguments: int) -> str | None:
    """Return Python's message if `function` does not take this number of positional arguments, else None."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of native code has none
        return None
    try:
        signature.bind(*[None] * arguments)
    except TypeError as error:
        return str(error)
    return None


def with_import_paths(paths: Iterable[Path]) -> list[str]:
    """Return `sys.path` with a user's folders in front."""
    own = dict.fromkeys(str(path.resolve()) for path in paths)
    return [*(path for path in own if path not in sys.path), *sys.path]


def _name_taken(*names: str) -> str | None:
    """Return advice about a user's module whose name another module had before; None if there is none."""
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
    """Return the module that lacks an imported name; empty if the error names no module."""
    module = getattr(error, "obj", None) if isinstance(error, AttributeError) else error
    return str(getattr(module, "__name__", None) or getattr(module, "name", None) or "")
