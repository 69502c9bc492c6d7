"""Marks: a number that all workers of one exchange must have in common, as counts that ride in the exchange.

A mark is a checksum of the step that a worker is in, so that workers which take part in one exchange in different steps
are found in it. For each bit two counts are summed: of the workers where it is 1, and of those where it is 0. Workers
differ if both sums of a bit are positive: that holds at any precision, in any order, with any positive weights, and at
all workers alike. A worker that marks nothing sends zeros.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

BITS = 16
COUNTS = 2 * BITS
"""Number of counts of a mark. Two marks that differ have the same counts once in 2^16 times."""


def mark_of(*facts: object) -> int:
    """Return the mark of plain values."""
    return zlib.crc32(msgspec.msgpack.encode(facts)) & ((1 << BITS) - 1)


def counts_of(mark: int | None) -> list[float]:
    """Return the counts of one worker; zeros for None.

    >>> counts_of(3)[:4], counts_of(3)[BITS : BITS + 4]
    ([1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0])
    """
    if mark is None:
        return [0.0] * COUNTS
    ones = [float(mark >> bit & 1) for bit in range(BITS)]
    return [*ones, *(1 - one for one in ones)]


def differ(sums: Sequence[float]) -> bool:
    """Return True if the counts that were summed are of workers with different marks.

    >>> sums = [one + other for one, other in zip(counts_of(5), counts_of(4))]
    >>> differ(sums), differ(counts_of(5)), differ([0.0] * COUNTS)
    (True, False, False)
    """
    return any(ones > 0 and zeros > 0 for ones, zeros in zip(sums[:BITS], sums[BITS:COUNTS], strict=True))
