"""Messages with their sender's position in its training loop, which every receiver compares with its own."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from stretto.errors import UnevenLoopsError
from stretto.membership.loop_positions import LoopPosition, are_apart, explained
from stretto.transport.interface import Message

_HEAD = struct.Struct("<Bii")


def sealed(place: LoopPosition, message: Message) -> Message:
    """Return the message after its sender's position. A message that is a function stays a function."""
    head = _HEAD.pack(place.phase, place.epoch, place.step)
    if isinstance(message, bytes):
        return head + message
    make = message
    return lambda: head + make()


def opened(sender: int, found: bytes, worker: int, place: LoopPosition) -> bytes:
    """Return the sender's message. Raise UnevenLoopsError if this worker is at another position of its loop."""
    _refuse({sender: _place(found), worker: place})
    return found[_HEAD.size :]


def opened_all(workers: Sequence[int], found: Sequence[bytes]) -> list[bytes]:
    """Return the messages of all workers. Raise UnevenLoopsError if their positions differ.

    Messages of former members, which a late worker receives from the commit log, were compared before.
    """
    if len(workers) == len(found):
        _refuse({worker: _place(one) for worker, one in zip(workers, found, strict=True)})
    return [one[_HEAD.size :] for one in found]


def _place(found: bytes) -> LoopPosition:
    return LoopPosition(*_HEAD.unpack_from(found))


def _refuse(places: dict[int, LoopPosition]) -> None:
    if are_apart(places.values()):
        raise UnevenLoopsError(explained(places))
