"""A worker's position in its loop, in a memory page that outlives its process: the launcher reads it at the end.

The launcher creates an unnamed file and passes it to the process, which maps it: a note costs one write to memory.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile

from stretto.membership.loop_positions import LoopPosition

_LAYOUT = struct.Struct("<?iii")


class Status:
    """A worker's side of the page. Without a launcher nothing is stored."""

    def __init__(self) -> None:
        self._page: mmap.mmap | None = None
        self._place, self._is_finished = LoopPosition(), False

    def open(self, descriptor: int) -> None:
        """Map the page of this descriptor, which the launcher has made, and close the descriptor."""
        self._page = mmap.mmap(descriptor, _LAYOUT.size)
        os.close(descriptor)

    def note(self, place: LoopPosition, is_finished: bool = False) -> None:
        """Store this worker's position, and whether its training has finished."""
        if self._page is not None:
            _LAYOUT.pack_into(self._page, 0, is_finished, place.phase, place.epoch, place.step)
        self._place = place

    def finish(self) -> None:
        """Note that the training has finished."""
        self.note(self._place, is_finished=True)


status = Status()
"""Status of this process, if it is a worker."""


def make_page() -> int:
    """Return the descriptor of an empty page."""
    with tempfile.TemporaryFile() as file:
        place = LoopPosition()
        file.write(_LAYOUT.pack(False, place.phase, place.epoch, place.step))
        file.flush()
        return os.dup(file.fileno())


def read_page(descriptor: int) -> tuple[bool, LoopPosition]:
    """Return True if the worker's training has finished, and its last position."""
    is_finished, phase, epoch, step = _LAYOUT.unpack(os.pread(descriptor, _LAYOUT.size, 0))
    return is_finished, LoopPosition(phase, epoch, step)
