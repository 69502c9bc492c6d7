"""Copy-on-write sharing of data: each worker's script loads the same data, and one copy is kept in memory.

The data set of a loader and other large tensors and arrays among a script's global names are replaced by private
mappings of one file each: pages are common until a worker writes to them, and each writer gets its own copy.
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

MIN_BYTES = 1 << 14
"""Least size in bytes for which a mapping pays."""
MAX_DEPTH = 3
TIDY_EVERY = 32
"""Number of started workers between two returns of freed memory to the system."""


Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class _SharedData:
    """Data of the first worker: its type, its address there, and a file with its bytes."""

    kind: tuple[Any, ...]
    address: int
    file: int
    content: Bytes


class SharedArrays:
    """Data of the first worker that other workers have as well."""

    def __init__(self) -> None:
        self._shared: dict[str, _SharedData] = {}
        """Data by the name in the script, or by the position in the loader's data set."""
        self._mapped_addresses: set[int] = set()
        """Addresses of the mappings."""
        self._started = 0
        self.saved = 0
        """Number of bytes saved by sharing."""

    def loader(self, loader: DataLoader[Any]) -> None:
        """Share the tensors of a loader's data set that are bitwise equal to the first worker's."""
        for position, tensor in enumerate(_tensors(loader.dataset, MAX_DEPTH)):
            self._share(f"[{position}]", {}, None, tensor)

    def names(self, names: MutableMapping[str, Any]) -> None:
        """Share large tensors and arrays among these names."""
        for path, holder, key, value in list(_large(names)):
            self._share(path, holder, key, value)

    def trim(self) -> None:
        """Return freed memory to the system after every few workers, since each worker frees what it now shares."""
        self._started += 1
        if self._started % TIDY_EVERY == 0:
            trim_freed_memory()

    def close(self) -> None:
        """Close the files; the mappings remain valid."""
        for file in {shared.file for shared in self._shared.values()}:
            os.close(file)
        self._shared.clear()

    def _share(self, path: str, holder: Any, key: Any, value: Any) -> None:
        data = _bytes_of(value)
        address, shared = data.ctypes.data, self._shared.get(path)
        if shared is None:
            with contextlib.suppress(OSError):  # there may be no room for a file
                self._shared[path] = self._first_data(value, data)
        elif address != shared.address and address not in self._mapped_addresses and shared.kind == _kind(value):
            with contextlib.suppress(OSError):  # the number of mappings per process is limited
                if np.array_equal(shared.content, data):
                    self._replace(_map_file(shared.file, data.nbytes), holder, key, value)

    def _first_data(self, value: Any, data: Bytes) -> _SharedData:
        """Return the first worker's data in a file, reusing the file of the same data under another name."""
        address = data.ctypes.data
        for shared in self._shared.values():
            if (shared.kind, shared.address) == (_kind(value), address):
                return shared
        file = _write_file(data)
        return _SharedData(_kind(value), address, file, _map_file(file, data.nbytes))

    def _replace(self, mapped: Bytes, holder: Any, key: Any, value: Any) -> None:
        self.saved += mapped.nbytes
        self._mapped_addresses.add(mapped.ctypes.data)
        if isinstance(value, Tensor):
            with torch.no_grad():
                value.set_(torch.from_numpy(mapped).view(value.dtype).view(value.shape))  # type: ignore[call-overload]
        else:
            holder[key] = mapped.view(value.dtype).reshape(value.shape)


def _tensors(holder: Any, depth: int) -> Iterator[Tensor]:
    """Yield the large tensors that a data set holds, in a fixed order."""
    if isinstance(holder, Tensor):
        if _is_large(holder):
            yield holder
    elif isinstance(holder, list | tuple) and depth and len(holder) < 64:
        for element in holder:
            yield from _tensors(element, depth - 1)
    elif depth and hasattr(holder, "__dict__"):
        for element in vars(holder).values():
            yield from _tensors(element, depth - 1)


def _large(names: MutableMapping[str, Any]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield (path, holder, key, value) of large tensors and arrays among the names and in dictionaries among them."""
    for key, value in names.items():
        if isinstance(value, dict):
            yield from (
                (f"{key}.{inner}", value, inner, element) for inner, element in value.items() if _is_large(element)
            )
        elif _is_large(value):
            yield key, names, key, value


def _is_large(value: Any) -> bool:
    if isinstance(value, Tensor):
        plain = type(value) is Tensor and value.device.type == "cpu" and value.layout is torch.strided
        return plain and not value.requires_grad and value.is_contiguous() and value.nbytes >= MIN_BYTES
    return type(value) is np.ndarray and value.dtype.kind in "biuf" and value.nbytes >= MIN_BYTES


def _kind(value: Any) -> tuple[Any, ...]:
    return type(value), value.dtype, value.shape


def _bytes_of(value: Any) -> Bytes:
    """Return the bytes of a contiguous tensor or array, without copying."""
    flat = value.detach().reshape(-1).view(torch.uint8).numpy() if isinstance(value, Tensor) else value.reshape(-1)
    data: Bytes = flat.view(np.uint8)
    return data


def _write_file(data: Bytes) -> int:
    with tempfile.TemporaryFile() as file:
        data.tofile(file)
        return os.dup(file.fileno())


def _map_file(file: int, nbytes: int) -> Bytes:
    """Return a private mapping, which holds no file descriptor; Python's mmap would hold one per tensor and worker."""
    try:
        storage = torch.UntypedStorage.from_file(f"/dev/fd/{file}", shared=False, nbytes=nbytes)
    except RuntimeError as error:
        raise OSError(str(error)) from error
    data: Bytes = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()  # type: ignore[arg-type]
    return data
