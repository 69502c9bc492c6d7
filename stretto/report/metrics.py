"""Which of two runs ended better, as far as the name of a metric tells."""

from __future__ import annotations

from collections.abc import Sequence

from stretto.report import formatting
from stretto.report.aggregation import Group, Measure

HIGHER_IS_BETTER = ("acc", "f1", "auc", "precision", "recall", "score", "r2", "bleu", "iou", "correct")
LOWER_IS_BETTER = (
    "loss",
    "err",
    "perplexity",
    "ppl",
    "nll",
    "mse",
    "mae",
    "rmse",
    "bits",
    "bpc",
    "entropy",
    "wer",
)
POINTS = 0.01
SHARE = 0.02


def direction(metric: str) -> int:
    """1 when more is better, -1 when less is, 0 when the name does not say."""
    words = metric.lower().replace("-", "_").replace("/", "_").replace(".", "_").split("_")
    if any(word.startswith(LOWER_IS_BETTER) for word in words):
        return -1
    return 1 if any(word.startswith(HIGHER_IS_BETTER) for word in words) else 0


def tolerance(metric: str, value: float) -> float:
    """How near counts as equally good: 0.01 for shares where more is better, else 2% of the value."""
    return POINTS if _is_share(metric, value) else SHARE * abs(value)


def _is_share(metric: str, value: float) -> bool:
    return direction(metric) == 1 and 0 <= value <= 1


def tolerance_text(metric: str, ideal: Group) -> str:
    """The tolerance in words."""
    return str(POINTS) if _is_share(metric, final(ideal, metric) or 0.0) else f"{SHARE:.0%}"


def main_metric(names: Sequence[str]) -> str | None:
    """The first metric where more is better, else the first whose name has a direction, else the first."""
    ranked = sorted(names, key=lambda name: (direction(name) != 1, direction(name) == 0))
    return ranked[0] if ranked else None


def value(metric: str) -> Measure:
    """The measure that takes this metric from a record."""
    return lambda record: record["metrics"].get(metric)


def final(group: Group, metric: str) -> float | None:
    """The median of a metric at the end."""
    return group.median(value(metric))


def text(group: Group, metric: str) -> str:
    """The same, to read."""
    return formatting.figure(final(group, metric), 4)


def best(groups: Sequence[Group], metric: str) -> Group | None:
    """The group that ended best. When the name has no direction that is the first: the script as it is."""
    measured = [group for group in groups if final(group, metric) is not None]
    return max(measured, key=lambda group: _goodness(group, metric), default=None)


def nearest(groups: Sequence[Group], ideal: Group, metric: str) -> Group | None:
    """The group that came nearest to the ideal."""
    measured = [group for group in groups if final(group, metric) is not None]
    return min(measured, key=lambda group: abs(_gap(group, ideal, metric)), default=None)


def as_good(group: Group, ideal: Group, metric: str) -> bool:
    """Whether it ended within the tolerance of the ideal, or better."""
    mine, its = final(group, metric), final(ideal, metric)
    if mine is None or its is None:
        return False
    return abs(mine - its) <= tolerance(metric, its) or (mine - its) * direction(metric) > 0


def _gap(group: Group, ideal: Group, metric: str) -> float:
    return (final(group, metric) or 0.0) - (final(ideal, metric) or 0.0)


def _goodness(group: Group, metric: str) -> float:
    return (final(group, metric) or 0.0) * direction(metric)
