"""Metrics: the direction that their names imply, and the tolerance within which two values count as equal."""

from __future__ import annotations

from collections.abc import Sequence

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


def main_metric(names: Sequence[str]) -> str | None:
    """Return the first metric where higher is better, else the first with a direction, else the first."""
    ranked = sorted(names, key=lambda name: (direction(name) != 1, direction(name) == 0))
    return ranked[0] if ranked else None


def as_good(metric: str, value: float | None, required: float | None) -> bool:
    """Return True if a value is better than the required one, or within the tolerance of it.

    The tolerance is POINTS for shares where higher is better, else SHARE of the required value.
    """
    if value is None or required is None:
        return False
    tolerance = POINTS if _is_share(metric, required) else SHARE * abs(required)
    return abs(value - required) <= tolerance or (value - required) * direction(metric) > 0


def tolerance_text(metric: str, required: float) -> str:
    """Return the tolerance as text."""
    return str(POINTS) if _is_share(metric, required) else f"{SHARE:.0%}"


def _is_share(metric: str, value: float) -> bool:
    return direction(metric) == 1 and 0 <= value <= 1
