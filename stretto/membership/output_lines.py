"""Output of workers that do not see the run directory: the coordinator appends it to their log files there. State
machines of both sides.

The number in a message is the place of its first byte in the log file. A restarted coordinator finds the size of the
file on the disk, so output that is sent again is written once. Characters that control a terminal are replaced.

    joined launcher                        coordinator
      | -- AppendOutput(-1, nothing) -------> |   the first message about a worker; each is repeated until the reply
      | <- OutputAppended(0) ---------------- |   size of the log file
      | -- AppendOutput(0, 300 bytes) ------> |   appended
      | <- OutputAppended(300) -------------- |
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Annotated

import msgspec

from stretto.events import process_name
from stretto.whole_files import RESERVE_BYTES, free_bytes

CHUNK_BYTES = 60_000
"""Largest number of bytes in a message."""
UNKNOWN = -1
"""Number in the first message about a worker."""
MAX_BUFFERED_BYTES = 1 << 20
"""Bytes of a worker's output that are kept while they cannot be sent."""
LARGEST_LOG = 1 << 30
"""Bytes of a worker's log file, after which its output is refused."""
_CONTROLS = bytes([*range(32), 127])
_PLAIN = bytes.maketrans(_CONTROLS, bytes({9: 9, 10: 10, 13: 10}.get(one, ord("?")) for one in _CONTROLS))
"""Replacement of each byte: a carriage return ends the line."""
_C1 = re.compile(rb"\xc2[\x80-\x9f]")
"""Control characters of two bytes in UTF-8."""
_SENDER = re.compile(rb"output (0|[1-9]\d{0,6}) rank (0|[1-9]\d{0,2})")


class AppendOutput(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Output of a worker, and the place of its first byte in the log file."""

    number: Annotated[int, msgspec.Meta(ge=UNKNOWN, le=1 << 53)]
    data: Annotated[bytes, msgspec.Meta(max_length=CHUNK_BYTES)] = b""


class OutputAppended(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Size of the log file, and the reason why output is not in it."""

    size: int
    problem: str = ""


_DECODER = msgspec.msgpack.Decoder(AppendOutput)
_ENCODER = msgspec.msgpack.Encoder()


def log_of(folder: Path, worker: int, rank: int = 0) -> Path:
    """Return the log file of a process in a run directory."""
    return folder / f"{process_name(worker, rank).replace(' ', '-')}.log"


def open_log(path: Path) -> int:
    """Return the descriptor of a log file to append to. A link in its place is an OSError."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def connection_of(worker: int, rank: int) -> bytes:
    """Return the name of the connection for the output of a process.

    >>> connection_of(3, 0)
    b'output 3 rank 0'
    """
    return b"output %d rank %d" % (worker, rank)


class OutputStream:
    """The launcher's side for one process: output that the coordinator has not confirmed."""

    def __init__(self) -> None:
        self._size = UNKNOWN
        self._buffer = bytearray()
        self._lost = 0

    def add(self, data: bytes) -> None:
        """Add output. If too much waits, it is left out, and a line says so."""
        if self._lost and len(self._buffer) < MAX_BUFFERED_BYTES // 2:
            self._buffer += b"\nstretto: %d bytes of output are lost\n" % self._lost
            self._lost = 0
        if self._lost or len(self._buffer) + len(data) > MAX_BUFFERED_BYTES:
            self._lost += len(data)
        else:
            self._buffer += data

    def message(self) -> AppendOutput | None:
        """Return the message that is due, if there is one."""
        if not self._buffer:
            return None
        return AppendOutput(self._size, bytes(self._buffer[:CHUNK_BYTES]) if self._size != UNKNOWN else b"")

    def receive(self, reply: OutputAppended) -> bool:
        """Take a reply; return False if it confirms nothing new."""
        if reply.size <= self._size:
            return False
        if self._size != UNKNOWN:
            del self._buffer[: reply.size - self._size]
        self._size = reply.size
        return True


class OutputAppender:
    """The coordinator's side: appends output to the log files in the directory of the run.

    Output of the workers below `first`, which the launcher of the run writes itself, is refused.
    """

    needs_log = False

    def __init__(self, run: Path, first: int) -> None:
        self._run, self._first = run, first

    def reply(self, name: bytes, message: bytes) -> bytes | None:
        """Append the output in a message and return the reply; None for the connection of another service."""
        match = _SENDER.fullmatch(name)
        if match is None:
            return None
        return _ENCODER.encode(self.receive(int(match[1]), int(match[2]), _DECODER.decode(message)))

    def receive(self, worker: int, rank: int, message: AppendOutput) -> OutputAppended:
        """Append the bytes that the log file does not have yet. Raises ValueError for what no launcher sends."""
        if worker < self._first:
            raise ValueError(f"got output of worker {worker}, expected that of a worker on another machine")
        path = log_of(self._run, worker, rank)
        try:
            file = open_log(path)
        except OSError as error:
            return OutputAppended(UNKNOWN, str(error.strerror))
        try:
            return _appended(file, message)
        finally:
            os.close(file)


def _appended(file: int, message: AppendOutput) -> OutputAppended:
    size = os.fstat(file).st_size
    if message.number > size:
        raise ValueError(f"got output from byte {message.number} on, expected it from {size} on")
    before = os.pread(file, 1, max(size - 1, 0))
    new = plain(message.data[size - message.number :], before) if message.number != UNKNOWN else b""
    if size + len(new) > LARGEST_LOG:
        return OutputAppended(size, f"the log has {LARGEST_LOG} bytes")
    if free_bytes(file) - len(new) < RESERVE_BYTES:
        return OutputAppended(size, os.strerror(errno.ENOSPC))
    try:
        return OutputAppended(size + (os.write(file, new) if new else 0))
    except OSError as error:
        return OutputAppended(size, str(error.strerror))


def plain(data: bytes, before: bytes = b"") -> bytes:
    r"""Return output of the same length without the characters that control a terminal.

    `before` is the byte before it, since output may be cut within a character.

    >>> plain(b"\x1b[2J 10%\r 20%\n" + "ä\x9b".encode()), plain(b"\x9b", b"\xc2")
    (b'?[2J 10%\n 20%\n\xc3\xa4??', b'?')
    """
    return _C1.sub(b"??", before + data.translate(_PLAIN))[len(before) :]
