"""Signals that ask a command to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def heeded(hear: Callable[[int], object]) -> Iterator[None]:
    """Call `hear` with each that comes. Those ignored from the start, as by nohup, stay so.

    Beside the main thread, which alone is told of signals, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def tell(number: int, _frame: FrameType | None) -> None:
        hear(number)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    heard = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in heard:
        signal.signal(number, tell)
    try:
        yield
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)
