"""Numbers of epochs over all sections of a process: a later section's are greater than an earlier one's.

number = (section - 1) * 2**20 + epoch
"""

from __future__ import annotations

BITS = 20
"""A section has at most 2**20 epochs."""


def numbered(section: int, epoch: int) -> int:
    """Return the number of an epoch; both count from 1.

    >>> numbered(1, 3), section_of(numbered(2, 3)), epoch_of(numbered(2, 3))
    (3, 2, 3)
    """
    return ((section - 1) << BITS) + epoch


def section_of(number: int) -> int:
    """Return the section of an epoch by its number."""
    return (number >> BITS) + 1


def epoch_of(number: int) -> int:
    """Return the place of an epoch in its section, from 1."""
    return number & ((1 << BITS) - 1)
