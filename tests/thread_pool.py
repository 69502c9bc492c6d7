"""A pool of threads that use torch's random generator, without collections of garbage within.

Reading the state of a generator holds its lock while a tensor is made. A collection at that moment frees other tensors,
for which it gives Python's lock to another thread; if this one reads the state, too, both wait for ever. So does a
loader's process, which seeds its generator, if another thread held the lock while it was forked: it is left unseeded.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

_pools = 0
"""Number of pools that are open."""


@contextmanager
def thread_pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool. Garbage is collected after it."""
    global _pools
    was_enabled = gc.isenabled()
    gc.disable()
    _pools += 1
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool
    finally:
        _pools -= 1
        if was_enabled:
            gc.enable()


def _leave_unseeded() -> None:
    if _pools:
        torch.manual_seed = lambda _: torch.default_generator


os.register_at_fork(after_in_child=_leave_unseeded)
