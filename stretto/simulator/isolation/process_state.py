"""What each worker has for itself of a process that many share: random states, torch's modes, names, folder, output."""

from __future__ import annotations

import ctypes
import logging
import os
import random
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TextIO

import numpy as np
import torch

SEEDS: tuple[tuple[Any, str], ...] = (
    (random, "seed"),
    (np.random, "seed"),
    (torch, "manual_seed"),
    (torch.random, "manual_seed"),
)
"""What a seeded run puts others in the place of."""
MODULE = ".py", f"{os.sep}__init__.py"
"""How the file of a module goes on behind its name."""
TWISTER_BYTES = 2500
"""The state of a Mersenne twister: 624 words and a position."""


class Loggers:
    """The loggers that somebody has given a handler, and those that each had before: of others nobody's differ."""

    def __init__(self) -> None:
        self._before: dict[logging.Logger, list[logging.Handler]] = {}
        self._add = logging.Logger.addHandler

    def begin(self) -> None:
        """Notice from now on who is given a handler."""
        self._before = {logging.root: logging.root.handlers[:]}

        def noted(logger: logging.Logger, handler: logging.Handler) -> None:
            self._before.setdefault(logger, logger.handlers[:])
            self._add(logger, handler)

        logging.Logger.addHandler = noted  # type: ignore[assignment, method-assign]

    def end(self) -> None:
        """Nobody is noticed any more."""
        logging.Logger.addHandler = self._add  # type: ignore[method-assign]

    def handlers(self) -> dict[logging.Logger, list[logging.Handler]]:
        """Those that there are now."""
        return {one: one.handlers[:] for one in self._before}

    def put(self, kept: Mapping[logging.Logger, list[logging.Handler]]) -> None:
        """Put those of one worker in place."""
        for one, before in self._before.items():
            one.handlers[:] = kept.get(one, before)


LOGGERS = Loggers()


class ProcessState:
    """One worker's part. `take` puts it in place when the worker goes on, `keep` notes it when another one does."""

    def __init__(self, main: ModuleType | None, arguments: list[str], out: TextIO, err: TextIO) -> None:
        self._main, self._arguments, self._out, self._err = main, arguments, out, err
        self._numpy, self._random = Kept(NUMPY), Kept(PYTHON)
        self.keep()

    def keep(self) -> None:
        """Note how it is now."""
        self._torch = torch.default_generator.get_state()
        self._random.keep()
        self._numpy.keep()
        self._handlers, self._folder = LOGGERS.handlers(), _folder()
        self._dtype = torch.get_default_dtype()
        self._grad = torch.is_grad_enabled()
        self._autocast = torch.is_autocast_enabled("cpu")

    def take(self) -> None:
        """Put it in place."""
        torch.default_generator.set_state(self._torch)
        self._random.take()
        self._numpy.take()
        LOGGERS.put(self._handlers)
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


class Process:
    """The process as it was before: everything above is put back at the end."""

    def __init__(self) -> None:
        self._main, self._arguments, self._path = sys.modules["__main__"], sys.argv, list(sys.path)
        self._modules = set(sys.modules)
        self._threads = torch.get_num_threads()
        self._seeds = [(module, name, getattr(module, name)) for module, name in SEEDS]
        LOGGERS.begin()
        self._states = ProcessState(None, sys.argv, sys.stdout, sys.stderr)

    def modes(self) -> None:
        """Put random states, torch's modes and the output back, for one who begins."""
        self._states.take()

    def restore(self) -> None:
        """Put it back."""
        self._states.take()
        LOGGERS.end()
        self._forget_modules()
        sys.modules["__main__"], sys.argv, sys.path[:] = self._main, self._arguments, self._path
        torch.set_num_threads(self._threads)
        for module, name, function in self._seeds:
            setattr(module, name, function)

    def _forget_modules(self) -> None:
        """Those that were found where nobody looked before: the next script has its own."""
        places = [one for one in sys.path if one not in self._path]
        for name in set(sys.modules) - self._modules:
            origin = getattr(getattr(sys.modules[name], "__spec__", None), "origin", None)
            files = [os.path.join(one, *name.split(".")) + end for one in places for end in MODULE]
            if origin in files:  # and not in packages that are installed below that place
                del sys.modules[name]


def _folder() -> str | None:
    """The folder of this process; None if it is no more."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


class Generator:
    """A global random generator: how all of its state is had and set, and where its words lie, if that is known.

    Words are read and written where they lie, far faster than asking for all of the state. There is more to it only
    while the second of a pair of normals `is_pair_kept` back, which comes to be only as words are drawn.
    """

    def __init__(
        self,
        get: Callable[[], Any],
        put: Callable[[Any], Any],
        is_pair_kept: Callable[[Any], bool],
        forget_pair: Callable[[], Any],
        address: Callable[[], int | None],
    ) -> None:
        self.get, self.put, self.is_pair_kept, self.forget_pair = get, put, is_pair_kept, forget_pair
        self.address = address
        self.keeps_pair = True
        """Whether it keeps a normal back now, as far as it is known."""


class Kept:
    """The state of a generator as a worker left it."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._words = b""
        self._whole: Any = None
        self.keep()

    def keep(self) -> None:
        """Note how it is now."""
        generator, address = self._generator, self._generator.address()
        words = ctypes.string_at(address, TWISTER_BYTES) if address is not None else b""
        if words and words == self._words and self._whole is None:
            return
        whole = generator.get()
        generator.keeps_pair = not words or generator.is_pair_kept(whole)
        self._words, self._whole = words, whole if generator.keeps_pair else None

    def take(self) -> None:
        """Put it in place."""
        generator, address = self._generator, self._generator.address()
        if self._whole is not None or address is None:
            generator.put(self._whole)
        else:
            if generator.keeps_pair:
                generator.forget_pair()
            ctypes.memmove(address, self._words, TWISTER_BYTES)
        generator.keeps_pair = self._whole is not None


def sow(seed: int) -> None:
    """Set all random states to what they are at a script's beginning."""
    _python.seed(seed)
    _numpy.seed(seed)
    torch.default_generator.manual_seed(seed)


_python: Any = random._inst
_numpy: Any = np.random.mtrand._rand


def _numpy_address() -> int | None:
    """Where numpy's words lie, if the global generator is still the Mersenne twister that it is by default."""
    twister = _numpy._bit_generator
    return int(twister.ctypes.state_address) if isinstance(twister, np.random.MT19937) else None


def _python_address() -> int | None:
    """Where Python's position and words lie: behind the head of the object, if this Python keeps them there."""
    at = id(_python) + object.__basicsize__
    *words, position = _python.getstate()[1]
    return at if list((ctypes.c_uint32 * 625).from_address(at)) == [position, *words] else None


_lies_at = _python_address()

NUMPY = Generator(
    get=lambda: np.random.get_state(legacy=False),
    put=np.random.set_state,
    is_pair_kept=lambda state: bool(state["has_gauss"]),
    forget_pair=lambda: _numpy.seed(0),
    address=_numpy_address,
)
PYTHON = Generator(
    get=random.getstate,
    put=random.setstate,
    is_pair_kept=lambda state: state[2] is not None,
    forget_pair=lambda: _python.seed(0),
    address=lambda: _lies_at,
)
