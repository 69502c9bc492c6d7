"""Experiment on the bound of stale synchronous parallel with slow workers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from matplotlib.figure import Figure

from experiments.experiment import SEEDS, Experiment, legend, line, number, panel, percent, rows
from experiments.runs import Found, Point, distinct, mean, where

WORKERS = 16
BOUNDS = ("0", "1", "2", "4", "8", "16", "inf")
SPEEDS = ("slow(0.1, 5)", "exponential")
TARGET = "test_accuracy>=0.93"
ARGS = "--batch 8 --lr 0.4 --samples 2874 --epochs 7"


def recipe(bound: str) -> str:
    """Return stale synchronous parallel, or asynchronous SGD with the same weight 1/16 without a bound."""
    return f"async_sgd(weight={1 / WORKERS})" if bound == "inf" else f"stale_synchronous(bound={bound})"


def grid(quick: bool) -> list[Point]:
    """Return each bound with each distribution of speeds."""
    return [
        Point({"speeds": speeds, "bound": bound}, WORKERS, recipe(bound), ARGS, seed, speeds=speeds, target=TARGET)
        for speeds in SPEEDS[: 1 if quick else None]
        for bound in BOUNDS[:: 3 if quick else 1]
        for seed in SEEDS[: 1 if quick else None]
    ]


def table(found: Found) -> Iterator[str]:
    """Yield time, pace, accuracy and staleness."""
    body = []
    for speeds in distinct(found["points"], "speeds"):
        for bound in distinct(found["points"], "bound"):
            points = where(found["points"], {"speeds": speeds, "bound": bound})
            stale = mean([one["staleness"] for one in points], "mean")
            to_target = number(mean(points, "seconds_to_target"), 2)
            pace = number(mean(points, "samples_per_second"), 0)
            body.append([speeds, bound, to_target, pace, percent(points), number(stale, 2)])
    head = ["speeds", "bound", "seconds to 93%", "samples/s", "accuracy at the end", "mean staleness"]
    yield from rows(head, body)


def paint(figure: Figure, found: Found) -> None:
    """Plot the time to the target and staleness."""
    bounds = distinct(found["points"], "bound")
    for place, title in enumerate(("seconds to 93%", "mean staleness")):
        ax = panel(figure, place, 2, title, "bound")
        for colour, speeds in enumerate(distinct(found["points"], "speeds")):
            points = [where(found["points"], {"speeds": speeds, "bound": one}) for one in bounds]
            times = [mean(one, "seconds_to_target") for one in points]
            stale = [mean([each["staleness"] for each in one], "mean") for one in points]
            line(ax, range(len(bounds)), stale if place else times, speeds, colour)
        ax.set_xticks(range(len(bounds)), bounds)
        ax.set_ylim(bottom=0)
        legend(ax)


def verdict(found: Found) -> str:
    """Return the comparison of the best bound with the barrier and with no bound."""
    said = []
    for speeds in distinct(found["points"], "speeds"):
        times = {
            bound: mean(where(found["points"], {"speeds": speeds, "bound": bound}), "seconds_to_target") or math.inf
            for bound in distinct(found["points"], "bound")
        }
        between = min(times[bound] for bound in times if bound not in ("0", "inf"))
        held = "holds" if between < min(times["0"], times["inf"]) else "does not hold"
        gains = ", ".join(f"{times['0'] / time:.2f} ({bound})" for bound, time in times.items() if time < math.inf)
        said.append(
            f"With `{speeds}` the claim {held}: times as fast to 93% as the barrier, by bound: {gains or 'none'}."
        )
    return " ".join(said)


EXPERIMENT = Experiment(
    name="bound",
    title="The bound of stale synchronous parallel under stragglers",
    claim="A bound between the barrier (0) and asynchrony (inf) is faster to the target than both: it forgives "
    "stragglers and limits staleness (Ho et al. 2013).",
    setting="16 workers, digits, minibatches of 8, each update added by one 16th under every bound; seeds 0, 1, 2. "
    "`slow(0.1, 5)` makes 2 workers 5 times slower for good; `exponential` draws each step independently. All workers "
    "wait at the end of an epoch of 22 rounds, where rounds count from 0 again. Times are those of evaluations, one an "
    "epoch.",
    grid=grid,
    table=table,
    paint=paint,
    verdict=verdict,
)
