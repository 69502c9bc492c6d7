"""Figures as a person reads them."""

from __future__ import annotations

NOTHING = "–"


def figure(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits and no exponent where it can be avoided."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-4 or size >= 1e9:
        return f"{value:.{digits - 1}e}"
    if size >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


def count(value: float | None) -> str:
    """A whole number with its thousands set apart."""
    return NOTHING if value is None else f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """A time in a unit that suits its size."""
    if value is None:
        return NOTHING
    if value >= 6000:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 100 else f"{figure(value)} s"


def percent(value: float | None) -> str:
    """A share as a percentage."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    return f"{100 * value:.1f}%" if value < 0.0995 else f"{100 * value:.0f}%"


def signed(value: float | None) -> str:
    """A difference with its sign."""
    if value is None:
        return NOTHING
    if abs(value) < 5e-7:
        return "±0"
    return ("+" if value > 0 else "-") + figure(abs(value), 2)


def times(value: float | None) -> str:
    """A ratio."""
    return NOTHING if value is None else f"{figure(value)}×"


def plural(number: int, noun: str) -> str:
    """A number and its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(value: float) -> str:
    """A time that is only roughly known."""
    if value < 60:
        return f"{max(1, round(value))} s"
    return f"{round(value / 60)} min" if value < 5400 else f"{value / 3600:.1f} h"
