"""Section of a page on shares by speed: when they moved and what that gained, and the speed of each worker."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from stretto.events import Event
from stretto.report import formatting
from stretto.report.run_log import History, number
from stretto.report.tables import Cell, Sheet

SHARES = "Shares by speed"
MOST_ROWS, MOST_WORKERS = 16, 32
MOVES_NOTE = (
    "Samples of each worker in a global step, in the order of the workers. Measured: time of the last steps before, at "
    "the slowest worker; predicted: with these shares, and with even ones, at the speeds of that moment. Idle: part of "
    "the time since the row above in which each worker waited for slower ones."
)
WORKERS_NOTE = "As measured last: the time of a step is that of the step alone, and that of each of its samples."


def sheets(history: History) -> list[Sheet]:
    """Return the tables of a run with shares by speed; nothing for others."""
    events = history.of("shares")
    if not events:
        return []
    shown = [event for event in events if event.get("after") is not None] or events
    shown = sorted({id(one): one for one in (events[0], *shown[-MOST_ROWS:], events[-1])}.values(), key=_t)
    omitted = f" {len(shown)} of {len(events)} measurements." if len(shown) < len(events) else ""
    times = [0.0, *map(_t, shown)]
    rows = tuple(_move(history, before, event) for before, event in zip(times, shown, strict=False))
    columns = ("time", "from step", "shares", "measured", "predicted", "even, predicted", "idle")
    moves = Sheet(SHARES, f"{_gain(events[-1])} {MOVES_NOTE}{omitted}".strip(), columns, rows)
    workers = _workers(history, events[-1])
    return [moves, Sheet(SHARES, WORKERS_NOTE, ("worker", "a step", "a sample", "share", "idle"), workers)]


def _t(event: Event) -> float:
    return float(event["t"])


def _gain(event: Event) -> str:
    """Return what the present shares gain against even ones."""
    even_s, present_s = number(event.get("even_s")), number(event.get("predicted_s"))
    if even_s is None or not present_s:
        return ""
    return f"Steps are {formatting.times(even_s / present_s)} as fast as with even shares, at the speeds measured last."


def _move(history: History, before: float, event: Event) -> tuple[Cell, ...]:
    after, seconds = event.get("after"), (number(event.get(name)) for name in ("measured_s", "predicted_s", "even_s"))
    step = "as before" if after is None else f"epoch {event.get('epoch')}, step {int(after) + 1}"
    idle = [formatting.percent(_idle(history, worker, before, _t(event))) for worker in event["members"][:MOST_WORKERS]]
    shares = ", ".join(map(str, event["shares"][:MOST_WORKERS]))
    texts = (formatting.seconds(_t(event)), step, shares, *map(_milliseconds, seconds), ", ".join(idle))
    return tuple(map(Cell, texts))


def _workers(history: History, event: Event) -> tuple[tuple[Cell, ...], ...]:
    speeds = {worker: (fixed, each) for worker, fixed, each in event["speeds"]}
    rows = []
    for worker, share in list(zip(event["members"], event["shares"], strict=False))[:MOST_WORKERS]:
        fixed, each = speeds.get(worker, (None, None))
        idle = formatting.percent(_idle(history, worker, 0.0, float("inf")))
        rows.append(tuple(map(Cell, (f"worker {worker}", _milliseconds(fixed), _milliseconds(each), str(share), idle))))
    return tuple(rows)


def _idle(history: History, worker: int, since: float, until: float) -> float | None:
    """Return the part of the time between two moments in which a worker waited, by its events near them."""
    events = history.counts(worker)
    if not events:
        return None
    times = [_t(event) for event in events]
    last, first = min(bisect_left(times, until), len(events) - 1), bisect_left(times, since)
    ends: tuple[Any, Any] = events[last], events[first] if since > 0 and first < last else {"t": 0.0}
    took = ends[0]["t"] - ends[1]["t"]
    waited = [(end.get("time_breakdown") or {}).get("waiting", 0.0) for end in ends]
    return (waited[0] - waited[1]) / took if took > 0 else None


def _milliseconds(value: float | None) -> str:
    return formatting.NOTHING if value is None else f"{formatting.figure(1e3 * value)} ms"
