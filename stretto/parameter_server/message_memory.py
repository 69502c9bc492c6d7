"""Memory that a worker and a shard on one host share: the tensors of an update and of its reply go through it.

A worker creates a memory file and offers it with its first large update. The shard maps the file, and writes replies
after the room for updates. A message in memory has its header, and in place of each chunk the chunk's place in the
file, sent once the chunk is complete:

    worker                                      shard
      | -- 7: Push, Offer(file); tensors -------> | maps the file
      |                                           | writes the parameters
      | <- 7: PushReply, in memory; places ------ |
      | copies the parameters                     |
      | writes the update                         |
      | -- 8: Push, in memory; places ----------> | applies the update
      | <- 8: PushReply, in memory; places ------ |

The file is lent to one request at a time, until its reply was read: other messages go over the connection, as all do if
the shard can't map the file. There is no lock. The system frees the memory when neither process maps the file any more;
a new connection, and another process of the worker, offer another file.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from stretto.parameter_server import messages as m
from stretto.transport.host_memory import Offer, create_file, host_name, open_offer

SMALLEST_BYTES = 1 << 16
"""Bytes of an update for which a worker creates a memory file."""
ALIGNMENT = 64
_PLACE = struct.Struct("<QQ")
"""Position and length of a chunk in the file, in bytes."""


class MemoryFile:
    """One side's mapping of a memory file, in which this side writes at `start` and after. It owns the `file`."""

    def __init__(self, file: int, start: int) -> None:
        self._file, self._start, self._next = file, start, start
        self._bytes = _mapped(file)

    def reserve(self, nbytes: int) -> bool:
        """Begin a message of this many bytes, and extend the file to hold them; return False if there is no memory."""
        self._next, stop = self._start, self._start + nbytes
        if stop > len(self._bytes):
            try:
                os.posix_fallocate(self._file, 0, stop)
                self._bytes = _mapped(self._file)
            except (OSError, ValueError):
                return False
        return True

    def write(self, chunk: memoryview) -> bytes:
        """Copy a chunk into the file; return its place."""
        start, stop = self._next, self._next + len(chunk)
        self._bytes[start:stop] = chunk
        self._next = _aligned(stop)
        return _PLACE.pack(start, len(chunk))

    def find(self, place: Any) -> memoryview | None:
        """Return the chunk at a place; None if the file has no such place."""
        if len(memoryview(place)) != _PLACE.size:
            return None
        start, length = _PLACE.unpack(place)
        if start + length > len(self._bytes):
            self._bytes = _mapped(self._file)  # the other side has extended it
        return self._bytes[start : start + length] if start + length <= len(self._bytes) else None

    def close(self) -> None:
        """Close the file. Its mapping ends with the last tensor in it."""
        os.close(self._file)
        self._bytes = memoryview(b"")


class LentMemory:
    """A worker's memory file for one connection, lent to one request at a time."""

    def __init__(self) -> None:
        self._file: MemoryFile | None = None
        self._room = 0
        """Bytes in the file for the tensors of a request."""
        self._is_refused = sys.platform != "linux"
        self._lent_to = 0
        """Request that the file is lent to; 0 if it is free."""
        self.traffic = 0, 0
        """Bytes of tensors sent and received through memory instead of the connection."""

    def lend(self, request_id: int, body: m.Request, tensors: Sequence[Tensor]) -> MemoryFile | Offer | None:
        """Return the file for the tensors of a request, or an offer to send with them, or None."""
        if self._is_refused or self._lent_to or not request_id or not isinstance(body, m.Push | m.Read):
            return None
        nbytes = space_of(tensors)
        if self._file is not None and nbytes <= self._room:
            self._lent_to = request_id
            self._file.reserve(nbytes)
            self._count(sum(tensor.nbytes for tensor in tensors), 0)
            return self._file
        if nbytes < SMALLEST_BYTES:
            return None
        room = 2 * nbytes if self._room else nbytes
        self.reset()
        try:
            offer, self._file = _new_file(room)
        except (OSError, ValueError):
            self._is_refused = True
            return None
        self._room, self._lent_to = room, request_id
        return offer

    def arrives(self, header: m.Header) -> None:
        """Note the header of a reply, which shows if the shard has mapped the file."""
        if self._lent_to and header.request_id == self._lent_to and not in_memory(header):
            self._is_refused = True
            self.reset()

    def find(self, place: Any) -> memoryview | None:
        """Return the chunk of a reply at a place; None if the file has no such place."""
        chunk = self._file.find(place) if self._file is not None else None
        self._count(0, len(chunk or b""))
        return chunk

    def is_lent_to(self, request_id: int) -> bool:
        """Return True if the tensors of a request, or of its reply, may be in the file."""
        return request_id == self._lent_to

    def is_read(self, request_id: int) -> None:
        """Note that the reply to a request was read, or is not waited for."""
        if request_id == self._lent_to:
            self._lent_to = 0

    def reset(self) -> None:
        """Close the file: the connection has ended, or another file replaces it. Idempotent."""
        if self._file is not None:
            self._file.close()
        self._file, self._room, self._lent_to = None, 0, 0

    def _count(self, sent: int, received: int) -> None:
        self.traffic = self.traffic[0] + sent, self.traffic[1] + received


class OfferedMemory:
    """The memory files of workers that a shard has mapped."""

    def __init__(self) -> None:
        self._files: dict[int, tuple[int, MemoryFile]] = {}
        """By worker: its incarnation and its file."""
        self._lent_to: dict[int, int] = {}
        """By worker: the last request whose reply may be in memory."""

    def arrives(self, worker: int, incarnation: int, header: m.Header) -> None:
        """Note the header of a request."""
        if worker in self._files and self._files[worker][0] != incarnation:
            self.drop(worker)
        memory = getattr(header, "memory", False)
        if isinstance(memory, Offer):
            self.drop(worker)
            if (file := _opened(memory)) is not None:
                self._files[worker] = incarnation, file
        if memory:
            self._lent_to[worker] = header.request_id

    def find(self, worker: int, place: Any) -> memoryview | None:
        """Return the chunk of a worker's request at a place; None if there is none."""
        return self._files[worker][1].find(place) if worker in self._files else None

    def lend(self, worker: int, request_id: int, tensors: Sequence[Tensor]) -> MemoryFile | None:
        """Return the file for the tensors of a reply; None if they go over the connection."""
        if worker not in self._files or self._lent_to.get(worker) != request_id:
            return None
        file = self._files[worker][1]
        return file if file.reserve(space_of(tensors)) else None

    def drop(self, worker: int) -> None:
        """Close the file of a worker, if there is one."""
        if worker in self._files:
            self._files.pop(worker)[1].close()

    def close(self) -> None:
        """Close all files."""
        for worker in list(self._files):
            self.drop(worker)


def space_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of a file that the chunks of these tensors take."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def in_memory(header: m.Header) -> bool:
    """Return True if the tensors of a message are in memory."""
    return isinstance(header, m.MemoryHeader) and header.memory is True


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _new_file(room: int) -> tuple[Offer, MemoryFile]:
    """Create a memory file that can't be made smaller: so no process that has mapped it can fail on an access."""
    offer = create_file(ALIGNMENT + room)
    try:
        fcntl.fcntl(offer.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return offer, MemoryFile(offer.file, ALIGNMENT)
    except BaseException:
        os.close(offer.file)
        raise


def _opened(offer: Offer) -> MemoryFile | None:
    """Map an offered file; return None if this process can't."""
    try:
        file = open_offer(offer, os.O_RDWR) if offer.host == host_name() else None
    except OSError:
        return None
    if file is None:
        return None
    try:
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return MemoryFile(file, os.fstat(file).st_size)
    except (OSError, ValueError):
        pass
    os.close(file)
    return None


def _mapped(file: int) -> memoryview:
    return memoryview(mmap.mmap(file, 0))
