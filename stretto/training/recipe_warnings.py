"""Warnings about a recipe and an optimizer that do not fit together, given before training starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stretto.codecs import deep_gradient_compression, difference_threshold
from stretto.recipe.recipe import Recipe
from stretto.recipe.what import gradient_differences
from stretto.strategies.optimizers import Optimizers


def advice(recipe: Recipe, optimizers: Optimizers) -> Iterator[str]:
    """Sentences for the user; none if all is well."""
    for codec in recipe.how.components():
        if isinstance(codec, difference_threshold) and isinstance(recipe.what, gradient_differences):
            yield from _unstable(codec.xi, recipe.what.beta, _largest(optimizers, "lr"))
        if isinstance(codec, deep_gradient_compression) and codec.momentum and _largest(optimizers, "momentum"):
            yield (
                f"{recipe} keeps the momentum in its codec, and the optimizer has one of "
                f"{_largest(optimizers, 'momentum'):g} as well: give the optimizer momentum=0, or the codec"
            )


def _unstable(xi: float, beta: float, lr: float) -> Iterator[str]:
    strength = lr * beta * xi
    if strength > 1 + 1e-9:
        yield (
            f"lr * beta * xi = {strength:.3g} is above 1: what GD-SEC does not send may then grow from round to round "
            f"(near 3 it was seen to diverge); xi={1 / (lr * beta):.3g} is the most that is safe with lr={lr:g}"
        )


def _largest(optimizers: Optimizers, key: str) -> float:
    found: list[Any] = [group[key] for group in optimizers.param_groups if key in group]
    return max((float(one) for one in found), default=0.0)
