"""Signals that ask a command to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def handled(handle: Callable[[int], object]) -> Iterator[None]:
    """Call `handle` with each signal. Signals that are ignored, as by nohup, stay ignored.

    Outside the main thread, which alone receives signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler_of_all(number: int, _frame: FrameType | None) -> None:
        handle(number)

    previous = {number: signal.getsignal(number) for number in SIGNALS}
    replaced = {number: handler for number, handler in previous.items() if handler is not signal.SIG_IGN}
    for number in replaced:
        signal.signal(number, handler_of_all)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
