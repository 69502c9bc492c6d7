"""Experiment on the number of local steps between averages."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure

from experiments.experiment import SEEDS, Experiment, line, number, panel, percent, rows, ticks
from experiments.runs import Found, Point, distinct, mean, where

PERIODS = (1, 4, 10, 20, 50, 200)
WORKERS, PASS = 8, 199 * 8 * 4
"""An epoch has 199 steps per worker, so that for most periods it ends shortly before an average."""

ARGS = {"digits": "--batch 4 --lr 0.1 --epochs 4", "mnist": "--data mnist --batch 4 --lr 0.1 --epochs 4"}
ALONE = "one machine"


def grid(quick: bool) -> list[Point]:
    """Return each period, and one machine with the same samples. With steps of 10 s every average reports its drift."""
    found = []
    for data in ("digits",) if quick else ARGS:
        for seed in SEEDS[: 1 if quick else None]:
            args = f"{ARGS[data]} --samples {PASS}"
            found.append(Point({"data": data, "every": ALONE}, 1, "allreduce", args, seed, step_time="10s"))
            for every in PERIODS[:: 3 if quick else 1]:
                recipe = f"local_sgd(every={every})"
                found.append(Point({"data": data, "every": every}, WORKERS, recipe, args, seed, step_time="10s"))
    return found


def table(found: Found) -> Iterator[str]:
    """Yield accuracy, drift and traffic by period."""
    body = []
    for data in distinct(found["points"], "data"):
        for every in distinct(found["points"], "every"):
            points = where(found["points"], {"data": data, "every": every})
            drift = "" if every == ALONE else number(mean(points, "drift"), 4)
            sent = "" if every == ALONE else number(mean(points, "megabytes_a_worker"), 1)
            body.append([data, str(every), percent(points), number(mean(points, "loss"), 3), drift, sent])
    yield from rows(["data", "averaged every", "test accuracy", "test loss", "drift", "MB sent a worker"], body)


def paint(figure: Figure, found: Found) -> None:
    """Plot accuracy and drift."""
    every = [one for one in distinct(found["points"], "every") if one != ALONE]
    for place, (what, title) in enumerate((("accuracy", "test accuracy"), ("drift", "drift"))):
        ax = panel(figure, place, 2, title, "local steps between averages")
        for colour, data in enumerate(distinct(found["points"], "data")):
            ys = [mean(where(found["points"], {"data": data, "every": one}), what) for one in every]
            line(ax, every, ys, data, colour)
        ticks(ax, every)
        if place == 0:
            ax.legend(frameon=False, fontsize=7)


ACCEPTABLE = 0.01
"""Largest loss of accuracy that counts as acceptable."""


def verdict(found: Found) -> str:
    """Return the cost of period 20 and of the longest period, and the effect of drift."""
    said, near_costs, last_costs = [], [], []
    for data in distinct(found["points"], "data"):
        accuracy = {
            every: mean(where(found["points"], {"data": data, "every": every}), "accuracy") or 0.0
            for every in distinct(found["points"], "every")
        }
        periods = [one for one in accuracy if one != ALONE]
        near, last = min(periods, key=lambda one: abs(one - 20)), periods[-1]
        near_costs.append(accuracy[periods[0]] - accuracy[near])
        last_costs.append(accuracy[periods[0]] - accuracy[last])
        said.append(
            f"{data}: {100 * near_costs[-1]:+.1f} points every {near}, {100 * last_costs[-1]:+.1f} every {last}"
        )
    held = "holds" if max(near_costs) <= ACCEPTABLE else "does not hold"
    harm = (
        "and does harm" if max(last_costs) > ACCEPTABLE else "but does no harm here: all workers see samples of a kind"
    )
    return (
        f"That rare averaging performs acceptably {held}. Its cost against averaging at each step: {'; '.join(said)} "
        f"(below 0: more accurate). Drift grows with the period, {harm}."
    )


EXPERIMENT = Experiment(
    name="averaging",
    title="Averaging period and accuracy",
    claim="Averaging once in 10 to 20 minibatches a worker still performs acceptably well; 1 is all overhead, and too "
    "large a period drifts (parameter averaging; Su and Chen 2015).",
    setting="8 workers and the same samples for all; seeds 0, 1, 2. Drift is `|x_i - x| / |x|` of the worker farthest "
    "from the mean, at the ends of epochs of 199 steps, where most periods are nearly complete.",
    grid=grid,
    table=table,
    paint=paint,
    verdict=verdict,
)
