"""Write-ahead log: records appended to a file, each with its length, number and checksum, so that damage is detected.

Flushed records survive every crash; reading stops at the first damaged record.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

from stretto.errors import LogError
from stretto.whole_files import sync

_HEAD = struct.Struct("<IQI")
"""Length of the record in bytes, its number from 0, and a checksum of both and of the record."""


class _Found(NamedTuple):
    records: list[bytes]
    size: int
    """Number of bytes of the intact records in the file."""


def read(path: Path) -> list[bytes]:
    """Return the records up to the first damaged one; none if there is no file."""
    return _found(path).records


class WriteAheadLog:
    """A log opened for appending. A damaged end is cut off.

    Flushed records survive a crash of the machine if `synced`, else the end of the process.
    """

    def __init__(self, path: Path, synced: bool = True) -> None:
        self.path, self._synced = path, synced
        intact = _found(path)
        self._number = len(intact.records)
        self.cut_off = path.stat().st_size - intact.size if path.exists() else 0
        """Number of bytes removed after the last intact record."""
        self._waiting = bytearray()
        self._dirty = False
        """True if written data may not be on disk yet."""
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._file, intact.size)
            os.lseek(self._file, intact.size, os.SEEK_SET)
            os.fsync(self._file)
            sync(path.parent)
        except OSError as error:
            raise LogError(f"the write-ahead log {path} cannot be opened: {error.strerror}") from error

    def append(self, record: bytes) -> None:
        """Add a record; it is on disk after the next flush."""
        self._waiting += _head(self._number, record) + record
        self._number += 1

    def flush(self) -> None:
        """Write the appended records to disk. Raises LogError on failure; the next flush writes the remaining ones."""
        try:
            while self._waiting:
                self._dirty = True
                del self._waiting[: os.write(self._file, self._waiting)]
            if self._dirty and self._synced:
                os.fdatasync(self._file)
                self._dirty = False
        except OSError as error:
            raise LogError(f"the write-ahead log {self.path} cannot be written: {error.strerror}") from error

    def abandon(self) -> None:
        """Close the file without a flush."""
        os.close(self._file)

    def close(self) -> None:
        """Flush and close the file."""
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
        raise LogError(f"the write-ahead log {path} cannot be read: {error.strerror}") from error
    records: list[bytes] = []
    offset = 0
    while len(content) - offset >= _HEAD.size:
        start = offset + _HEAD.size
        record = content[start : start + _HEAD.unpack_from(content, offset)[0]]
        if content[offset:start] != _head(len(records), record):
            break
        records.append(record)
        offset = start + len(record)
    return _Found(records, offset)
