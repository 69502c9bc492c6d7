"""Measuring in a crowd: what something takes of a processor while as much else is going on as there will be."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stretto.run_dir import cores

CROWDED = 2.0
"""Busy processes on each processor; more would change nothing."""


def seconds() -> float:
    """Seconds that this process has been at work, not those in which others were."""
    return time.process_time()


def copies(workers: int, processors: float) -> int:
    """How many copies of one worker make it as crowded here as so many workers do on so many processors."""
    return max(round(min(workers / processors, CROWDED) * cores()) - 1, 0)


@contextmanager
def beside(others: int, act: Callable[[], object]) -> Iterator[None]:
    """So many copies of this process, which do the same again and again and say nothing, until this is left."""
    began: list[int] = []
    try:
        for _ in range(others):
            if not (child := os.fork()):
                _repeat(act, os.getppid())
            began.append(child)
        yield
    finally:
        for child in began:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _repeat(act: Callable[[], object], parent: int) -> None:
    """What a copy does, as long as there is someone to do it for."""
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        while os.getppid() == parent:
            act()
    finally:
        os._exit(0)
