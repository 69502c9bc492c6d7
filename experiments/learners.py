"""Experiment with Zhang's 30 learners: the full learning rate, and the rate divided by the staleness."""

from __future__ import annotations

from collections.abc import Iterator

from matplotlib.figure import Figure

from experiments.experiment import SEEDS, Experiment, legend, line, logarithmic, number, panel, percent, rows
from experiments.runs import Found, Point, Values, distinct, mean, where

LEARNERS = 30
SOFTSYNC = (1, 15, 30)
ARGS = "--batch 4 --lr 0.05 --momentum 0.9"
SPEEDS = "lognormal(0.3, each=step)"
ONE = "one learner"
RATES = ("alpha0", "alpha0 / staleness")


def recipe(n: int, rate: str) -> str:
    """Return the recipe of n-softsync, which applies updates in groups of floor(30 / n)."""
    collect = LEARNERS // n
    plain = f"soft_sync(collect={collect})" if collect > 1 else "async_sgd"
    return plain if rate == RATES[0] else f"staleness_aware(collect={collect})"


def grid(quick: bool) -> list[Point]:
    """Return one learner, and 30 learners with each n and each rate."""
    found = []
    for seed in SEEDS[: 1 if quick else None]:
        args = f"{ARGS} --samples 5748 --epochs 4"
        found.append(Point({"n": ONE, "rate": RATES[0]}, 1, "allreduce", args, seed))
        for n in SOFTSYNC[: 2 if quick else None]:
            for rate in RATES:
                values: Values = {"n": n, "rate": rate}
                found.append(Point(values, LEARNERS, recipe(n, rate), args, seed, speeds=SPEEDS))
    return found


def counts(points: list[Found]) -> dict[int, int]:
    """Return the number of updates of all seeds for each staleness."""
    found: dict[int, int] = {}
    for one in points:
        for value, count in ((one["staleness"] or {}).get("histogram") or {}).items():
            found[int(value)] = found.get(int(value), 0) + count
    return dict(sorted(found.items()))


def late(points: list[Found], n: int) -> float:
    """Return the share of updates with a staleness above 2 n."""
    found = counts(points)
    return sum(count for value, count in found.items() if value > 2 * n) / max(sum(found.values()), 1)


def table(found: Found) -> Iterator[str]:
    """Yield accuracy and staleness."""
    body = []
    for n in distinct(found["points"], "n"):
        for rate in RATES:
            points = where(found["points"], {"n": n, "rate": rate})
            if not points:
                continue
            row = [ONE if n == ONE else f"30, {n}-softsync", rate, percent(points)]
            if n == ONE:
                body.append([*row, "", "", ""])
                continue
            stale = [one["staleness"] for one in points]
            most = max(one["max"] for one in stale)
            body.append([*row, number(mean(stale, "mean"), 2), str(most), f"{late(points, n):.4%}"])
    yield from rows(["learners", "rate", "test accuracy", "mean staleness", "largest", "P(t > 2n)"], body)


def paint(figure: Figure, found: Found) -> None:
    """Plot accuracy by n, and the distribution of the staleness."""
    ns = [one for one in distinct(found["points"], "n") if one != ONE]
    ax = panel(figure, 0, 2, "test accuracy", "n of n-softsync")
    for place, rate in enumerate(RATES):
        ys = [mean(where(found["points"], {"n": n, "rate": rate}), "accuracy") for n in ns]
        line(ax, ns, ys, rate, place)
    alone = mean(where(found["points"], {"n": ONE}), "accuracy")
    if alone is not None:
        ax.axhline(alone, color="#8a8a8a", ls=(0, (2, 2)), lw=1, label=ONE)
    ax.set_xticks(ns)
    ax.set_ylim(0, 1.02)
    legend(ax)
    ax = panel(figure, 1, 2, "share of updates, alpha0 / staleness", "staleness")
    for place, n in enumerate(ns):
        found_ = counts(where(found["points"], {"n": n, "rate": RATES[1]}))
        whole = sum(found_.values())
        line(ax, list(found_), [count / whole for count in found_.values()], f"{n}-softsync", place + 2, marker=".")
    logarithmic(ax)
    legend(ax)


NEAR, FAILED = 0.03, 0.5
"""Difference to the accuracy of one learner that counts as equal; accuracy below which a run has diverged."""

MOST = 1e-4
"""P(t > 2n) in the paper."""


def verdict(found: Found) -> str:
    """Return the settings that diverge, and the largest staleness."""
    alone = mean(where(found["points"], {"n": ONE}), "accuracy") or 0.0
    said, held, ns = [], [], [one for one in distinct(found["points"], "n") if one != ONE]
    for n in ns:
        whole, divided = (mean(where(found["points"], {"n": n, "rate": rate}), "accuracy") or 0.0 for rate in RATES)
        held.append(divided > alone - NEAR and (n == 1 or whole < FAILED))
        said.append(f"{n}-softsync {whole:.1%} with alpha0 and {divided:.1%} with alpha0 / staleness")
    share = max(late(where(found["points"], {"n": n}), n) for n in ns)
    tail = "holds too" if share < MOST else "does not hold with these speeds"
    first = "The claim holds" if all(held) else "The claim does not hold for every n"
    return (
        f"{first}: one learner reaches {alone:.1%}, "
        f"{'; '.join(said)}. The claim about the tail {tail}: P(t > 2n) is up to {share:.2%}, and depends on how much "
        "the times of steps vary."
    )


EXPERIMENT = Experiment(
    name="learners",
    title="30 learners: the rate divided by the staleness",
    claim="With 30 learners and minibatches of 4, 15- and 30-softsync fail with the learning rate of one learner and "
    "learn as one learner does with that rate divided by the staleness; n-softsync has a mean staleness of about n, "
    "and P(t > 2n) < 0.0001 (Zhang, Gupta, Lian, Liu 2015, 1511.05950).",
    setting="Digits, 5,748 minibatches of 4, momentum 0.9 as in the paper (each learner has its own velocity), "
    f"alpha0 = 0.05, speeds {SPEEDS}; seeds 0, 1, 2. The paper trained a convolutional network on CIFAR-10. "
    "A run whose numbers are no longer finite counts as 10%.",
    grid=grid,
    table=table,
    paint=paint,
    verdict=verdict,
)
