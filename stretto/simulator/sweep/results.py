"""What the points of a sweep found, and what follows from them together: speed-up, and where it stops to pay.

Everything is as `sweep.json` keeps it: a point is a flat record, its place on the axes under `values`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.errors import LogError
from stretto.report import run_log
from stretto.report.run_record import Record, record, write_json
from stretto.report.tables import share
from stretto.report.target import Target
from stretto.simulator.sweep.grid import RECIPE, WORKERS, Point

NAME = "sweep.json"
WHOLE = "whole"
"""The file that says of a point's folder that its simulation came to its end."""

POINTS = "points"
PAYS = 0.05
"""By how much faster more workers must be to pay."""

TARGET, PACE = "target", "samples_per_second"
"""What speed-up may be measured by."""

Found = Mapping[str, Any]


def measured(point: Point, folder: Path, target: Target | None) -> Record:
    """The record of a point from its run folder. All seconds are virtual. Raises LogError when it can't be read.

    `seconds_to_target` is None when the target was never reached, `mean_staleness` where nothing is stale;
    `bytes_sent_per_worker` is a mean, `waiting_share` of the time of all workers together.
    """
    found = record(folder)
    evaluations = run_log.read(folder).of("evaluation") if target else []
    reached = (target.reached(evaluations) if target else None) or {}
    sent = found["bytes_sent"]
    return {
        **_place(point),
        "failed": found["failed"],
        "workers": found["workers"],
        "seconds": found["seconds"],
        "seconds_to_target": reached.get("seconds"),
        "samples_to_target": reached.get("samples"),
        "metrics": found["metrics"],
        "samples": found["samples"],
        "samples_per_second": found["samples_per_second"],
        "steps": found["steps"],
        "rounds": found["rounds"],
        "bytes_sent_per_worker": sum(sent) / len(sent) if sent else None,
        "mean_staleness": (found["staleness"] or {}).get("mean"),
        "waiting_share": share(found, "waiting"),
    }


def failed(point: Point, error: str) -> Record:
    """The record of a point that left nothing to measure."""
    nothing = ("seconds", "seconds_to_target", "samples_to_target", PACE, "bytes_sent_per_worker")
    more = ("mean_staleness", "waiting_share", "samples", "steps", "rounds")
    asked = {"failed": error, "workers": int(point.options.get(WORKERS, 1)), "metrics": {}}
    return {**_place(point), **asked, **dict.fromkeys((*nothing, *more))}


def _place(point: Point) -> Record:
    """Where it is kept, where it lies on the axes, and the recipe that was asked for; None: the script's own."""
    return {"folder": f"{POINTS}/{point.name}", "values": dict(point.values), "recipe": point.options.get(RECIPE)}


# What follows


def lines(found: Iterable[Found], across: str = WORKERS) -> dict[str, list[Found]]:
    """The points that differ in nothing but one axis, in its order, under the name of what they have in common."""
    sorted_: dict[str, list[Found]] = {}
    for one in found:
        sorted_.setdefault(label(one, across), []).append(one)
    return {name: sorted(line, key=lambda one: place(one, across)) for name, line in sorted_.items()}


def label(one: Found, across: str = WORKERS) -> str:
    """What a point's line along an axis is called: its other values, or when it has none its recipe."""
    values = {name: value for name, value in one["values"].items() if name != across}
    texts = [value if name == RECIPE else f"{name}={value}" for name, value in values.items()]
    recipe = str(one["recipe"] or "the script's recipe")
    return ", ".join(texts) or (recipe if across == WORKERS else recipe.partition("(")[0])


def place(one: Found, across: str) -> float:
    """Where a point lies on an axis of numbers."""
    return float(one["workers"] if across == WORKERS else one["values"].get(across) or 0)


def compared(found: Sequence[Found]) -> list[Record]:
    """The points with `speed_up`, `speed_up_by` and `efficiency`.

    `speed_up = t_1 / t_N` and `efficiency = speed_up / N`, over the point with one worker and all else equal. The time
    t is that to the target, if one was given and that point reached it, else that of a sample. All points of a line
    are measured alike: one that did not reach the target when one worker did has no speed-up.
    """
    one_worker = {name: line[0] for name, line in lines(found).items() if line[0]["workers"] == 1}
    return [_compared(one, one_worker.get(label(one))) for one in found]


def _compared(one: Found, base: Found | None) -> Record:
    by = measure([base]) if base else None
    mine, its = (time(each, by) if each and by else None for each in (one, base))
    speed_up = its / mine if mine and its else None
    efficiency = None if speed_up is None else speed_up / one["workers"]
    return {**one, "speed_up": speed_up, "speed_up_by": by if speed_up else None, "efficiency": efficiency}


def measure(line: Sequence[Found]) -> str:
    """What points are measured by: the time to the target if any of them reached it, else the pace."""
    return TARGET if any(one["seconds_to_target"] is not None for one in line) else PACE


def time(one: Found, by: str) -> float | None:
    """Virtual seconds to the target, or those of a sample; None where there are none."""
    if by == TARGET:
        seconds: float | None = one["seconds_to_target"]
        return seconds
    return 1 / one[PACE] if one[PACE] else None


def stops_paying(times: Mapping[int, float]) -> int | None:
    """The number of workers beyond which more of them no longer pay, from the time that each number needs.

    It is the smallest number w for which no larger number is faster by at least 5% than the best of w and fewer:

    `t_v > 0.95 min_{u <= w} t_u  for all v > w`

    None when that is only the largest number of all: then it is not known where it stops. A number of workers that
    does not get there at all needs an infinite time.

    >>> stops_paying({1: 8.0, 2: 4.0, 4: 3.0, 8: 2.9, 16: 3.5})
    4
    """
    counts = sorted(times)
    for w in counts[:-1]:
        best = min(times[u] for u in counts if u <= w)
        if all(times[v] > (1 - PAYS) * best for v in counts if v > w):
            return w
    return None


def stops(found: Sequence[Found]) -> list[Record]:
    """Where more workers stop to pay, line by line, those left out that have but one number of workers.

    `workers` is that number, None where even the largest, `most`, still paid; `by` is what was measured.
    """
    return [_stop(name, line) for name, line in lines(found).items() if len(_counts(line)) > 1]


def _counts(line: Sequence[Found]) -> set[int]:
    return {int(one["workers"]) for one in line if not one["failed"]}


def _stop(name: str, line: Sequence[Found]) -> Record:
    by = measure(line)
    times = {int(one["workers"]): time(one, by) or math.inf for one in line if not one["failed"]}
    values = {axis: value for axis, value in line[0]["values"].items() if axis != WORKERS}
    return {"line": name, "values": values, "workers": stops_paying(times), "most": max(times), "by": by}


# What is kept


def save(folder: Path, head: Found, found: Sequence[Found]) -> list[Record]:
    """Write sweep.json, and return the points as they stand there. Raises LogError when the disk does not take it."""
    points, unfinished = compared(found), folder / f"{NAME}.unfinished"
    write_json(unfinished, {**head, "points": points, "stops_paying": stops(found)})
    os.replace(unfinished, folder / NAME)
    return points


def read(folder: Path) -> dict[str, Any]:
    """What a folder's sweep.json holds; raises LogError when it can't be read."""
    found = run_log.read_json(folder / NAME)
    if not isinstance(found.get("asked"), dict) or not isinstance(found.get("points"), list):
        raise LogError(f"{folder / NAME} is none that a sweep has written")
    return found
