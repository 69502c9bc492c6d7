"""What goes wrong in a simulation: the same as is done to live processes on purpose, and links besides."""

from stretto.chaos import (
    At,
    Cut,
    Every,
    Fault,
    Happening,
    Kill,
    Pause,
    Slow,
    Target,
    check,
    parse,
    schedule,
)

__all__ = [
    "At",
    "Cut",
    "Every",
    "Fault",
    "Happening",
    "Kill",
    "Pause",
    "Slow",
    "Target",
    "check",
    "parse",
    "schedule",
]
