"""What each worker has for itself of a process that many share: random states, torch's modes, names, output."""

from __future__ import annotations

import ctypes
import random
import sys
from types import ModuleType
from typing import Any, TextIO

import numpy as np
import torch

WORDS_BYTES = 2500
"""The state of numpy's Mersenne twister: 624 words and a position."""


class Own:
    """One worker's part. `take` puts it in place when the worker goes on, `keep` notes it when another one does."""

    def __init__(self, main: ModuleType | None, arguments: list[str], out: TextIO) -> None:
        self._main, self._arguments, self._out = main, arguments, out
        self._numpy = Numpy()
        self.keep()

    def keep(self) -> None:
        """Note how it is now."""
        self._torch = torch.default_generator.get_state()
        self._random = random.getstate()
        self._numpy.keep()
        self._grad = torch.is_grad_enabled()
        self._autocast = torch.is_autocast_enabled("cpu")

    def take(self) -> None:
        """Put it in place."""
        torch.default_generator.set_state(self._torch)
        random.setstate(self._random)
        self._numpy.take()
        torch._C._set_grad_enabled(self._grad)
        if torch.is_autocast_enabled("cpu") != self._autocast:
            torch.set_autocast_enabled("cpu", self._autocast)
        if self._main is not None:
            sys.modules["__main__"], sys.argv = self._main, self._arguments
        sys.stdout = self._out


class Process:
    """The process as it was before: everything above is put back at the end."""

    def __init__(self) -> None:
        self._main, self._arguments, self._path = sys.modules["__main__"], sys.argv, list(sys.path)
        self._states = Own(None, sys.argv, sys.stdout)

    def restore(self) -> None:
        """Put it back."""
        self._states.take()
        sys.modules["__main__"], sys.argv, sys.path[:] = self._main, self._arguments, self._path


class Numpy:
    """The state of numpy's global generator.

    The words of its Mersenne twister are read and written where they lie, a hundred times faster than asking for all
    of it. There is more to it only while the second of a pair of normals is kept back.
    """

    _pair_kept = False
    """Whether the generator keeps a normal back, as far as it was left by a worker."""

    def __init__(self) -> None:
        self._words = b""
        self._whole: Any = None
        self.keep()

    def keep(self) -> None:
        """Note how it is now. A normal comes to be kept back only as words are drawn."""
        address = _address()
        words = ctypes.string_at(address, WORDS_BYTES) if address is not None else b""
        if words and words == self._words and self._whole is None:
            return
        whole: Any = np.random.get_state(legacy=False)
        self._words = words
        self._whole = whole if not words or whole["has_gauss"] else None
        Numpy._pair_kept = self._whole is not None

    def take(self) -> None:
        """Put it in place."""
        address = _address()
        if self._whole is not None:
            np.random.set_state(self._whole)
        elif address is not None:
            if Numpy._pair_kept:
                np.random.seed(0)
            ctypes.memmove(address, self._words, WORDS_BYTES)
        Numpy._pair_kept = self._whole is not None


def _address() -> int | None:
    """Where the words lie, if the global generator is still the Mersenne twister that it is by default."""
    generator: Any = np.random.mtrand._rand
    twister = generator._bit_generator
    return int(twister.ctypes.state_address) if isinstance(twister, np.random.MT19937) else None
