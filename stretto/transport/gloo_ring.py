"""Bytes of an all-reduce in gloo's ring, with its headers, as (sent, received) of one worker."""

from __future__ import annotations

import functools

HEADER_BYTES = 48
"""Bytes of a gloo header. Each message has three: the sender's announcement, the receiver's readiness, the
message's."""
SEGMENT_BYTES = 1 << 20
"""Largest segment of a ring all-reduce in bytes."""


def with_headers(outgoing: tuple[int, int], incoming: tuple[int, int]) -> tuple[int, int]:
    """Return (sent, received) with headers for outgoing and incoming messages, each given as (count, bytes)."""
    sent = outgoing[1] + HEADER_BYTES * (2 * outgoing[0] + incoming[0])
    received = incoming[1] + HEADER_BYTES * (2 * incoming[0] + outgoing[0])
    return sent, received


@functools.lru_cache(maxsize=1024)
def all_reduce_bytes(worker: int, workers: int, nbytes: int, item: int = 4) -> tuple[int, int]:
    """Return the bytes of an all-reduce of `nbytes` bytes of elements of `item` bytes in gloo's ring.

    The tensor is split into at least 2N equal segments, the same number for each of N chunks; the last segments may be
    shorter or empty, and empty segments are not sent. In the reduce-scatter, worker r sends every chunk but r and
    receives every chunk but r+1; in the all-gather, it sends all but r-1 and receives all but r. With chunks of B/N
    bytes each worker thus moves 2(N-1)/N * B both ways (Patarasuk and Yuan 2009), plus headers.
    """
    return with_headers(*_all_reduce_messages(worker, workers, nbytes, item))


def all_reduce_messages(worker: int, workers: int, nbytes: int, item: int = 4) -> int:
    """Return the number of messages that a worker sends and receives in an all-reduce."""
    outgoing, incoming = _all_reduce_messages(worker, workers, nbytes, item)
    return outgoing[0] + incoming[0]


def _all_reduce_messages(worker: int, workers: int, nbytes: int, item: int) -> tuple[tuple[int, int], tuple[int, int]]:
    per_chunk = -(-max(-(-nbytes // SEGMENT_BYTES), 2 * workers) // workers)
    segment = max(-(-nbytes // (per_chunk * workers) // item) * item, item)

    def chunk(index: int) -> tuple[int, int]:
        nbytes_of_chunk = min(max(nbytes - index % workers * per_chunk * segment, 0), per_chunk * segment)
        return -(-nbytes_of_chunk // segment), nbytes_of_chunk

    vector = (-(-nbytes // segment), nbytes)
    previous, middle, following = (chunk(worker + shift) for shift in (-1, 0, 1))
    return _ring_volume(vector, previous, middle), _ring_volume(vector, middle, following)


def _ring_volume(vector: tuple[int, int], first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    return 2 * vector[0] - first[0] - second[0], 2 * vector[1] - first[1] - second[1]
