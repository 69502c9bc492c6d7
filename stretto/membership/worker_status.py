"""Record of a process for its launcher, in memory that outlives the process: position in the loop, membership, error.

It also says if the process holds a model that is not written yet, which the launcher asks for before it ends the run.

The launcher creates an anonymous file and passes it to the process, which maps its beginning: a note costs one write to
memory. The launcher reads it at any time. No disk is involved, so a full one changes nothing. At its end the process
finds its keys, which its environment would show to the processes that the script starts.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from enum import IntEnum

import msgspec

from stretto.membership.loop_positions import LoopPosition

_HEADER = struct.Struct("<iii???BiiI")
"""Position, three flags, state of the kept model, share of this step and the largest before it, and the length of the
error, which follows."""
_POSITION, _SHARES, _LENGTH = struct.Struct("<iii"), struct.Struct("<ii"), struct.Struct("<I")
_FINISHED, _JOINED, _LEFT, _MODEL, _SHARES_AT, _LENGTH_AT = 12, 13, 14, 15, 16, 24
SIZE = 1 << 18
"""Bytes of a record; the memory is taken when it is written."""


_KEYS_AT = SIZE - 1024
_ASKED_AT = _KEYS_AT - 1
"""Place of the launcher's request to write the kept model."""


class KeptModel(IntEnum):
    """State of the model that a process keeps in memory: on the disk (or there is none), not yet, or on its way."""

    WRITTEN = 0
    UNWRITTEN = 1
    WRITING = 2


class ReportedError(msgspec.Struct, array_like=True, frozen=True):
    """Error that ended a process. `consequence` is True if the failure of another worker caused it."""

    kind: str
    text: str
    traceback: str
    consequence: bool = False


_REPORTED_ERROR = msgspec.msgpack.Decoder(ReportedError)


class ProcessRecord(msgspec.Struct, frozen=True):
    """State of a process as it has recorded it.

    `finished` is True once its training has finished, `joined` once it has been a member, `left` if it left before the
    end as it was asked to. `model` is the state of the model that it keeps, `share` the number of its samples in the
    global step if that may be smaller, else 0, and `largest` that of the largest earlier step of this kind.
    """

    finished: bool = False
    place: LoopPosition = LoopPosition()
    joined: bool = False
    left: bool = False
    error: ReportedError | None = None
    model: KeptModel = KeptModel.WRITTEN
    share: int = 0
    largest: int = 0


class Status:
    """A process's side of its record. Without a launcher nothing is stored."""

    def __init__(self) -> None:
        self._page: mmap.mmap | None = None

    def open(self, descriptor: int) -> tuple[str, ...]:
        """Map the record of this descriptor, which the launcher has made, and close the descriptor.

        Returns the keys that the launcher has passed in it, and erases them there.
        """
        self._page = mmap.mmap(descriptor, SIZE)
        os.close(descriptor)
        keys = self._page[_KEYS_AT:].rstrip(b"\0")
        self._page[_KEYS_AT:] = bytes(SIZE - _KEYS_AT)
        return msgspec.json.decode(keys, type=tuple[str, ...]) if keys else ()

    def note(self, place: LoopPosition, share: int = 0) -> None:
        """Store this worker's position, and its samples in the global step if it may have fewer."""
        if self._page is not None:
            _POSITION.pack_into(self._page, 0, place.phase, place.epoch, place.step)
            _SHARES.pack_into(self._page, _SHARES_AT, share, max(self.shares))

    @property
    def shares(self) -> tuple[int, int]:
        """This worker's samples in the global step if it may have fewer, else 0, and those of its largest one before.

        Both are of steps in which it may have had fewer.
        """
        return _SHARES.unpack_from(self._page, _SHARES_AT) if self._page is not None else (0, 0)

    def finish(self) -> None:
        """Note that the training has finished."""
        self._set(_FINISHED)

    def join(self) -> None:
        """Note that this worker is a member."""
        self._set(_JOINED)

    def leave(self) -> None:
        """Note that this worker leaves before the end, as it was asked to."""
        self._set(_LEFT)

    def keep(self, model: KeptModel) -> None:
        """Note the state of the model that this process keeps."""
        if self._page is not None:
            self._page[_MODEL] = model

    @property
    def is_model_asked_for(self) -> bool:
        """True if the launcher has asked for the model that this process keeps."""
        return self._page is not None and self._page[_ASKED_AT] != 0

    def fail(self, error: ReportedError) -> None:
        """Store the error that ends this process; the beginnings of texts that are too long are left out."""
        if self._page is not None:
            text, traceback = error.text[-SIZE // 16 :], error.traceback[-SIZE // 16 :]
            data = msgspec.msgpack.encode(msgspec.structs.replace(error, text=text, traceback=traceback))
            self._page[_HEADER.size : _HEADER.size + len(data)] = data
            _LENGTH.pack_into(self._page, _LENGTH_AT, len(data))  # last, so that the launcher reads a whole error

    def _set(self, offset: int) -> None:
        if self._page is not None:
            self._page[offset] = 1


status = Status()
"""Record of this process."""


def make_record(keys: Sequence[str] | None = None) -> int:
    """Return the descriptor of an empty record that passes the keys to the process."""
    descriptor = os.memfd_create("stretto-status")
    place = LoopPosition()
    os.truncate(descriptor, SIZE)
    os.pwrite(descriptor, msgspec.json.encode(keys or ()), _KEYS_AT)
    os.pwrite(descriptor, _POSITION.pack(place.phase, place.epoch, place.step), 0)
    return descriptor


def read_record(descriptor: int) -> ProcessRecord:
    """Return what a process has recorded."""
    header = _HEADER.unpack(os.pread(descriptor, _HEADER.size, 0))
    *place, finished, joined, left, model, share, largest, length = header
    data = os.pread(descriptor, length, _HEADER.size)
    error = _REPORTED_ERROR.decode(data) if data else None
    return ProcessRecord(finished, LoopPosition(*place), joined, left, error, KeptModel(model), share, largest)


def ask_for_model(descriptor: int) -> None:
    """Ask the process of a record to write the model that it keeps."""
    os.pwrite(descriptor, b"\x01", _ASKED_AT)
