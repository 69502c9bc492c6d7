"""Memory that workers of one process can share: each script loads the same data, and it is kept once.

What a loader reads from is shared as it is. Other large tensors and arrays among a script's names are put on one
private mapping of a file each: pages are common until somebody writes to them, and whoever writes has a copy.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, MutableMapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from stretto.server.memory import trim_freed_memory

LEAST_BYTES = 1 << 14
"""Smaller things are not worth a mapping."""
DEEPEST = 3
TIDY_EVERY = 32
"""Workers that begin between two times that freed memory is given back."""


class Commons:
    """What the first worker has, and the others are found to have as well."""

    def __init__(self) -> None:
        self._data: list[Tensor] | None = None
        self._files: dict[str, tuple[int, Any]] = {}
        """By the name in the script: a file with the bytes, and what the first worker had."""
        self._begun = 0
        self.saved = 0
        """Bytes that are not kept twice."""

    def loader(self, loader: DataLoader[Any]) -> None:
        """Share the data set of a worker's loader with the first one's, where their bits are the same."""
        mine = list(_tensors(loader.dataset, DEEPEST))
        if self._data is None:
            self._data = mine
            return
        if len(mine) != len(self._data):
            return
        for one, first in zip(mine, self._data, strict=True):
            if one.data_ptr() != first.data_ptr() and _same(one, first):
                self.saved += one.nbytes
                with torch.no_grad():
                    one.set_(first)  # type: ignore[call-overload]

    def names(self, names: MutableMapping[str, Any]) -> None:
        """Put large tensors and arrays among these names on common pages."""
        for path, holder, key, value in list(_large(names)):
            self._share(path, holder, key, value)

    def tidy(self) -> None:
        """Give what was freed back to the system, every now and then: each script frees what others have as well."""
        self._begun += 1
        if self._begun % TIDY_EVERY == 0:
            trim_freed_memory()

    def close(self) -> None:
        """Let go of the files; what is mapped stays."""
        for file, _ in self._files.values():
            os.close(file)
        self._files.clear()

    def _share(self, path: str, holder: Any, key: Any, value: Any) -> None:
        known = self._files.get(path)
        if known is None:
            self._files[path] = _written(value), value
            return
        file, first = known
        if type(first) is not type(value) or _lies_with(first, value) or not _same(first, value):
            return
        self.saved += value.nbytes
        mapped = np.frombuffer(_mapped(file, value.nbytes), dtype=np.uint8)
        if isinstance(value, Tensor):
            flat = torch.from_numpy(mapped).view(value.dtype)
            with torch.no_grad():
                value.set_(flat.view(value.shape))  # type: ignore[call-overload]
        else:
            holder[key] = mapped.view(value.dtype).reshape(value.shape)


def _tensors(thing: Any, depth: int) -> Iterator[Tensor]:
    """The large tensors that a data set holds, in a fixed order."""
    if isinstance(thing, Tensor):
        if thing.nbytes >= LEAST_BYTES and thing.is_contiguous() and not thing.requires_grad:
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


def _lies_with(one: Any, other: Any) -> bool:
    return isinstance(one, Tensor) and one.data_ptr() == other.data_ptr()


def _same(one: Any, other: Any) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(np.array_equal(one, other))


def _written(value: Any) -> int:
    array: NDArray[Any] = value.numpy() if isinstance(value, Tensor) else np.ascontiguousarray(value)
    with tempfile.TemporaryFile() as file:
        array.tofile(file)
        return os.dup(file.fileno())


def _mapped(file: int, nbytes: int) -> mmap.mmap:
    return mmap.mmap(file, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
