"""Messages of exchanges of all that say where their sender is in its loop, so that every receiver can compare."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from stretto.errors import UnevenLoopsError
from stretto.membership.loop_positions import LoopPosition, are_apart, explained
from stretto.transport.interface import Message

_HEAD = struct.Struct("<Bii")


def sealed(place: LoopPosition, message: Message) -> Message:
    """Return the message with its sender's place before it; one that is still to be made is made when it is called."""
    head = _HEAD.pack(place.phase, place.epoch, place.step)
    if isinstance(message, bytes):
        return head + message
    make = message
    return lambda: head + make()


def opened(sender: int, found: bytes, worker: int, place: LoopPosition) -> bytes:
    """Return the sender's message. Raise UnevenLoopsError at a worker that is elsewhere in its loop."""
    _refuse({sender: _place(found), worker: place})
    return found[_HEAD.size :]


def opened_all(workers: Sequence[int], found: Sequence[bytes]) -> list[bytes]:
    """Return the messages of all. Raise UnevenLoopsError if one of them is elsewhere in its loop.

    Messages of former members, as a worker is given that lacked them, have been compared before.
    """
    if len(workers) == len(found):
        _refuse({worker: _place(one) for worker, one in zip(workers, found, strict=True)})
    return [one[_HEAD.size :] for one in found]


def _place(found: bytes) -> LoopPosition:
    return LoopPosition(*_HEAD.unpack_from(found))


def _refuse(places: dict[int, LoopPosition]) -> None:
    if are_apart(places.values()):
        raise UnevenLoopsError(explained(places))
