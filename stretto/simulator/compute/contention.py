"""Measures processor time under contention, with as many busy processes as the simulated run will have."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stretto.run_dir import cores

MAX_LOAD = 2.0
"""Most busy processes per processor; more would not change the result."""


def seconds() -> float:
    """Return the processor time of this process in seconds."""
    return time.process_time()


def copies(workers: int, processors: float) -> int:
    """Return the number of additional busy processes here that load each processor as the simulated workers do."""
    return max(round(min(workers / processors, MAX_LOAD) * cores()) - 1, 0)


@contextmanager
def beside(others: int, act: Callable[[], object]) -> Iterator[None]:
    """Run `others` forked copies of this process, which repeat `act` silently until the context is left."""
    children: list[int] = []
    try:
        for _ in range(others):
            if not (child := os.fork()):
                _repeat(act, os.getppid())
            children.append(child)
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _repeat(act: Callable[[], object], parent: int) -> None:
    """Repeat `act` silently until the parent process has exited."""
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        while os.getppid() == parent:
            act()
    finally:
        os._exit(0)
