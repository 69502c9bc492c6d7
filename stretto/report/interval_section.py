"""Section of a page on the local steps between rounds, where the workers agree on them by measured times."""

from __future__ import annotations

from stretto.events import Event
from stretto.report import formatting
from stretto.report.run_log import History
from stretto.report.tables import Cell, Sheet

INTERVAL = "Local steps between rounds"
MOST_ROWS = 16
NOTE = (
    "The workers have agreed on these numbers, by the seconds of a step of the slowest worker and of an exchange. "
    "Exchanging: the part of the time that exchanges take at these seconds."
)
COLUMNS = ("time", "from step", "local steps", "a step", "an exchange", "exchanging")


def sheets(history: History) -> list[Sheet]:
    """Return the table of a run with `every=overhead(...)`, of its last changes; nothing for others."""
    events = history.of("interval")
    omitted = f" The last {MOST_ROWS} of {len(events)} changes." if len(events) > MOST_ROWS else ""
    return [Sheet(INTERVAL, NOTE + omitted, COLUMNS, tuple(map(_row, events[-MOST_ROWS:])))] if events else []


def _row(event: Event) -> tuple[Cell, ...]:
    steps, step_s, exchange_s = event["local_steps"], event["step_s"], event["exchange_s"]
    part, took = exchange_s / (exchange_s + steps * step_s), (step_s, exchange_s)
    texts = (formatting.seconds(event["t"]), str(event["step"] + 1), str(steps), *map(formatting.seconds, took))
    return tuple(map(Cell, (*texts, formatting.percent(part))))
