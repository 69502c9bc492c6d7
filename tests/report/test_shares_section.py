"""Tables of shares by speed: moves beside the measured and predicted times, and the speed of each worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from report.synthetic_runs import named, training, write_run

from stretto.events import of_process
from stretto.report import run_log, shares_section
from stretto.report.html_report import write
from stretto.report.shares_section import SHARES


def moved(t: float, after: int | None, shares: list[int], measured_s: float, predicted_s: float) -> dict[str, Any]:
    """Return an event of two workers, of which the second one is four times slower."""
    speeds = [(0, 0.0, 0.001), (1, 0.0, 0.004)]
    times = {"measured_s": measured_s, "predicted_s": predicted_s, "even_s": 0.064}
    where = {"epoch": 1, "after": after, "members": [0, 1], "shares": shares}
    return {"event": "shares", "t": t, **of_process(0), **where, "paces": speeds, "speeds": speeds, **times}


def test_moves_stand_beside_measured_times_and_what_they_gain(tmp_path: Path) -> None:
    made = [moved(0.2, 5, [24, 8], 0.064, 0.032), moved(0.4, 10, [26, 6], 0.032, 0.026)]
    made.append(moved(0.6, None, [26, 6], 0.0265, 0.026))
    events = [*map(named, training(2, 0.02, 1000, 1, 0.97)), *made]
    folder = write_run(tmp_path / "run", recipe="allreduce()", workers=2, events=events)
    moves, workers = shares_section.sheets(run_log.read(folder))
    rows = [[cell.text for cell in row] for row in moves.rows]
    assert moves.title == workers.title == SHARES
    assert moves.note.startswith("Steps are 2.46")
    assert [row[1:6] for row in rows] == [
        ["epoch 1, step 6", "24, 8", "64.0 ms", "32.0 ms", "64.0 ms"],
        ["epoch 1, step 11", "26, 6", "32.0 ms", "26.0 ms", "64.0 ms"],
        ["as before", "26, 6", "26.5 ms", "26.0 ms", "64.0 ms"],
    ]
    assert [[cell.text for cell in row][:4] for row in workers.rows] == [
        ["worker 0", "0 ms", "1.00 ms", "26"],
        ["worker 1", "0 ms", "4.00 ms", "6"],
    ]
    assert SHARES in write(folder).read_text()


def test_a_run_with_even_shares_has_no_such_tables(tmp_path: Path) -> None:
    assert shares_section.sheets(run_log.read(write_run(tmp_path / "run", recipe="allreduce()", workers=2))) == []
