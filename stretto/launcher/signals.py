"""Signals that ask a command to end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STANDARD_INPUT = 0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TERMINATED = 128 + signal.SIGTERM
"""Exit code of a command that SIGTERM has ended."""


class Stopped(BaseException):
    """The launcher received a signal and has ended its workers. Not an Exception: the run did not fail."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number

    def add(self, text: str) -> None:
        """Add lines to the text."""
        if text:
            self.args = (f"{self}\n{text}",)


def end_with_input() -> None:
    """Send SIGTERM to this process when its standard input ends, from a thread."""

    def read() -> None:
        with contextlib.suppress(OSError):
            while os.read(STANDARD_INPUT, 1024):
                pass
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)  # ends its wait

    threading.Thread(target=read, name="input", daemon=True).start()


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
