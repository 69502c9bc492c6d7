"""What a desk keeps to come back to: one file a cut, whole or not there at all."""

from __future__ import annotations

import os
import struct
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from stretto.parameter_server.framing import DTYPES, kind

KEPT = 3
"""The newest cuts that are kept."""
Kept = tuple[dict[str, Any], list[Tensor]]
"""Facts, and flat tensors."""


class SnapshotStore(Protocol):
    """Where a desk's cuts are."""

    def put(self, cut: int, facts: dict[str, Any], tensors: Sequence[Tensor]) -> bool:
        """Keep it, and forget the oldest. Whether it was kept."""
        ...

    def get(self, cut: int) -> Kept | None:
        """What was kept, if it is there and whole."""
        ...

    def cuts(self) -> list[int]:
        """The cuts that are there and whole, in order."""
        ...

    def forget(self, after: int) -> None:
        """All went back to this cut: those after it are of what did not happen."""
        ...


class InMemoryStore:
    """Cuts that live as long as the process."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}

    def put(self, cut: int, facts: dict[str, Any], tensors: Sequence[Tensor]) -> bool:
        """Keep a copy."""
        self._kept[cut] = dict(facts), [one.clone() for one in tensors]
        for old in sorted(self._kept)[:-KEPT]:
            del self._kept[old]
        return True

    def get(self, cut: int) -> Kept | None:
        """What was kept."""
        return self._kept.get(cut)

    def cuts(self) -> list[int]:
        """All of them."""
        return sorted(self._kept)

    def forget(self, after: int) -> None:
        """Those after this one."""
        self._kept = {cut: kept for cut, kept in self._kept.items() if cut <= after}


class DiskStore:
    """Cuts as files of a folder, which outlive the process.

    A file is written beside and renamed. It is not brought to the disk first: what it is for is the death of a process,
    not of the machine, and after that its checksum tells whether it is whole. A full disk costs the cut: whoever is
    lost then goes back to an earlier one.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        folder.mkdir(parents=True, exist_ok=True)
        self._fails = False

    def put(self, cut: int, facts: dict[str, Any], tensors: Sequence[Tensor]) -> bool:
        """Write it, and remove the oldest. A full disk is said once."""
        try:
            self._write(cut, facts, tensors)
        except OSError as error:
            self._path(cut).with_suffix(".part").unlink(missing_ok=True)
            if not self._fails:
                why = error.strerror or error
                print(f"stretto: {self._name}: a cut could not be kept: {why}; training goes on", file=sys.stderr)
            self._fails = True
            return False
        self._fails = False
        for old in self._numbers()[:-KEPT]:
            self._path(old).unlink(missing_ok=True)
        return True

    def _write(self, cut: int, facts: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        layout = [(kind(one), one.numel()) for one in tensors]
        head = msgspec.msgpack.encode((facts, layout))
        temporary = self._path(cut).with_suffix(".part")
        with temporary.open("wb") as file:
            file.write(struct.pack("<Q", len(head)))
            file.write(head)
            check = zlib.crc32(head)
            for one in tensors:
                octets = _octets(one)
                check = zlib.crc32(octets, check)
                file.write(octets)
            file.write(struct.pack("<I", check))
        os.replace(temporary, self._path(cut))

    def get(self, cut: int) -> Kept | None:
        """What was written, if it is whole."""
        try:
            return _read(bytearray(self._path(cut).read_bytes()))
        except (OSError, ValueError, KeyError, struct.error, msgspec.DecodeError, msgspec.ValidationError):
            return None

    def cuts(self) -> list[int]:
        """Those that are whole."""
        return [cut for cut in self._numbers() if self.get(cut) is not None]

    def forget(self, after: int) -> None:
        """Remove those after this one."""
        for cut in self._numbers():
            if cut > after:
                self._path(cut).unlink(missing_ok=True)

    def _numbers(self) -> list[int]:
        found = (path.stem.removeprefix(f"{self._name}-") for path in self._folder.glob(f"{self._name}-*.cut"))
        return sorted(int(one) for one in found if one.isdigit())

    def _path(self, cut: int) -> Path:
        return self._folder / f"{self._name}-{cut}.cut"


def _octets(one: Tensor) -> memoryview:
    return memoryview(one.detach().contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type]


def _read(octets: bytearray) -> Kept:
    (length,) = struct.unpack_from("<Q", octets)
    (check,) = struct.unpack_from("<I", octets, len(octets) - 4)
    if zlib.crc32(memoryview(octets)[8:-4]) != check:
        raise ValueError("the checksum is another")
    facts, layout = msgspec.msgpack.decode(octets[8 : 8 + length], type=tuple[dict[str, Any], list[tuple[str, int]]])
    at, tensors = 8 + length, []
    for name, count in layout:
        dtype = DTYPES[name]
        stop = at + count * dtype.itemsize
        raw = torch.frombuffer(octets[at:stop], dtype=torch.uint8) if count else torch.empty(0, dtype=torch.uint8)
        tensors.append(raw.view(dtype))
        at = stop
    if at != len(octets) - 4:
        raise ValueError("more or less than what was written")
    return facts, tensors
