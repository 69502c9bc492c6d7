"""Memory that workers of one process can share: each script loads the same data, and it is kept once.

What a loader reads from, and other large tensors and arrays among a script's names, are put on one private mapping of a
file each: pages are common until somebody writes to them, and whoever writes has a copy.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from stretto.transport.malloc import trim_freed_memory

LEAST_BYTES = 1 << 14
"""Smaller things are not worth a mapping."""
DEEPEST = 3
TIDY_EVERY = 32
"""Workers that begin between two times that freed memory is given back."""


Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class _Common:
    """What the first worker had: what it is, where it lay there, and a file with its bytes."""

    kind: tuple[Any, ...]
    first: int
    file: int
    seen: Bytes


class SharedArrays:
    """What the first worker has, and the others are found to have as well."""

    def __init__(self) -> None:
        self._known: dict[str, _Common] = {}
        """By the name in the script, or the place in the loader's data set."""
        self._mapped: set[int] = set()
        """Where what is on common pages lies."""
        self._begun = 0
        self.saved = 0
        """Bytes that are not kept twice."""

    def loader(self, loader: DataLoader[Any]) -> None:
        """Put the data set of a worker's loader on common pages, where its bits are the first one's."""
        for place, one in enumerate(_tensors(loader.dataset, DEEPEST)):
            self._share(f"[{place}]", {}, None, one)

    def names(self, names: MutableMapping[str, Any]) -> None:
        """Put large tensors and arrays among these names there."""
        for path, holder, key, value in list(_large(names)):
            self._share(path, holder, key, value)

    def tidy(self) -> None:
        """Give what was freed back to the system, every now and then: each script frees what others have as well."""
        self._begun += 1
        if self._begun % TIDY_EVERY == 0:
            trim_freed_memory()

    def close(self) -> None:
        """Let go of the files; what is mapped stays."""
        for file in {one.file for one in self._known.values()}:
            os.close(file)
        self._known.clear()

    def _share(self, path: str, holder: Any, key: Any, value: Any) -> None:
        mine = _bytes_of(value)
        at, known = mine.ctypes.data, self._known.get(path)
        if known is None:
            with contextlib.suppress(OSError):  # there may be no room for a file
                self._known[path] = self._common(value, mine)
        elif at != known.first and at not in self._mapped and known.kind == _kind(value):
            with contextlib.suppress(OSError):  # a process has only so many mappings
                if np.array_equal(known.seen, mine):
                    self._lay(_mapped(known.file, mine.nbytes), holder, key, value)

    def _common(self, value: Any, mine: Bytes) -> _Common:
        """The first worker's, in a file; a data set has what the script has a name for as well."""
        at = mine.ctypes.data
        for one in self._known.values():
            if (one.kind, one.first) == (_kind(value), at):
                return one
        file = _written(mine)
        return _Common(_kind(value), at, file, _mapped(file, mine.nbytes))

    def _lay(self, mapped: Bytes, holder: Any, key: Any, value: Any) -> None:
        self.saved += mapped.nbytes
        self._mapped.add(mapped.ctypes.data)
        if isinstance(value, Tensor):
            with torch.no_grad():
                value.set_(torch.from_numpy(mapped).view(value.dtype).view(value.shape))  # type: ignore[call-overload]
        else:
            holder[key] = mapped.view(value.dtype).reshape(value.shape)


def _tensors(thing: Any, depth: int) -> Iterator[Tensor]:
    """The large tensors that a data set holds, in a fixed order."""
    if isinstance(thing, Tensor):
        if _is_large(thing):
            yield thing
    elif isinstance(thing, list | tuple) and depth and len(thing) < 64:
        for one in thing:
            yield from _tensors(one, depth - 1)
    elif depth and hasattr(thing, "__dict__"):
        for one in vars(thing).values():
            yield from _tensors(one, depth - 1)


def _large(names: MutableMapping[str, Any]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Large tensors and arrays among the names, and in the dictionaries among them: path, holder, key, value."""
    for key, value in names.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", value, inner, one) for inner, one in value.items() if _is_large(one))
        elif _is_large(value):
            yield key, names, key, value


def _is_large(value: Any) -> bool:
    if isinstance(value, Tensor):
        plain = type(value) is Tensor and value.device.type == "cpu" and value.layout is torch.strided
        return plain and not value.requires_grad and value.is_contiguous() and value.nbytes >= LEAST_BYTES
    return type(value) is np.ndarray and value.dtype.kind in "biuf" and value.nbytes >= LEAST_BYTES


def _kind(value: Any) -> tuple[Any, ...]:
    return type(value), value.dtype, value.shape


def _bytes_of(value: Any) -> Bytes:
    """What a tensor or an array holds, where it lies, if it lies in a row."""
    flat = value.detach().reshape(-1).view(torch.uint8).numpy() if isinstance(value, Tensor) else value.reshape(-1)
    found: Bytes = flat.view(np.uint8)
    return found


def _written(mine: Bytes) -> int:
    with tempfile.TemporaryFile() as file:
        mine.tofile(file)
        return os.dup(file.fileno())


def _mapped(file: int, nbytes: int) -> Bytes:
    """A private mapping, which keeps no descriptor: Python's own would, one for each tensor of each worker."""
    try:
        storage = torch.UntypedStorage.from_file(f"/dev/fd/{file}", shared=False, nbytes=nbytes)
    except RuntimeError as error:
        raise OSError(str(error)) from error
    found: Bytes = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()  # type: ignore[arg-type]
    return found
