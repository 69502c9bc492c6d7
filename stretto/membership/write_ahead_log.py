"""A journal: records appended to a file, each with its length, its number and a checksum, so that a tear is seen.

What was flushed is there after any crash; what is damaged, and all behind it, is not given back.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

from stretto.errors import LogError

_HEAD = struct.Struct("<IQI")
"""Bytes of the record, its number from 0, and the checksum of both and of the record."""


class _Found(NamedTuple):
    records: list[bytes]
    size: int
    """The bytes that they take up in the file."""


def read(path: Path) -> list[bytes]:
    """The whole records of a journal, up to the first damaged one. None of a journal that is not there."""
    return _found(path).records


class WriteAheadLog:
    """A journal opened for more records. What is torn at its end is cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        found = _found(path)
        self._number = len(found.records)
        self.cut_off = path.stat().st_size - found.size if path.exists() else 0
        """Bytes behind the last whole record, which are gone."""
        self._waiting = bytearray()
        self._dirty = False
        """Whether something was written that may not be on the disk yet."""
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._file, found.size)
            os.lseek(self._file, found.size, os.SEEK_SET)
            os.fsync(self._file)
            _sync_folder(path.parent)
        except OSError as error:
            raise LogError(f"the journal {path} cannot be opened: {error.strerror}") from error

    def append(self, record: bytes) -> None:
        """Add a record; it is on the disk after the next flush."""
        self._waiting += _head(self._number, record) + record
        self._number += 1

    def flush(self) -> None:
        """Bring what was appended to the disk. Raises LogError when it cannot be; what is left goes there next time."""
        try:
            while self._waiting:
                self._dirty = True
                del self._waiting[: os.write(self._file, self._waiting)]
            if self._dirty:
                os.fdatasync(self._file)
                self._dirty = False
        except OSError as error:
            raise LogError(f"the journal {self.path} cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Flush, and let go of the file."""
        self.flush()
        os.close(self._file)


def _head(number: int, record: bytes) -> bytes:
    return _HEAD.pack(len(record), number, zlib.crc32(record, zlib.crc32(struct.pack("<IQ", len(record), number))))


def _found(path: Path) -> _Found:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return _Found([], 0)
    except OSError as error:
        raise LogError(f"the journal {path} cannot be read: {error.strerror}") from error
    records: list[bytes] = []
    at = 0
    while len(content) - at >= _HEAD.size:
        start = at + _HEAD.size
        record = content[start : start + _HEAD.unpack_from(content, at)[0]]
        if content[at:start] != _head(len(records), record):
            break
        records.append(record)
        at = start + len(record)
    return _Found(records, at)


def _sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
