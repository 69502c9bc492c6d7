"""Settings of glibc's allocator: freed receive buffers stay in the process, since page faults cost time."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 1 << 29
"""Bytes of freed memory that a process keeps at the end of its heap."""
LARGEST_ON_HEAP = 1 << 25
"""Size in bytes up to which memory is taken from the heap: the maximum of glibc."""


@functools.cache
def keep_freed_memory() -> bool:
    """Set glibc's allocator to keep freed memory. Return False without glibc.

    Otherwise chunks of a megabyte are mapped and unmapped, and each of their pages faults on every use.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)) and bool(mallopt(M_MMAP_THRESHOLD, LARGEST_ON_HEAP))


def trim_freed_memory() -> None:
    """Return free memory in the middle of the heap to the system, with glibc."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
