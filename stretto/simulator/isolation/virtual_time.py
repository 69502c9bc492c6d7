"""What a script sees of clocks and threads while it is simulated: virtual time, and a word where that may deceive."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

READ = ("time", "monotonic", "perf_counter", "process_time")
"""Functions of `time` that are told virtual seconds; those in nanoseconds too."""


class ScriptTime:
    """Puts other functions before those of `time`, for calls from one file; `end` takes them away.

    The time of day begins at 0, so that it is the same in every run. `now` reads the clock of the worker whose turn it
    is, in virtual seconds, or returns None when no worker has its turn; `sleep` lets a worker sleep.
    """

    def __init__(
        self, file: str, now: Callable[[], float | None], sleep: Callable[[float], None], note: Callable[[str], None]
    ) -> None:
        self._file, self._now, self._sleep, self._note = file, now, sleep, note
        self._before: list[tuple[Any, str, Any]] = []

    def begin(self) -> None:
        """From now on."""
        for name in READ:
            self._put(time, name, self._reading(name, getattr(time, name), 1.0))
            self._put(time, f"{name}_ns", self._reading(name, getattr(time, f"{name}_ns"), 1e9))
        self._put(time, "sleep", self._sleeping(time.sleep))
        self._put(threading.Thread, "start", self._starting(threading.Thread.start))

    def end(self) -> None:
        """No longer."""
        while self._before:
            holder, name, function = self._before.pop()
            setattr(holder, name, function)

    def _put(self, holder: Any, name: str, function: Any) -> None:
        self._before.append((holder, name, getattr(holder, name)))
        setattr(holder, name, function)

    def _line(self) -> int | None:
        """The line of the script that has called, if the script has."""
        caller = sys._getframe(2)
        return caller.f_lineno if caller.f_code.co_filename == self._file else None

    def _reading(self, name: str, real: Callable[[], Any], unit: float) -> Callable[[], Any]:
        def read() -> Any:
            line = self._line()
            now = self._now() if line is not None else None
            if now is None:
                return real()
            self._note(f"line {line} of the script reads a clock (time.{name}): it is told virtual time")
            return now if unit == 1.0 else round(now * unit)

        return read

    def _sleeping(self, real: Callable[[float], None]) -> Callable[[float], None]:
        def sleep(seconds: float) -> None:
            line = self._line()
            if line is None or self._now() is None:
                real(seconds)
                return
            self._note(f"line {line} of the script sleeps: it does so in virtual time")
            self._sleep(seconds)

        return sleep

    def _starting(self, real: Callable[[Any], None]) -> Callable[[Any], None]:
        def start(thread: threading.Thread) -> None:
            line = self._line()
            if line is not None and self._now() is not None:
                self._note(f"line {line} of the script starts a thread: what it does takes no virtual time")
            real(thread)

        return start
