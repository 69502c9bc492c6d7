"""Seeding of `random`, `numpy.random` and `torch` by the seed of the run.

A library is seeded right after the script has imported it. Importing it here would be too early for variables that the
script sets (`CUDA_VISIBLE_DEVICES`, `MKL_NUM_THREADS`), and would cost time where the library is not used.
"""

from __future__ import annotations

import functools
import importlib.util
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Seed = Callable[..., Any]


def seed_libraries(seed: int) -> None:
    """Seed `random`, `numpy.random` and `torch`.

    With a seed that is not 0, every seed that the script gives to `random.seed`, `numpy.random.seed` or
    `torch.manual_seed` is shifted by it: three seeds give three trainings even of a script that sets its seed.
    Generators that the script creates keep their seeds.
    """
    _seed_random(random, seed)
    after_import("numpy.random", lambda module: _seed_numpy(module, seed))
    after_import("torch", lambda module: _seed_torch(module, seed))


def _seed_random(module: Any, seed: int) -> None:
    module.seed(seed)
    if seed:
        module.seed = _before(module.seed, lambda value: _shifted_any(value, seed))


def _seed_numpy(module: Any, seed: int) -> None:
    module.seed(seed)
    if seed:
        module.seed = _before(module.seed, lambda value: _shifted_words(value, seed))


def _seed_torch(module: Any, seed: int) -> None:
    module.manual_seed(seed)
    if seed:
        module.manual_seed = module.random.manual_seed = _before(
            module.manual_seed, lambda value: (int(value) + seed) % 2**63
        )


def _shifted_any(value: Any, seed: int) -> Any:
    """Shift a seed of `random`, which may be any value; None is the randomness of the system."""
    if value is None or isinstance(value, int):
        return None if value is None else value + seed
    return f"{value!r} + {seed}"


def _shifted_words(value: Any, seed: int) -> Any:
    """Shift a seed of `numpy.random`: one or several words of 32 bits."""
    if value is None:
        return None
    return [_word(word, seed) for word in value] if isinstance(value, Iterable) else _word(value, seed)


def _word(word: Any, seed: int) -> int:
    return (int(word) + seed) % 2**32


def _before(function: Seed, change: Callable[[Any], Any]) -> Seed:
    """Return the function with a change of its first argument."""

    @functools.wraps(function)
    def changed(*args: Any, **kwargs: Any) -> Any:
        if args:
            return function(change(args[0]), *args[1:], **kwargs)
        return function(**{name: change(value) if name in ("seed", "a") else value for name, value in kwargs.items()})

    return changed


def after_import(name: str, then: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call `then` with a module right after its first import, or immediately if it is imported already.

    Return a function that cancels the call if the module has not been imported.
    """
    finder = _Afterwards(name, then)
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, finder)
    return finder.cancel


class _Afterwards(MetaPathFinder):
    """Finder that lets the other finders find a module and extends its loader by one call. Used once."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def cancel(self) -> None:
        """Remove this finder. Idempotent."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        self.cancel()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: Any) -> None:
        load = loader.exec_module

        def load_and_more(module: ModuleType) -> None:
            loader.exec_module = load
            load(module)
            self._then(module)

        loader.exec_module = load_and_more
