"""Byte model of gloo and ZeroMQ traffic: the bytes on a worker's sockets with the headers of every layer above TCP.

The results are what the kernel counts on a live connection, without TCP's retransmissions. The rules were found by
measuring; a test compares them with real sockets. Pairs are always (sent, received), in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from stretto.parameter_server.framing import CHUNK_BYTES, DTYPES
from stretto.parameter_server.messages import Header
from stretto.simulator.network.links import SEGMENT_BYTES
from stretto.transport.gloo_ring import with_headers
from stretto.transport.peer_stream import PIECE_BYTES as SEALED_PIECE_BYTES
from stretto.transport.peer_stream import SMALL_BYTES, WINDOW_BYTES
from stretto.transport.secure_connections import wire_bytes as sealed_bytes

# --- collective operations: gloo over TCP -------------------------------------------------------------------------

GREETING_BYTES = 8
"""Bytes that one side of a new connection sends to the other."""
FRAME_BYTES = 256
"""Bytes of the first frame of a byte message of the process-group transport."""
EXCHANGE_FRAME_BYTES, EXCHANGE_BYTES = 32, 1 << 19
"""Bytes of the frame of an exchange of two workers, and of a piece of its tensors."""
GROUP_PIECE_BYTES = 1 << 20
"""Largest piece in bytes of a part of a mean that a group of workers exchanges in pairs."""
LENGTH_BYTES = 8
"""Bytes of a message's length field."""
PIECE_BYTES = 16 << 20
"""Largest piece in bytes; longer messages are split by the process-group transport, except in an all-reduce."""


def _added(*pairs: tuple[int, int]) -> tuple[int, int]:
    return sum(sent for sent, _ in pairs), sum(received for _, received in pairs)


def connect_bytes(workers: int) -> tuple[int, int]:
    """Return a worker's mean bytes for connecting a group: one connection per pair of workers, greeted by one side.

    Which side greets is random, so a worker may send anything from nothing to twice this, and receives the rest. The
    store of the rendezvous is not included: see `rendezvous_bytes`.
    """
    half = GREETING_BYTES // 2 * (workers - 1)
    return half, half


def rendezvous_bytes(workers: int) -> tuple[int, int]:
    """Return worker 0's bytes on another worker's connection to the rendezvous store, which worker 0 hosts.

    A live worker 0 counts those of its N-1 connections that were opened after it began to form the group, which are
    none, some, or all of them by chance. The numbers are for the store of a run's first generation on IPv4.
    """
    return 8 * workers**2 + 164 * workers + 4, 117 * workers + 203


def _pieces(nbytes: int) -> int:
    return -(-nbytes // PIECE_BYTES)


def _all_gather(workers: int, nbytes: int) -> tuple[int, int]:
    """Return the bytes of gloo's ring all-gather: N-1 steps, each forwarding one worker's bytes in two halves."""
    steps = (2 * (workers - 1) * _pieces(nbytes), nbytes * (workers - 1))
    return with_headers(steps, steps)


def all_gather_bytes(worker: int, sizes: Sequence[int]) -> tuple[int, int]:
    """Return the bytes of an all-gather of messages of `sizes` bytes: first the lengths, then all nonempty messages."""
    receivers, own_bytes = len(sizes) - 1, sizes[worker]
    outgoing = (receivers * _pieces(own_bytes), receivers * own_bytes)
    incoming = (sum(map(_pieces, sizes)) - _pieces(own_bytes), sum(sizes) - own_bytes)
    return _added(_all_gather(len(sizes), LENGTH_BYTES), with_headers(outgoing, incoming))


def all_gather_message_bytes(workers: int, longest: int) -> tuple[int, int]:
    """Return the bytes of an all-gather of byte messages: frames, and if the longest is longer, all at its length."""
    frames = _all_gather(workers, FRAME_BYTES)
    return frames if longest <= FRAME_BYTES - LENGTH_BYTES else _added(frames, _all_gather(workers, longest))


def broadcast_bytes(worker: int, workers: int, root: int, length: int) -> tuple[int, int]:
    """Return the bytes of a broadcast of `length` bytes in gloo's binomial tree: a frame, and if too small, all again.

    Counted from the root, position p forwards to p + 2^i for every 2^i > p.
    """
    position = (worker - root) % workers
    receivers = sum(position < 1 << i and position + (1 << i) < workers for i in range(workers.bit_length()))
    lengths = [FRAME_BYTES] if length <= FRAME_BYTES - LENGTH_BYTES else [FRAME_BYTES, length]
    moves = [
        ((receivers * _pieces(nbytes), receivers * nbytes), (_pieces(nbytes) * (position > 0), nbytes * (position > 0)))
        for nbytes in lengths
    ]
    return _added(*(with_headers(*move) for move in moves))


def exchange_messages(size: int) -> int:
    """Return the number of messages of an exchange in one direction: the frame, and pieces of the tensor."""
    return 1 + -(-(size - EXCHANGE_FRAME_BYTES) // EXCHANGE_BYTES)


def exchange_bytes(sent: int, received: int) -> tuple[int, int]:
    """Return the bytes of an exchange of two workers: a frame each, and their tensors unless empty."""
    sent, received = sent + EXCHANGE_FRAME_BYTES, received + EXCHANGE_FRAME_BYTES
    outgoing, incoming = ((exchange_messages(size), size) for size in (sent, received))
    return with_headers(outgoing, incoming)


def sum_bytes(index: int, hosts: int, nbytes: int, item_bytes: int) -> tuple[int, int]:
    """Return the bytes of one host's first worker for the mean of the sums of all hosts: exchanges in two rounds."""
    exchanged = []
    for sizes in _group_pieces(hosts, nbytes, item_bytes):
        for other in (size for host, size in enumerate(sizes) if host != index):
            exchanged += [exchange_bytes(other, sizes[index]), exchange_bytes(sizes[index], other)]
    return _added(*exchanged)


def sum_messages(hosts: int, nbytes: int, item_bytes: int) -> int:
    """Return the number of messages that one host's first worker sends and receives for a mean."""
    pieces = _group_pieces(hosts, nbytes, item_bytes)
    return sum(4 * (hosts - 1) * exchange_messages(EXCHANGE_FRAME_BYTES + sizes[-1]) for sizes in pieces)


def _group_pieces(hosts: int, nbytes: int, item_bytes: int) -> Iterator[list[int]]:
    """Yield the bytes of each host's piece of a tensor, for one piece after the other, as a `PeerGroup` cuts them."""
    largest = max(1, GROUP_PIECE_BYTES // item_bytes)
    for start in range(0, nbytes, SEGMENT_BYTES):
        numbers = min(SEGMENT_BYTES, nbytes - start) // item_bytes
        parts = [numbers // hosts + (host < numbers % hosts) for host in range(hosts)]
        for at in range(0, max(parts[0], 1), largest):
            yield [item_bytes * min(max(part - at, 0), largest) for part in parts]


# --- exchanges of the encrypted transport, which the ranks of a worker use -----------------------------------------


def sealed_messages(nbytes: int) -> int:
    """Return the number of messages that carry a tensor of this size to one worker: the post, and its pieces."""
    return 1 + (-(-nbytes // SEALED_PIECE_BYTES) if nbytes > SMALL_BYTES else 0)


def sealed_exchange_bytes(nbytes: int) -> int:
    """Return the bytes that two workers send for an exchange in which one of them has a tensor of this size.

    Each has a post, which carries a small tensor; a larger one takes pieces, and receipts after each half of a window.
    """
    if nbytes <= SMALL_BYTES:
        return sealed_bytes(0) + sealed_bytes(nbytes)
    whole, rest = divmod(nbytes, SEALED_PIECE_BYTES)
    receipts = nbytes // (WINDOW_BYTES // 2)
    return (2 + receipts) * sealed_bytes(0) + whole * sealed_bytes(SEALED_PIECE_BYTES) + sealed_bytes(rest) * (rest > 0)


def sealed_gather_bytes(workers: int, nbytes: int) -> int:
    """Return the bytes that all workers send together for an all-gather of small messages of this size."""
    return workers * (workers - 1) * sealed_bytes(nbytes)


# --- parameter server: ZeroMQ's ZMTP 3.1 over TCP -----------------------------------------------------------------

SHORT_FRAME_BYTES = 255
"""Bytes up to which a frame has a header of 2 bytes (flags, length); longer frames have 9."""
PROOF_BYTES = 39
"""Bytes that the name of a connection is longer by where it carries the proof of a key (`stretto/security.py`)."""
CURVE_BYTES = 33
"""Bytes that CURVE adds to a frame: command name (8), nonce (8), authenticator (16), flags (1)."""
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
_encoder = msgspec.msgpack.Encoder()


def _frame(nbytes: int, encrypted: bool) -> int:
    body = nbytes + CURVE_BYTES if encrypted else nbytes
    return body + (2 if body <= SHORT_FRAME_BYTES else 9)


def handshake_bytes(worker: int, encrypted: bool) -> tuple[int, int]:
    """Return the bytes on a worker's connection to one socket of a server before its first message.

    A greeting (64 bytes each way), then the commands of ZMTP's NULL or CURVE mechanism; the worker's carry its name
    and, encrypted, the proof of its key.
    """
    name = len("worker ") + len(str(worker))
    return (567 + name + PROOF_BYTES, 301) if encrypted else (107 + name, 107)


def message_bytes(header: Header, encrypted: bool) -> int:
    """Return the bytes of a message with this header and its tensors, framed by `parameter_server.framing.encode`.

    Requests of a worker and replies of a server have the same size. Names and heartbeats of workers add nothing: names
    are sent in the handshake, and there are no heartbeats. The counters of a live worker end before its Leave message.
    """
    total = _frame(len(_encoder.encode(header)), encrypted)
    room = CHUNK_BYTES
    for dtype, length in header.tensors:
        remaining = length * _ITEM_BYTES[dtype]
        while remaining:
            chunk = min(remaining, CHUNK_BYTES)
            if chunk > room:
                total += _frame(0, encrypted)
                room = CHUNK_BYTES
            total += _frame(chunk, encrypted)
            room -= chunk
            remaining -= chunk
    return total
