"""A pool of threads that use torch's random generator, without collections of garbage within.

Reading the state of a generator holds its lock while a tensor is made. A collection at that moment frees other tensors,
for which it gives Python's lock to another thread; if this one reads the state, too, both wait for ever.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def thread_pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool. Garbage is collected after it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool
    finally:
        if was_enabled:
            gc.enable()
