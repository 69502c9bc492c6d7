"""Memory that messages are received in: kept by the process, instead of given back and faulted in again each time."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 1 << 29
"""How much freed memory a process keeps at the end of its heap."""
LARGEST_ON_HEAP = 1 << 25
"""The largest piece that is taken from the heap; glibc allows no more."""


@functools.cache
def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep what is freed; False where there is no glibc, which is left as it is.

    Chunks of a megabyte are mapped and unmapped otherwise, and every page of them is faulted in anew.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)) and bool(mallopt(M_MMAP_THRESHOLD, LARGEST_ON_HEAP))


def trim_freed_memory() -> None:
    """Have glibc's allocator give back what is free in the middle of its heap, where there is glibc."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
