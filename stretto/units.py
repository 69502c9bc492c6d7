"""Numbers, and quantities with units: parsing and printing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from math import inf

NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]{1,4})?"
QUANTITY = re.compile(rf"({NUMBER}) *([a-z/%]*)", re.ASCII | re.IGNORECASE)
PLAIN = {"": Decimal(1)}
TIMES = {"h": Decimal(3600), "m": Decimal(60), "s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6")}
"""Seconds of each unit of time."""


def spelled(number: float) -> str:
    """Return the shortest text that parses to this number.

    >>> spelled(2.0), spelled(0.1)
    ('2', '0.1')
    """
    return repr(float(number)).removesuffix(".0")


def quantity(text: str, units: Mapping[str, Decimal]) -> float | None:
    """Parse a finite number with one of these units, in any case of letters; return None for any other text.

    >>> quantity("1.5KB", {"MB": Decimal(10**6), "kB": Decimal(1000)})
    1500.0
    """
    match = QUANTITY.fullmatch(text)
    scales = [scale for unit, scale in units.items() if match and unit.lower() == match[2].lower()]
    value = float(Decimal(match[1]) * scales[0]) if match and scales else inf
    return value if value < inf else None


def seconds(text: str) -> float | None:
    """Parse a time into seconds; return None for any other text.

    >>> seconds("500ms"), seconds("10s"), seconds("2m"), seconds("1h"), seconds("10")
    (0.5, 10.0, 120.0, 3600.0, None)
    """
    return quantity(text, TIMES)
