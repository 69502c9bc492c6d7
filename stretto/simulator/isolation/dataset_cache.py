"""Cache of data set readers, so that a thousand simulated workers parse a data set once."""

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
"""Modules, and the name prefix of their functions whose result depends only on arguments and files."""


class DatasetCache:
    """Replaces readers by functions that read once and return copies; `end` restores the readers."""

    def __init__(self) -> None:
        self._results: dict[Any, Any] = {}
        self._originals: list[tuple[ModuleType, str, Any]] = []
        self._cancels: list[Callable[[], None]] = []
        self._is_closed = False

    def begin(self) -> None:
        """Replace the readers, also in modules that are imported later."""
        for module, prefix in READERS.items():
            self._cancels.append(after_import(module, functools.partial(self._wrap, prefix=prefix)))

    def end(self) -> None:
        """Restore the readers."""
        self._is_closed = True
        for cancel in self._cancels:
            cancel()
        for module, name, reader in self._originals:
            setattr(module, name, reader)

    def _wrap(self, module: ModuleType, prefix: str) -> None:
        if self._is_closed:
            return
        for name, reader in list(vars(module).items()):
            if name.startswith(prefix) and callable(reader) and not _is_random(reader):
                self._originals.append((module, name, reader))
                setattr(module, name, self._cached(name, reader))

    def _cached(self, name: str, reader: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(reader)
        def read(*args: Any, **kwargs: Any) -> Any:
            if not all(map(_is_hashable_value, (*args, *kwargs.values()))):
                return reader(*args, **kwargs)  # an open file, for example, returns something else each time
            key = name, args, tuple(sorted(kwargs.items())), tuple(map(_file_state, (*args, *kwargs.values())))
            if key not in self._results:
                self._results[key] = reader(*args, **kwargs)
            return copy.deepcopy(self._results[key])

        return read


def _is_random(reader: Callable[..., Any]) -> bool:
    """True if a reader may return something else each time."""
    try:
        return "random_state" in inspect.signature(reader).parameters
    except ValueError:  # it has no signature
        return True


def _file_state(value: Any) -> object:
    """Return the identity and modification state of the file that a value names, or None."""
    if not isinstance(value, str | bytes | PurePath):
        return None
    try:
        info = os.stat(value)
    except (OSError, ValueError):
        return None
    return info.st_dev, info.st_ino, info.st_mtime_ns, info.st_size


def _is_hashable_value(value: Any) -> bool:
    """True for numbers, texts, paths, types, and tuples of them, whose value is their identity."""
    if isinstance(value, tuple):
        return all(map(_is_hashable_value, value))
    return value is None or isinstance(value, str | bytes | int | float | type | PurePath)
