"""How many bytes an exchange puts on a worker's sockets, the headers of every layer above TCP counted.

What comes out is what the kernel counts on a live connection, less what TCP had to repeat. The rules were found by
measuring, and a test holds them against real sockets. Pairs are always (sent, received), in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stretto.parameter_server.framing import CHUNK_BYTES, DTYPES
from stretto.parameter_server.messages import Body, Header

# --- the collective wire: gloo over TCP ---------------------------------------------------------------------------

ANNOUNCED = 48
"""One header of gloo: a sender announces a message, its receiver says that it is ready, the message follows one."""
SEGMENT_BYTES = 1 << 20
"""No segment of a ring is longer."""
GREETING = 8
"""What one end of a new connection tells the other."""
FRAME = 256
"""The collective wire's first frame of a message."""
SIZE = 8
"""The length of a message, as a number."""
PIECE_BYTES = 16 << 20
"""Longer messages go in pieces over the collective wire, but for means."""


def _moved(out: tuple[int, int], into: tuple[int, int]) -> tuple[int, int]:
    """The bytes of messages out and in, each given as (how many, their bytes)."""
    sent = out[1] + ANNOUNCED * (2 * out[0] + into[0])
    received = into[1] + ANNOUNCED * (2 * into[0] + out[0])
    return sent, received


def _added(*pairs: tuple[int, int]) -> tuple[int, int]:
    return sum(sent for sent, _ in pairs), sum(received for _, received in pairs)


def forming_bytes(workers: int) -> tuple[int, int]:
    """A worker's share of connecting a group: each pair of workers is one connection, greeted by one of its ends.

    Which end is by chance, so a worker may send anything from nothing to twice this, and receives the rest. The
    store where workers meet is not in it: `meeting_bytes`.
    """
    half = GREETING // 2 * (workers - 1)
    return half, half


def meeting_bytes(workers: int) -> tuple[int, int]:
    """What worker 0, which keeps the store where workers meet, sends and receives on one other's connection to it.

    A live worker 0 counts those of its N-1 connections that came after it began to form the group: none, all, or
    some of them, by chance. They are for a store of one run's first generation on IPv4.
    """
    return 8 * workers**2 + 164 * workers + 4, 117 * workers + 203


def mean_bytes(worker: int, workers: int, nbytes: int, item: int = 4) -> tuple[int, int]:
    """An all-reduce of `nbytes` made of numbers of `item` bytes, as gloo's ring moves it.

    The tensor is cut into at least 2N equal segments, as many for each of N chunks; the last ones may be shorter or
    empty, and what is empty is not sent. Summing up, worker r sends every chunk but r and receives every chunk but
    r+1; handing round, it sends all but r-1 and receives all but r. So with chunks of B/N bytes each worker moves
    2(N-1)/N * B both ways (Patarasuk and Yuan 2009), and the headers.
    """
    return _moved(*_mean_moves(worker, workers, nbytes, item))


def mean_messages(worker: int, workers: int, nbytes: int, item: int = 4) -> int:
    """How many messages an all-reduce is for a worker, sent and received."""
    out, into = _mean_moves(worker, workers, nbytes, item)
    return out[0] + into[0]


def _mean_moves(worker: int, workers: int, nbytes: int, item: int) -> tuple[tuple[int, int], tuple[int, int]]:
    per_chunk = -(-max(-(-nbytes // SEGMENT_BYTES), 2 * workers) // workers)
    segment = max(-(-nbytes // (per_chunk * workers) // item) * item, item)

    def chunk(of: int) -> tuple[int, int]:
        held = min(max(nbytes - of % workers * per_chunk * segment, 0), per_chunk * segment)
        return -(-held // segment), held

    whole = (-(-nbytes // segment), nbytes)
    before, own, after = (chunk(worker + by) for by in (-1, 0, 1))
    return _twice_less(whole, before, own), _twice_less(whole, own, after)


def _twice_less(whole: tuple[int, int], one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return 2 * whole[0] - one[0] - other[0], 2 * whole[1] - one[1] - other[1]


def _pieces(nbytes: int) -> int:
    return -(-nbytes // PIECE_BYTES)


def _all_gather(workers: int, nbytes: int) -> tuple[int, int]:
    """Gloo's ring of N-1 steps; each hands on one worker's bytes in two halves."""
    steps = (2 * (workers - 1) * _pieces(nbytes), nbytes * (workers - 1))
    return _moved(steps, steps)


def every_bytes(worker: int, sizes: Sequence[int]) -> tuple[int, int]:
    """Every worker's message to all others; `sizes` in bytes. Their lengths go round first, empty ones stay at home."""
    others, own = len(sizes) - 1, sizes[worker]
    out = (others * _pieces(own), others * own)
    into = (sum(map(_pieces, sizes)) - _pieces(own), sum(sizes) - own)
    return _added(_all_gather(len(sizes), SIZE), _moved(out, into))


def gather_bytes(workers: int, longest: int) -> tuple[int, int]:
    """A short message of every worker to all; when the longest does not fit a frame, all go again at its length."""
    frames = _all_gather(workers, FRAME)
    return frames if longest <= FRAME - SIZE else _added(frames, _all_gather(workers, longest))


def tell_bytes(worker: int, workers: int, root: int, length: int) -> tuple[int, int]:
    """The root's message to all, in gloo's binomial tree; when it does not fit a frame, it goes again at its length.

    Counted from the root, place p hands on to p + 2^i for every 2^i > p.
    """
    place = (worker - root) % workers
    receivers = sum(place < 1 << i and place + (1 << i) < workers for i in range(workers.bit_length()))
    lengths = [FRAME] if length <= FRAME - SIZE else [FRAME, length]
    moves = [
        ((receivers * _pieces(one), receivers * one), (_pieces(one) * (place > 0), one * (place > 0)))
        for one in lengths
    ]
    return _added(*(_moved(*each) for each in moves))


# --- the server wire: ZeroMQ's ZMTP 3.1 over TCP ------------------------------------------------------------------

SHORT_FRAME = 255
"""Frames up to this length have a header of 2 bytes (flags, length), longer ones of 9."""
SEALED = 33
"""What CURVE adds to a frame: its name (8), a nonce (8), an authenticator (16), flags (1)."""
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
_encoder = msgspec.msgpack.Encoder()


def _frame(nbytes: int, encrypted: bool) -> int:
    body = nbytes + SEALED if encrypted else nbytes
    return body + (2 if body <= SHORT_FRAME else 9)


def handshake_bytes(worker: int, encrypted: bool) -> tuple[int, int]:
    """What a worker's connection to one socket of a server takes before its first parcel.

    Greeting (64 bytes each), then the commands of ZMTP's NULL or CURVE mechanism; the worker's carry its name.
    """
    name = len("worker ") + len(str(worker))
    return (567 + name, 301) if encrypted else (107 + name, 107)


def parcel_bytes(number: int, body: Body, tensors: Sequence[tuple[str, int]], encrypted: bool) -> int:
    """A parcel with tensors of these kinds and lengths, as `parameter_server.framing.encode` cuts it into frames.

    The same for a request of a worker and for a server's reply. Workers' names and heartbeats add nothing to it:
    names are told in the handshake, and there are no heartbeats. A live worker's figures end before its good-bye.
    """
    total = _frame(len(_encoder.encode(Header(number, body, list(tensors)))), encrypted)
    room = CHUNK_BYTES
    for dtype, length in tensors:
        left = length * _ITEM_BYTES[dtype]
        while left:
            chunk = min(left, CHUNK_BYTES)
            if chunk > room:
                total += _frame(0, encrypted)
                room = CHUNK_BYTES
            total += _frame(chunk, encrypted)
            room -= chunk
            left -= chunk
    return total
