"""Process-global state per simulated worker: random states, torch's modes, `__main__`, working directory, output.

The same holds for singletons of Accelerate and Lightning: the number of a worker and its accumulation counters would
otherwise be those of all workers.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, TextIO

import numpy as np
import torch

SEED_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    (random, "seed"),
    (np.random, "seed"),
    (torch, "manual_seed"),
    (torch.random, "manual_seed"),
)
"""Functions that a seeded run replaces."""
MODULE_SUFFIXES = ".py", f"{os.sep}__init__.py"
"""Endings of a module's file name."""
SINGLETONS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "accelerate.state": dict.fromkeys(("PartialState", "AcceleratorState", "GradientState"), ("_shared_state", {})),
    "lightning_utilities.core.rank_zero": {"rank_zero_only": ("__dict__", {"rank": 0})},
}
"""By module of another library, and by name in it: the attribute with the dictionary that all of a process use, and
what that has at the start."""
TWISTER_BYTES = 2500
"""Bytes of the state of a Mersenne twister: 624 words and a position."""


class LoggerHandlers:
    """Loggers that were given a handler, with their original handlers; the others are the same for all workers."""

    def __init__(self) -> None:
        self._original_handlers: dict[logging.Logger, list[logging.Handler]] = {}
        self._add = logging.Logger.addHandler

    def begin(self) -> None:
        """Record every logger that is given a handler."""
        self._original_handlers = {logging.root: logging.root.handlers[:]}

        def add_and_record(logger: logging.Logger, handler: logging.Handler) -> None:
            self._original_handlers.setdefault(logger, logger.handlers[:])
            self._add(logger, handler)

        logging.Logger.addHandler = add_and_record  # type: ignore[assignment, method-assign]

    def end(self) -> None:
        """Stop recording."""
        logging.Logger.addHandler = self._add  # type: ignore[method-assign]

    def handlers(self) -> dict[logging.Logger, list[logging.Handler]]:
        """Return the current handlers of the recorded loggers."""
        return {logger: logger.handlers[:] for logger in self._original_handlers}

    def install(self, handlers: Mapping[logging.Logger, list[logging.Handler]]) -> None:
        """Install the handlers of one worker."""
        for logger, original in self._original_handlers.items():
            logger.handlers[:] = handlers.get(logger, original)


LOGGERS = LoggerHandlers()


class OwnModules:
    """Modules in the folder of the script: each worker has its own, since a module may keep a model or a counter."""

    def __init__(self) -> None:
        self._names, self._folder, self._imported = set[str](), "", set[str]()

    def begin(self, folder: str) -> None:
        """Record each module that is imported from a folder, which is on sys.path."""
        self._names, self._folder, self._imported = set(), folder, {name.partition(".")[0] for name in sys.modules}
        sys.meta_path.insert(sys.meta_path.index(PathFinder), self)

    def end(self) -> None:
        """Stop recording. Idempotent."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return where an imported module is if that is in the folder, as Python asks each finder."""
        spec = None if name.partition(".")[0] in self._imported else PathFinder.find_spec(name, path, target)
        if spec is not None:
            found = [spec.origin] if spec.origin is not None else list(spec.submodule_search_locations or ())
            if any(place in found for place in _places(name, self._folder)):
                self._names.add(name)
                return spec
        return None

    def take(self) -> dict[str, ModuleType]:
        """Remove the modules that were imported, and return them."""
        return {name: sys.modules.pop(name) for name in self._names if name in sys.modules}


OWN_MODULES = OwnModules()


def _places(name: str, folder: str) -> list[str]:
    """Return the files, and the folder without `__init__.py`, of a module with this name in a folder on sys.path."""
    return [os.path.join(folder, *name.split(".")) + suffix for suffix in ("", *MODULE_SUFFIXES)]


class ProcessState:
    """One worker's state: `install` it before the worker runs, `save` it before another worker does."""

    def __init__(self, main: ModuleType | None, arguments: list[str], out: TextIO, err: TextIO) -> None:
        self._main, self._arguments, self._out, self._err = main, arguments, out, err
        self._numpy, self._random = GeneratorState(NUMPY), GeneratorState(PYTHON)
        self.save()

    def save(self) -> None:
        """Save the current state of the process. The worker's own modules are away until it is installed again."""
        self._modules = OWN_MODULES.take()
        self._torch = torch.default_generator.get_state()
        self._random.save()
        self._numpy.save()
        self._handlers, self._folder = LOGGERS.handlers(), _folder()
        self._singletons = {name: dict(state) for name, state, _ in _singleton_states()}
        self._dtype = torch.get_default_dtype()
        self._grad = torch.is_grad_enabled()
        self._autocast = torch.is_autocast_enabled("cpu")

    def install(self) -> None:
        """Install the saved state."""
        sys.modules.update(self._modules)
        torch.default_generator.set_state(self._torch)
        self._random.install()
        self._numpy.install()
        LOGGERS.install(self._handlers)
        for name, state, first in _singleton_states():
            state.clear()  # and not another dictionary: the instances refer to this one
            state.update(self._singletons.get(name, first))
        if self._folder is not None and _folder() != self._folder:
            os.chdir(self._folder)
        if torch.get_default_dtype() is not self._dtype:
            torch.set_default_dtype(self._dtype)
        torch._C._set_grad_enabled(self._grad)
        if torch.is_autocast_enabled("cpu") != self._autocast:
            torch.set_autocast_enabled("cpu", self._autocast)
        if self._main is not None:
            sys.modules["__main__"], sys.argv = self._main, self._arguments
        sys.stdout, sys.stderr = self._out, self._err


class ProcessSnapshot:
    """The state of the process before the simulation, which is restored at the end."""

    def __init__(self) -> None:
        self._main, self._arguments, self._path = sys.modules["__main__"], sys.argv, list(sys.path)
        self._modules = set(sys.modules)
        self._threads = torch.get_num_threads()
        self._seeds = [(module, name, getattr(module, name)) for module, name in SEED_FUNCTIONS]
        LOGGERS.begin()
        self._states = ProcessState(None, sys.argv, sys.stdout, sys.stderr)

    def restore_modes(self) -> None:
        """Restore random states, torch's modes and the output, for a worker that starts."""
        self._states.install()

    def restore(self) -> None:
        """Restore everything."""
        self._states.install()
        OWN_MODULES.end()
        LOGGERS.end()
        self._forget_modules()
        sys.modules["__main__"], sys.argv, sys.path[:] = self._main, self._arguments, self._path
        torch.set_num_threads(self._threads)
        for module, name, function in self._seeds:
            setattr(module, name, function)

    def _forget_modules(self) -> None:
        """Remove the modules imported from new entries of sys.path, since the next script may have others."""
        new_entries = [entry for entry in sys.path if entry not in self._path]
        for name in set(sys.modules) - self._modules:
            origin = getattr(getattr(sys.modules[name], "__spec__", None), "origin", None)
            if any(
                origin in _places(name, entry) for entry in new_entries
            ):  # and not in packages that are installed below that place
                del sys.modules[name]


def _singleton_states() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield the name, the dictionary and its first content of each entry in SINGLETONS whose module is imported."""
    for module_name, entries in SINGLETONS.items():
        module = sys.modules.get(module_name)
        for name, (attribute, first) in entries.items() if module is not None else ():
            state = getattr(getattr(module, name, None), attribute, None)
            if isinstance(state, dict):
                yield name, state, first


def _folder() -> str | None:
    """Return the working directory; None if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


class Generator:
    """A global random generator: functions that get and set its whole state, and the address of its words, if known.

    Reading and writing the words in memory is far faster than getting the whole state. They are the whole state except
    while the generator holds the second of a pair of normal draws (`is_pair_kept`), which only drawing words creates.
    """

    def __init__(
        self,
        get: Callable[[], Any],
        put: Callable[[Any], Any],
        has_stored_normal: Callable[[Any], bool],
        drop_stored_normal: Callable[[], Any],
        address: Callable[[], int | None],
    ) -> None:
        self.get, self.put, self.has_stored_normal, self.drop_stored_normal = (
            get,
            put,
            has_stored_normal,
            drop_stored_normal,
        )
        self.address = address
        self.may_store_normal = True
        """True if the generator may hold a normal draw now."""


class GeneratorState:
    """The saved state of a generator."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._words = b""
        self._whole: Any = None
        self.save()

    def save(self) -> None:
        """Save the current state of the generator."""
        generator, address = self._generator, self._generator.address()
        words = ctypes.string_at(address, TWISTER_BYTES) if address is not None else b""
        if words and words == self._words and self._whole is None:
            return
        full_state = generator.get()
        generator.may_store_normal = not words or generator.has_stored_normal(full_state)
        self._words, self._whole = words, full_state if generator.may_store_normal else None

    def install(self) -> None:
        """Install the saved state."""
        generator, address = self._generator, self._generator.address()
        if self._whole is not None or address is None:
            generator.put(self._whole)
        else:
            if generator.may_store_normal:
                generator.drop_stored_normal()
            ctypes.memmove(address, self._words, TWISTER_BYTES)
        generator.may_store_normal = self._whole is not None


def sow(seed: int) -> None:
    """Seed all random generators, as at the start of a script."""
    _python.seed(seed)
    _numpy.seed(seed)
    torch.default_generator.manual_seed(seed)


_python: Any = random._inst
_numpy: Any = np.random.mtrand._rand


def _numpy_address() -> int | None:
    """Return the address of numpy's words, if the global generator is the default Mersenne twister."""
    twister = _numpy._bit_generator
    return int(twister.ctypes.state_address) if isinstance(twister, np.random.MT19937) else None


def _python_address() -> int | None:
    """Return the address of Python's position and words after the object's header, if this Python stores them there."""
    struct_address = id(_python) + object.__basicsize__
    *words, position = _python.getstate()[1]
    return struct_address if list((ctypes.c_uint32 * 625).from_address(struct_address)) == [position, *words] else None


_python_words_at = _python_address()

NUMPY = Generator(
    get=lambda: np.random.get_state(legacy=False),
    put=np.random.set_state,
    has_stored_normal=lambda state: bool(state["has_gauss"]),
    drop_stored_normal=lambda: _numpy.seed(0),
    address=_numpy_address,
)
PYTHON = Generator(
    get=random.getstate,
    put=random.setstate,
    has_stored_normal=lambda state: state[2] is not None,
    drop_stored_normal=lambda: _python.seed(0),
    address=lambda: _python_words_at,
)
