"""Clocks and sleeping of a simulated script in virtual time, with notices where that can mislead."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from stretto.trainers import FILES

CLOCK_FUNCTIONS = ("time", "monotonic", "perf_counter", "process_time")
"""Functions of `time` that return virtual seconds; so do their variants in nanoseconds."""


LIBRARIES = tuple(f"{name.partition('.')[0]}." for name in FILES)
"""Beginnings of the names of modules that may train in the place of a script, and that log times."""


class ScriptTime:
    """Replaces functions of `time` and `threading` for calls from one file; `end` restores them.

    Clocks are replaced for modules of libraries that train, too. The time of day starts at 0, so that it is the same
    in every run. `now` returns the virtual seconds of the current
    worker, or None when no worker runs; `sleep` lets the worker sleep; `note` shows a notice.
    """

    def __init__(
        self, file: str, now: Callable[[], float | None], sleep: Callable[[float], None], note: Callable[[str], None]
    ) -> None:
        self._file, self._now, self._sleep, self._note = file, now, sleep, note
        self._originals: list[tuple[Any, str, Any]] = []

    def begin(self) -> None:
        """Replace the functions."""
        for name in CLOCK_FUNCTIONS:
            self._replace(time, name, self._virtual_clock(name, getattr(time, name), 1.0))
            self._replace(time, f"{name}_ns", self._virtual_clock(name, getattr(time, f"{name}_ns"), 1e9))
        self._replace(time, "sleep", self._virtual_sleep(time.sleep))
        self._replace(threading.Thread, "start", self._noting_thread_start(threading.Thread.start))

    def end(self) -> None:
        """Restore the functions."""
        while self._originals:
            holder, name, function = self._originals.pop()
            setattr(holder, name, function)

    def _replace(self, holder: Any, name: str, function: Any) -> None:
        self._originals.append((holder, name, getattr(holder, name)))
        setattr(holder, name, function)

    def _calling_line(self) -> int | None:
        """Return the line of the script that made the call, or None if other code did."""
        caller = sys._getframe(2)
        return caller.f_lineno if caller.f_code.co_filename == self._file else None

    def _virtual_clock(self, name: str, original: Callable[[], Any], unit: float) -> Callable[[], Any]:
        def read() -> Any:
            line = self._calling_line()
            is_virtual = line is not None or str(sys._getframe(1).f_globals.get("__name__")).startswith(LIBRARIES)
            now = self._now() if is_virtual else None
            if now is None:
                return original()
            if line is not None:
                self._note(f"line {line} of the script reads a clock (time.{name}): it returns virtual time")
            return now if unit == 1.0 else round(now * unit)

        return read

    def _virtual_sleep(self, original: Callable[[float], None]) -> Callable[[float], None]:
        def sleep(seconds: float) -> None:
            line = self._calling_line()
            if line is None or self._now() is None:
                original(seconds)
                return
            self._note(f"line {line} of the script sleeps: in virtual time")
            self._sleep(seconds)

        return sleep

    def _noting_thread_start(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def start(thread: threading.Thread) -> None:
            line = self._calling_line()
            if line is not None and self._now() is not None:
                self._note(f"line {line} of the script starts a thread: its work takes no virtual time")
            original(thread)

        return start
