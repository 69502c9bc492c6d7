"""Functions that read a data set: what one worker's script has read is not parsed anew for each of a thousand."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from stretto.launch.seeding import after_import

READERS = {"sklearn.datasets": "load_", "numpy": "loadtxt"}
"""Modules, and how the names of their functions begin that give the same for the same arguments."""


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
            if name.startswith(start) and callable(reader):
                self._before.append((module, name, reader))
                setattr(module, name, self._once(name, reader))

    def _once(self, name: str, reader: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(reader)
        def read(*given: Any, **named: Any) -> Any:
            key = name, given, tuple(sorted(named.items()))
            try:
                known = key in self._found
            except TypeError:  # an argument without a hash, such as an open file
                return reader(*given, **named)
            if not known:
                self._found[key] = reader(*given, **named)
            return copy.deepcopy(self._found[key])

        return read
