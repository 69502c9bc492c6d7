"""Formatting of numbers for people."""

from __future__ import annotations

NOTHING = "–"


def figure(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, without an exponent between 1e-4 and 1e9."""
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
    """Format a whole number with thousands separators."""
    return NOTHING if value is None else f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """Format a time in seconds, minutes or hours."""
    if value is None:
        return NOTHING
    if value >= 6000:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 100 else f"{figure(value)} s"


def percent(value: float | None) -> str:
    """Format a share as a percentage."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    return f"{100 * value:.1f}%" if value < 0.0995 else f"{100 * value:.0f}%"


def signed(value: float | None) -> str:
    """Format a difference with its sign."""
    if value is None:
        return NOTHING
    if abs(value) < 5e-7:
        return "±0"
    return ("+" if value > 0 else "-") + figure(abs(value), 2)


def times(value: float | None) -> str:
    """Format a ratio."""
    return NOTHING if value is None else f"{figure(value)}×"


def plural(number: int, noun: str) -> str:
    """Format a number with its noun in the singular or plural."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration(value: float) -> str:
    """Format an approximate time."""
    if value < 60:
        return f"{max(1, round(value))} s"
    return f"{round(value / 60)} min" if value < 5400 else f"{value / 3600:.1f} h"
