"""Parsing and printing of numbers and times, and marks under an unreadable part of a text."""

from __future__ import annotations

import re
from math import inf

NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?"
ALONE = re.compile(NUMBER, re.ASCII | re.IGNORECASE)
DURATION = re.compile(rf"({NUMBER})(ms|s|m|h)", re.ASCII | re.IGNORECASE)


def marked(text: str, start: int, stop: int) -> str:
    """Return a text for the second line of an error, with marks under the wrong part.

    >>> print("  got: " + marked("equl", 0, 4))
      got: equl
           ^^^^
    """
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    return f"{shown}\n{' ' * (len('  got: ') + start)}{'^' * max(1, stop - start)}"


def spelled(number: float) -> str:
    """Return the shortest text that parses to this number.

    >>> spelled(2.0), spelled(0.1)
    ('2', '0.1')
    """
    return repr(float(number)).removesuffix(".0")


def numeric(text: str) -> float | None:
    """Parse a finite number of at least 0; return None for any other text."""
    value = float(text) if ALONE.fullmatch(text) else inf
    return value if value < inf else None


def seconds(text: str) -> float | None:
    """Parse a time into seconds; return None for any other text.

    >>> seconds("500ms"), seconds("10s"), seconds("2m"), seconds("1h"), seconds("10")
    (0.5, 10.0, 120.0, 3600.0, None)
    """
    match = DURATION.fullmatch(text)
    value = numeric(match[1]) if match else None
    if match is None or value is None:
        return None
    unit = match[2].lower()
    return numeric(spelled(value / 1000 if unit == "ms" else value * {"s": 1, "m": 60, "h": 3600}[unit]))
