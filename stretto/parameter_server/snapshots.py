"""Stores of a service's snapshots: one file for each snapshot, complete or absent."""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from stretto.parameter_server.framing import DTYPES, dtype_name
from stretto.transport.tensor_bytes import octets
from stretto.whole_files import PART, written_whole

NEWEST_KEPT = 3
"""Number of the newest snapshots that are stored."""
StoredSnapshot = tuple[dict[str, Any], list[Tensor]]
"""Facts and flat tensors of a snapshot."""


class SnapshotStore(Protocol):
    """Store of a service's snapshots."""

    def put(self, number: int, facts: dict[str, Any], tensors: Sequence[Tensor]) -> bool:
        """Store a snapshot and remove the oldest; return True if it was stored."""
        ...

    def get(self, number: int) -> StoredSnapshot | None:
        """Return a snapshot if it is there and intact."""
        ...

    def snapshots(self) -> list[int]:
        """Return the numbers of the intact snapshots, in order."""
        ...

    def discard_after(self, last: int) -> None:
        """Remove the snapshots after `last`: a rollback has made them void."""
        ...


class InMemoryStore:
    """Store in the memory of the process."""

    def __init__(self) -> None:
        self._stored: dict[int, StoredSnapshot] = {}

    def put(self, number: int, facts: dict[str, Any], tensors: Sequence[Tensor]) -> bool:
        """Store a copy."""
        self._stored[number] = dict(facts), [tensor.clone() for tensor in tensors]
        for old in sorted(self._stored)[:-NEWEST_KEPT]:
            del self._stored[old]
        return True

    def get(self, number: int) -> StoredSnapshot | None:
        """Return a snapshot."""
        return self._stored.get(number)

    def snapshots(self) -> list[int]:
        """Return the numbers of all snapshots."""
        return sorted(self._stored)

    def discard_after(self, last: int) -> None:
        """Remove the snapshots after this one."""
        self._stored = {number: stored for number, stored in self._stored.items() if number <= last}


class DiskStore:
    """Store in files of a folder, which outlive the process.

    A file is written under another name and renamed. It is not synced: it protects against the failure of a process,
    not of the machine, after which its checksum shows if it is intact. If the disk is full the snapshot is skipped, and
    a rollback uses an earlier one.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f".{name}-*{PART}"):
            leftover.unlink(missing_ok=True)
        self._has_failed = False

    def put(self, number: int, facts: dict[str, Any], tensors: Sequence[Tensor]) -> bool:
        """Write a snapshot and remove the oldest. Print a warning when the disk becomes full."""
        try:
            self._write(number, facts, tensors)
        except OSError as error:
            if not self._has_failed:
                why = error.strerror or error
                print(
                    f"stretto: {self._name}: a snapshot could not be written: {why}; training continues",
                    file=sys.stderr,
                )
            self._has_failed = True
            return False
        self._has_failed = False
        for old in self._numbers()[:-NEWEST_KEPT]:
            self._path(old).unlink(missing_ok=True)
        return True

    def _write(self, number: int, facts: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        layout = [(dtype_name(tensor), tensor.numel()) for tensor in tensors]
        header = msgspec.msgpack.encode((facts, layout))
        with written_whole(self._path(number)) as part, part.open("wb") as file:
            file.write(struct.pack("<Q", len(header)))
            file.write(header)
            check = zlib.crc32(header)
            for tensor in tensors:
                data = octets(tensor).data
                check = zlib.crc32(data, check)
                file.write(data)
            file.write(struct.pack("<I", check))

    def get(self, number: int) -> StoredSnapshot | None:
        """Return a snapshot if it is intact."""
        try:
            return _read(bytearray(self._path(number).read_bytes()))
        except (OSError, ValueError, KeyError, struct.error, msgspec.DecodeError, msgspec.ValidationError):
            return None

    def snapshots(self) -> list[int]:
        """Return the numbers of the intact snapshots."""
        return [number for number in self._numbers() if self.get(number) is not None]

    def discard_after(self, last: int) -> None:
        """Remove the files after this one."""
        for number in self._numbers():
            if number > last:
                self._path(number).unlink(missing_ok=True)

    def _numbers(self) -> list[int]:
        numbers = (path.stem.removeprefix(f"{self._name}-") for path in self._folder.glob(f"{self._name}-*.cut"))
        return sorted(int(number) for number in numbers if number.isdigit())

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._name}-{number}.cut"


def _read(data: bytearray) -> StoredSnapshot:
    (length,) = struct.unpack_from("<Q", data)
    (check,) = struct.unpack_from("<I", data, len(data) - 4)
    if zlib.crc32(memoryview(data)[8:-4]) != check:
        raise ValueError("the checksum differs")
    facts, layout = msgspec.msgpack.decode(data[8 : 8 + length], type=tuple[dict[str, Any], list[tuple[str, int]]])
    offset, tensors = 8 + length, []
    for name, count in layout:
        dtype = DTYPES[name]
        stop = offset + count * dtype.itemsize
        raw = (
            torch.frombuffer(data[offset:stop], dtype=torch.uint8)
            if count
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        tensors.append(raw.view(dtype))
        offset = stop
    if offset != len(data) - 4:
        raise ValueError("more or less than what was written")
    return facts, tensors
