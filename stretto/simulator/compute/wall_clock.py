"""The real clock, for modules that may not read it themselves (tests/test_code_rules.py)."""

from __future__ import annotations

import time
from collections.abc import Callable

SHOW_EVERY_S = 0.1


def seconds() -> float:
    """Return real seconds since an arbitrary time."""
    return time.perf_counter()


def throttled(show: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `show`, but at most every 0.1 seconds."""
    last_s = float("-inf")

    def show_if_due() -> None:
        nonlocal last_s
        if seconds() - last_s >= SHOW_EVERY_S:
            show()
            last_s = seconds()

    return show_if_due
