"""The machine's clock, for those who may not look at it themselves."""

from __future__ import annotations

import time
from collections.abc import Callable

SHOW_EVERY_S = 0.1


def seconds() -> float:
    """Seconds since some moment."""
    return time.perf_counter()


def sparing(show: Callable[[], None]) -> Callable[[], None]:
    """The same, but not done again within a tenth of a second."""
    shown = float("-inf")

    def maybe() -> None:
        nonlocal shown
        if seconds() - shown >= SHOW_EVERY_S:
            show()
            shown = seconds()

    return maybe
