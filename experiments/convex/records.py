"""Records and table of the convex study: one row for each method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from experiments.convex.descent import Outcome
from experiments.convex.methods import GD
from stretto.report import formatting

Record = Mapping[str, Any]


def record(outcome: Outcome, gd: Outcome | None) -> dict[str, Any]:
    """Return the JSON record of a method; `gd` is the course of gradient descent that its bits are compared with."""
    return {
        "method": outcome.method,
        "workers": outcome.workers,
        "rounds": outcome.rounds,
        "uplink_bits": outcome.uplink_bits,
        "saved": _saved(outcome, gd),
        "reached": outcome.reached,
        "objective_error": outcome.error if outcome.error < float("inf") else None,
    }


def _saved(outcome: Outcome, gd: Outcome | None) -> float | None:
    """Return the share of gradient descent's uplink bits that was saved, or None if either missed the target."""
    if gd is None or not (gd.reached and outcome.reached and gd.uplink_bits):
        return None
    return 1 - outcome.uplink_bits / gd.uplink_bits


def best(records: Iterable[Record]) -> Record | None:
    """Return the record of the method that reached the target with the fewest bits."""
    return min((row for row in records if row["reached"]), key=lambda row: int(row["uplink_bits"]), default=None)


def verdict(records: Sequence[Record], target: float) -> str:
    """Return one sentence that names the method with the fewest bits."""
    winner = best(records)
    if winner is None:
        return f"No method came within {target:g} of the optimum."
    if winner["method"] == GD:
        return f"No method needs fewer bits than {GD}."
    gd = next((row for row in records if row["method"] == GD), None)
    rounds = f"{winner['rounds']:,} rounds" + (f" against {gd['rounds']:,}" if gd and gd["reached"] else "")
    saved = f", {winner['saved']:.2%} fewer bits than {GD}" if winner["saved"] is not None else ""
    return f"Fewest bits: {winner['method']}{saved}, in {rounds}."


def table(records: Sequence[Record]) -> Table:
    """Return the records as a table for the terminal."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    made.add_column("method", overflow="fold")
    for heading in ("rounds", "uplink bits", f"saved against {GD}", "objective error"):
        made.add_column(heading, justify="right", overflow="fold")
    for row in records:
        made.add_row(*map(Text, _cells(row)))
    return made


def _cells(row: Record) -> tuple[str, ...]:
    rounds = formatting.count(row["rounds"]) + ("" if row["reached"] else " (not reached)")
    saved = formatting.NOTHING if row["saved"] is None else f"{row['saved']:.2%}"
    error = "infinite" if row["objective_error"] is None else f"{row['objective_error']:.2e}"
    return row["method"], rounds, formatting.count(row["uplink_bits"]), saved, error
