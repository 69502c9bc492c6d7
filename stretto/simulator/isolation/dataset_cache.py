"""Functions that read a data set: what one worker's script has read is not parsed anew for each of a thousand."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable
from pathlib import PurePath
from types import ModuleType
from typing import Any

from stretto.launcher.seeding import after_import

READERS = {"sklearn.datasets": "load_", "numpy": "loadtxt"}
"""Modules, and how the names of their functions begin that give the same for the same arguments and files."""


class ReadOnce:
    """Puts functions in the place of readers that read once, and give everyone a copy; `end` puts them back."""

    def __init__(self) -> None:
        self._found: dict[Any, Any] = {}
        self._before: list[tuple[ModuleType, str, Any]] = []
        self._ended = False

    def begin(self) -> None:
        """From now on, also in modules that are imported later."""
        for module, start in READERS.items():
            after_import(module, functools.partial(self._wrap, start=start))

    def end(self) -> None:
        """No longer."""
        self._ended = True
        for module, name, reader in self._before:
            setattr(module, name, reader)

    def _wrap(self, module: ModuleType, start: str) -> None:
        if self._ended:
            return
        for name, reader in list(vars(module).items()):
            if name.startswith(start) and callable(reader) and not _draws(reader):
                self._before.append((module, name, reader))
                setattr(module, name, self._once(name, reader))

    def _once(self, name: str, reader: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(reader)
        def read(*given: Any, **named: Any) -> Any:
            if not all(map(_is_plain, (*given, *named.values()))):
                return reader(*given, **named)  # an open file, which gives something else each time
            key = name, given, tuple(sorted(named.items())), tuple(map(_stamp, (*given, *named.values())))
            if key not in self._found:
                self._found[key] = reader(*given, **named)
            return copy.deepcopy(self._found[key])

        return read


def _draws(reader: Callable[..., Any]) -> bool:
    """Whether it may give something else each time."""
    try:
        return "random_state" in inspect.signature(reader).parameters
    except ValueError:  # it says nothing of itself
        return True


def _stamp(value: Any) -> object:
    """Which file it is the name of, if it is one, and of what state."""
    if not isinstance(value, str | bytes | PurePath):
        return None
    try:
        found = os.stat(value)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _is_plain(value: Any) -> bool:
    """Whether it is all that it says: a number, a text, a name of a type, or a few of those."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bytes | int | float | type | PurePath)
