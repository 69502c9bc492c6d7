"""Metrics: the direction that their names imply, tolerances, and the group of runs with the best final value."""

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
    """Return 1 if higher is better, -1 if lower is better, 0 if the name implies neither."""
    words = metric.lower().replace("-", "_").replace("/", "_").replace(".", "_").split("_")
    if any(word.startswith(LOWER_IS_BETTER) for word in words):
        return -1
    return 1 if any(word.startswith(HIGHER_IS_BETTER) for word in words) else 0


def tolerance(metric: str, value: float) -> float:
    """Return the difference that counts as equal: 0.01 for shares where higher is better, else 2% of the value."""
    return POINTS if _is_share(metric, value) else SHARE * abs(value)


def _is_share(metric: str, value: float) -> bool:
    return direction(metric) == 1 and 0 <= value <= 1


def tolerance_text(metric: str, baseline: Group) -> str:
    """Return the tolerance as text."""
    return str(POINTS) if _is_share(metric, final(baseline, metric) or 0.0) else f"{SHARE:.0%}"


def main_metric(names: Sequence[str]) -> str | None:
    """Return the first metric where higher is better, else the first with a direction, else the first."""
    ranked = sorted(names, key=lambda name: (direction(name) != 1, direction(name) == 0))
    return ranked[0] if ranked else None


def value(metric: str) -> Measure:
    """Return the measure that reads this metric from a record."""
    return lambda record: record["metrics"].get(metric)


def final(group: Group, metric: str) -> float | None:
    """Return the median over seeds of the final value of a metric."""
    return group.median(value(metric))


def text(group: Group, metric: str) -> str:
    """Return the median of the final value of a metric as text."""
    return formatting.figure(final(group, metric), 4)


def best(groups: Sequence[Group], metric: str) -> Group | None:
    """Return the group with the best final value; the first, the unchanged script, if the name has no direction."""
    measured = [group for group in groups if final(group, metric) is not None]
    return max(measured, key=lambda group: _goodness(group, metric), default=None)


def nearest(groups: Sequence[Group], baseline: Group, metric: str) -> Group | None:
    """Return the group whose final value is nearest to that of the baseline."""
    measured = [group for group in groups if final(group, metric) is not None]
    return min(measured, key=lambda group: abs(_gap(group, baseline, metric)), default=None)


def as_good(group: Group, baseline: Group, metric: str) -> bool:
    """Return True if the final value is within the tolerance of the baseline, or better."""
    value, required = final(group, metric), final(baseline, metric)
    if value is None or required is None:
        return False
    return abs(value - required) <= tolerance(metric, required) or (value - required) * direction(metric) > 0


def _gap(group: Group, baseline: Group, metric: str) -> float:
    return (final(group, metric) or 0.0) - (final(baseline, metric) or 0.0)


def _goodness(group: Group, metric: str) -> float:
    return (final(group, metric) or 0.0) * direction(metric)
