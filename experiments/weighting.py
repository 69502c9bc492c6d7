"""Experiment on weighting by staleness and soft synchronisation, separately and combined."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure

from experiments.experiment import SEEDS, Experiment, legend, line, panel, percent, rows, ticks
from experiments.learners import LEARNERS, SPEEDS
from experiments.runs import Found, Point, Values, distinct, mean, where

COLLECTS = (1, 2, 6, 15, 30)
LEARNING_RATES = (0.01, 0.05)
WEIGHTS = ("1", "1 / staleness")


def recipe(collect: int, weight: str) -> str:
    """Return soft synchronisation that collects `collect` updates, with a weight for each."""
    if weight != WEIGHTS[0]:
        return f"staleness_aware(collect={collect})"
    return f"soft_sync(collect={collect})" if collect > 1 else "async_sgd"


def grid(quick: bool) -> list[Point]:
    """Return each number of collected updates with each weight and learning rate."""
    found = []
    for lr in LEARNING_RATES[-1 if quick else 0 :]:
        for weight in WEIGHTS:
            for collect in COLLECTS[:: 3 if quick else 1]:
                for seed in SEEDS[: 1 if quick else None]:
                    args = f"--batch 4 --lr {lr} --momentum 0.9 --samples 5748 --epochs 2"
                    values: Values = {"lr": lr, "weight": weight, "collect": collect}
                    found.append(Point(values, LEARNERS, recipe(collect, weight), args, seed, speeds=SPEEDS))
    return found


def table(found: Found) -> Iterator[str]:
    """Yield accuracies."""
    collects = distinct(found["points"], "collect")
    body = []
    for lr in distinct(found["points"], "lr"):
        for weight in WEIGHTS:
            cells = [percent(where(found["points"], {"lr": lr, "weight": weight, "collect": one})) for one in collects]
            body.append([f"{lr:g}", weight, *cells])
    yield from rows(["learning rate", "weight", *(f"{one} collected" for one in collects)], body)


def paint(figure: Figure, found: Found) -> None:
    """Plot accuracies, with a panel for each learning rate."""
    rates, collects = distinct(found["points"], "lr"), distinct(found["points"], "collect")
    for place, lr in enumerate(rates):
        ax = panel(figure, place, len(rates), f"test accuracy, rate {lr:g}", "updates collected")
        for colour, weight in enumerate(WEIGHTS):
            points = [where(found["points"], {"lr": lr, "weight": weight, "collect": one}) for one in collects]
            line(ax, collects, [mean(one, "accuracy") for one in points], f"weight {weight}", colour)
        ticks(ax, collects)
        ax.set_ylim(0, 1.02)
        legend(ax)


def verdict(found: Found) -> str:
    """Return the best setting of each kind."""
    said, together_wins = [], []
    for lr in distinct(found["points"], "lr"):
        best = {}
        for kind, weight, several in (
            ("neither", WEIGHTS[0], False),
            ("weighting alone", WEIGHTS[1], False),
            ("collecting alone", WEIGHTS[0], True),
            ("both", WEIGHTS[1], True),
        ):
            collects = [one for one in distinct(found["points"], "collect") if (one > 1) == several]
            points = [where(found["points"], {"lr": lr, "weight": weight, "collect": one}) for one in collects]
            best[kind] = max(mean(one, "accuracy") or 0.0 for one in points)
        said.append(f"at rate {lr:g} " + ", ".join(f"{kind} {value:.1%}" for kind, value in best.items()))
        together_wins.append(best["both"] > max(best["weighting alone"], best["collecting alone"]))
    held = {len(together_wins): "The claim holds", 0: "The claim does not hold here"}
    return (
        f"{held.get(sum(together_wins), 'The claim holds at some rates only')}; the best number collected: "
        + "; ".join(said)
        + "."
    )


EXPERIMENT = Experiment(
    name="weighting",
    title="Weighting and soft synchronisation",
    claim="Weighting by staleness and soft synchronisation together beat each alone (Zhang, Gupta, Lian, Liu 2015, "
    "1511.05950).",
    setting="30 learners, 2,874 minibatches of 4 digits, momentum 0.9; seeds 0, 1, 2. 1 collected is naive asynchrony, "
    "30 collected 1-softsync. A run whose numbers are no longer finite counts as 10%.",
    grid=grid,
    table=table,
    paint=paint,
    verdict=verdict,
)
