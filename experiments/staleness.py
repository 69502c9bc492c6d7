"""Experiment on the staleness of updates of asynchronous workers."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure

from experiments.experiment import SEEDS, Experiment, legend, line, logarithmic, number, panel, rows, ticks
from experiments.runs import Found, Point, Values, distinct, mean, where

WORKERS = (2, 4, 8, 16, 32, 64)
ROUNDS = 64
SETTINGS = {
    "equal": ("equal", "instant"),
    "equal, a shared link": ("equal", "100Mbit/s 1ms"),
    "lognormal(0.5) workers": ("lognormal(0.5)", "instant"),
    "exponential steps": ("exponential", "instant"),
}


def grid(quick: bool) -> list[Point]:
    """Return each number of workers in each setting, with 64 updates per worker on average."""
    found = []
    for setting, (speeds, network) in SETTINGS.items():
        for seed in SEEDS[: 1 if quick else None]:
            for workers in WORKERS[: 2 if quick else None]:
                args = f"--batch 4 --lr 0.005 --epochs 1 --samples {4 * ROUNDS * workers}"
                values: Values = {"setting": setting, "workers": workers}
                found.append(Point(values, workers, "async_sgd", args, seed, network, speeds))
    return found


def staleness(found: Found, setting: str, workers: int) -> float:
    """Return the mean over updates and seeds."""
    points = where(found["points"], {"setting": setting, "workers": workers})
    return mean([one["staleness"] for one in points], "mean") or 0.0


def table(found: Found) -> Iterator[str]:
    """Yield mean and largest staleness."""
    body = []
    for workers in distinct(found["points"], "workers"):
        row = [str(workers), str(workers - 1)]
        for setting in distinct(found["points"], "setting"):
            points = where(found["points"], {"setting": setting, "workers": workers})
            most = max(one["staleness"]["max"] for one in points)
            row.append(f"{number(staleness(found, setting, workers), 2)} ({most})")
        body.append(row)
    yield from rows(["workers", "N - 1", *distinct(found["points"], "setting")], body)


def paint(figure: Figure, found: Found) -> None:
    """Plot staleness by N, and the distribution for the largest N."""
    workers = distinct(found["points"], "workers")
    ax = panel(figure, 0, 2, "mean staleness", "workers")
    ax.plot(workers, [one - 1 for one in workers], color="#8a8a8a", ls=(0, (2, 2)), lw=1, label="N - 1")
    for place, setting in enumerate(distinct(found["points"], "setting")):
        line(ax, workers, [staleness(found, setting, one) for one in workers], setting, place)
    ticks(ax, workers)
    logarithmic(ax)
    legend(ax)
    ax = panel(figure, 1, 2, f"share of updates, {workers[-1]} workers", "staleness")
    for place, setting in enumerate(distinct(found["points"], "setting")):
        points = where(found["points"], {"setting": setting, "workers": workers[-1]})
        counts: dict[int, int] = {}
        for one in points:
            for value, count in one["staleness"]["histogram"].items():
                counts[int(value)] = counts.get(int(value), 0) + count
        whole, xs = sum(counts.values()), sorted(counts)
        line(ax, xs, [counts[one] / whole for one in xs], setting, place, marker="")
    ax.set_xlim(0, 3 * workers[-1])
    logarithmic(ax)


def verdict(found: Found) -> str:
    """Return the distance of the means from N - 1."""
    settings, workers = distinct(found["points"], "setting"), distinct(found["points"], "workers")
    shares = [staleness(found, setting, one) / (one - 1) for setting in settings for one in workers]
    held = "The claim holds" if min(shares) > 0.9 and max(shares) < 1.1 else "The claim does not hold everywhere"
    return (
        f"{held}: the means are {min(shares):.4f} to {max(shares):.4f} times N - 1; speeds only shape the distribution."
    )


EXPERIMENT = Experiment(
    name="staleness",
    title="Mean staleness of naive asynchrony",
    claim="Under naive asynchrony the mean staleness is about N (parameter server).",
    setting="`async_sgd`, one epoch of 64 N updates; seeds 0, 1, 2. An update counts in the staleness of each of the "
    "N - 1 others that are under way, so the mean must be N - 1, less half of it over the 64 rounds, which the "
    "first updates miss. In brackets the largest.",
    grid=grid,
    table=table,
    paint=paint,
    verdict=verdict,
)
