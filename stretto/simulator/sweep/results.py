"""Results of the points of a sweep, with speed-up and the number of workers beyond which more stop paying.

The format is that of `sweep.json`: a point is a flat record; `values` holds its values by axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.errors import LogError
from stretto.report import equal_samples, run_log
from stretto.report.equal_samples import value_at
from stretto.report.metrics import as_good as is_as_good
from stretto.report.metrics import direction, main_metric
from stretto.report.run_record import Record, record, write_json
from stretto.report.tables import share
from stretto.report.target import Target
from stretto.simulator.sweep.grid import RECIPE, WORKERS, Point

NAME = "sweep.json"
COMPLETE_MARK = "whole"
"""Name of the file that marks a point's folder as complete."""

POINTS = "points"
PAYS = 0.05
"""Least relative gain in speed for which more workers pay."""

TARGET, PACE = "target", "samples_per_second"
"""Measures of speed-up: time to the target, or samples per second."""

Result = Mapping[str, Any]


def measured(point: Point, folder: Path, target: Target | None) -> Record:
    """Return the record of a point from its run directory, in virtual seconds. Raises LogError if it cannot be read.

    `seconds_to_target` is None if the target was not reached, `mean_staleness` for synchronous recipes;
    `bytes_sent_per_worker` is a mean, `waiting_share` a fraction of the total time of all workers.
    """
    run_record = record(folder)
    reached = (target.reached(run_record["evaluations"]) if target else None) or {}
    sent = run_record["bytes_sent"]
    return {
        **_identity(point),
        "failed": run_record["failed"],
        "workers": run_record["workers"],
        "seconds": run_record["seconds"],
        "seconds_to_target": reached.get("seconds"),
        "samples_to_target": reached.get("samples"),
        "metrics": run_record["metrics"],
        "evaluations": run_record["evaluations"],
        "samples": run_record["samples"],
        "samples_per_second": run_record["samples_per_second"],
        "steps": run_record["steps"],
        "rounds": run_record["rounds"],
        "bytes_sent_per_worker": sum(sent) / len(sent) if sent else None,
        "mean_staleness": (run_record["staleness"] or {}).get("mean"),
        "waiting_share": share(run_record, "waiting"),
    }


def failed(point: Point, error: str) -> Record:
    """Return the record of a failed point."""
    unmeasured = ("seconds", "seconds_to_target", "samples_to_target", PACE, "bytes_sent_per_worker")
    also_unmeasured = ("mean_staleness", "waiting_share", "samples", "steps", "rounds")
    facts = {"failed": error, "workers": int(point.options.get(WORKERS, 1)), "metrics": {}, "evaluations": []}
    return {**_identity(point), **facts, **dict.fromkeys((*unmeasured, *also_unmeasured))}


def _identity(point: Point) -> Record:
    """Return the fields that identify a point: folder, values by axis, and recipe (None: the script's own)."""
    return {"folder": f"{POINTS}/{point.name}", "values": dict(point.values), "recipe": point.options.get(RECIPE)}


# Comparison


def lines(point_records: Iterable[Result], across: str = WORKERS) -> dict[str, list[Result]]:
    """Return the points grouped into lines, which differ only in one axis, in its order, by the lines' labels."""
    sorted_: dict[str, list[Result]] = {}
    for point in point_records:
        sorted_.setdefault(label(point, across), []).append(point)
    return {name: sorted(line, key=lambda point: place(point, across)) for name, line in sorted_.items()}


def label(point: Result, across: str = WORKERS) -> str:
    """Return the label of a point's line along an axis: its other values, or its recipe if there are none."""
    values = {name: value for name, value in point["values"].items() if name != across}
    texts = [value if name == RECIPE else f"{name}={value}" for name, value in values.items()]
    recipe = str(point["recipe"] or "the script's recipe")
    return ", ".join(texts) or (recipe if across == WORKERS else recipe.partition("(")[0])


def place(point: Result, across: str) -> float:
    """Return the value of a point on a numeric axis."""
    return float(point["workers"] if across == WORKERS else point["values"].get(across) or 0)


def compared(point_records: Sequence[Result]) -> list[Record]:
    """Return the points with `speed_up`, `speed_up_by`, `efficiency` and `as_good`.

    `speed_up = t_1 / t_N` and `efficiency = speed_up / N`, relative to the point with one worker and all else equal.
    The time t is that to the target if the point with one worker reached it, else that per sample. A point that did not
    reach the target although one worker did has no speed-up. `as_good` is True if the main metric of a point, after
    equal numbers of samples, is as good as that of the fewest workers of its line, and None if it is unknown.
    """
    fewest = {name: line[0] for name, line in lines(point_records).items()}
    return [_compared(point, fewest[label(point)]) for point in point_records]


def _compared(point: Result, fewest: Result) -> Record:
    base = fewest if fewest["workers"] == 1 else None
    by = measure([base]) if base else None
    own_time, base_time = (time(measured, by) if measured and by else None for measured in (point, base))
    speed_up = base_time / own_time if own_time and base_time else None
    efficiency = None if speed_up is None else speed_up / point["workers"]
    speed = {"speed_up": speed_up, "speed_up_by": by if speed_up else None, "efficiency": efficiency}
    return {**point, **speed, "as_good": as_good([fewest, point])[1]}


def as_good(point_records: Sequence[Result]) -> list[bool | None]:
    """Return for each point if its main metric is as good as that of the best one, after equal numbers of samples.

    The number is the least of any point; None for a point without evaluations near it.
    """
    metric, samples = main_metric(metric_names(point_records)), least_samples(point_records)
    if metric is None or samples is None:
        return [None] * len(point_records)
    values = [None if point["failed"] else value_at(dict(point), metric, samples) for point in point_records]
    known = [value for value in values if value is not None]
    best = max(known, key=lambda value: value * direction(str(metric)), default=None)
    return [None if value is None else is_as_good(metric, value, best) for value in values]


def metric_names(point_records: Iterable[Result]) -> list[str]:
    """Return the metrics that any point has, in the order of their first appearance."""
    return list(dict.fromkeys(name for point in point_records for name in point["metrics"]))


def least_samples(point_records: Iterable[Result]) -> int | None:
    """Return the least number of samples that any complete point trained on."""
    return min((point["samples"] for point in point_records if point["samples"] and not point["failed"]), default=None)


def all_same(point_records: Iterable[Result]) -> bool:
    """Return True if all complete points trained on equal numbers of samples."""
    return equal_samples.all_same(dict(point) for point in point_records if point["samples"])


def measure(line: Sequence[Result]) -> str:
    """Return the measure of a line: the time to the target if any point reached it, else samples per second."""
    return TARGET if any(point["seconds_to_target"] is not None for point in line) else PACE


def time(point: Result, by: str) -> float | None:
    """Return the virtual seconds to the target, or per sample; None if there are none."""
    if by == TARGET:
        seconds: float | None = point["seconds_to_target"]
        return seconds
    return 1 / point[PACE] if point[PACE] else None


def stops_paying(times: Mapping[int, float]) -> int | None:
    """Return the number of workers beyond which more no longer pay, from the time by number of workers.

    It is the smallest number w such that no larger number is at least 5% faster than the best of w and fewer:

    `t_v > 0.95 min_{u <= w} t_u  for all v > w`

    None if only the largest number satisfies this, so the limit is unknown. A number of workers whose run does not
    reach the target has an infinite time.

    >>> stops_paying({1: 8.0, 2: 4.0, 4: 3.0, 8: 2.9, 16: 3.5})
    4
    """
    counts = sorted(times)
    for w in counts[:-1]:
        best = min(times[u] for u in counts if u <= w)
        if all(times[v] > (1 - PAYS) * best for v in counts if v > w):
            return w
    return None


def stops(point_records: Sequence[Result]) -> list[Record]:
    """Return where more workers stop paying, for each line with more than one number of workers.

    `workers` is that number, None if even the largest, `most`, still paid; `by` is the measure. Samples per second
    count at equal quality only: a point that is not as good is infinitely slow.
    """
    return [_stop(name, line) for name, line in lines(point_records).items() if len(_counts(line)) > 1]


def _counts(line: Sequence[Result]) -> set[int]:
    return {int(point["workers"]) for point in line if not point["failed"]}


def _stop(name: str, line: Sequence[Result]) -> Record:
    by = measure(line)
    times = {
        int(point["workers"]): math.inf if by == PACE and point.get("as_good") is False else time(point, by) or math.inf
        for point in line
        if not point["failed"]
    }
    values = {axis: value for axis, value in line[0]["values"].items() if axis != WORKERS}
    return {"line": name, "values": values, "workers": stops_paying(times), "most": max(times), "by": by}


# Storage


def save(folder: Path, head: Result, point_records: Sequence[Result]) -> list[Record]:
    """Write sweep.json, and return its points. Raises LogError if it cannot be written."""
    points = compared(point_records)
    write_json(folder / NAME, {**head, "points": points, "stops_paying": stops(points)})
    return points


def read(folder: Path) -> dict[str, Any]:
    """Return the contents of a folder's sweep.json. Raises LogError if it cannot be read."""
    contents = run_log.read_json(folder / NAME)
    if not isinstance(contents.get("asked"), dict) or not isinstance(contents.get("points"), list):
        raise LogError(f"{folder / NAME} was not written by a sweep")
    return contents
