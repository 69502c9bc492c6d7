"""Methods of the study: recipes as they are typed, with xi in units of the smoothness L."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from stretto.codecs import Codec
from stretto.errors import RecipeError, explain
from stretto.recipe.parser import parse
from stretto.recipe.recipe import Recipe
from stretto.recipe.then import step
from stretto.recipe.what import gradient_differences, gradients
from stretto.recipe.when import together
from stretto.spec import Answer

GD = "gd"
"""Gradient descent: `allreduce` over whole shards, the method that all others are compared with."""

EXAMPLE = "gd_sec(beta=0.01, xi=100)"
SCALED = "xi"


@dataclass(frozen=True)
class Method:
    """Name of a method as typed, and its recipe, whose xi is in the units of the problem."""

    name: str
    recipe: Recipe
    warning: str | None = None


def method(text: str, smoothness: float) -> Method:
    """Return the method named by `text`: `gd`, or a recipe that exchanges gradients in every round.

    The xi of a threshold is typed in units of the smoothness L. Raises RecipeError for a recipe without such rounds.
    """
    name = text.strip()
    recipe = _parsed("allreduce" if name == GD else name)
    _check(name, recipe)
    how = scaled(recipe.how, smoothness)
    return Method(name, replace(recipe, how=how, called=""), _unsteady(name, recipe))


def _parsed(text: str) -> Recipe:
    try:
        return parse(text)
    except RecipeError as error:
        raise RecipeError(str(error).replace("--recipe", "--method")) from None


def scaled(codec: Codec, smoothness: float) -> Codec:
    """Return the codec with every xi in it, at any depth, multiplied by L."""
    changed: dict[str, object] = {
        name: value * smoothness for name, value in _fields(codec) if name == SCALED and isinstance(value, float)
    }
    changed |= {name: scaled(value, smoothness) for name, value in _fields(codec) if isinstance(value, Codec)}
    return cast("Codec", replace(cast("Any", codec), **changed)) if changed else codec


def _fields(codec: Answer) -> Iterator[tuple[str, object]]:
    return ((field.name, getattr(codec, field.name)) for field in fields(codec))  # type: ignore[arg-type]


def thresholds(codec: Codec) -> list[float]:
    """Return every xi in a codec."""
    inner = (value for _, value in _fields(codec) if isinstance(value, Codec))
    own = [float(value) for name, value in _fields(codec) if name == SCALED and isinstance(value, float)]
    return own + [xi for codec in inner for xi in thresholds(codec)]


def _unsteady(name: str, recipe: Recipe) -> str | None:
    """Return a warning if alpha beta xi is above 1 (alpha = 1/L, xi in units of L), which may not converge."""
    what = recipe.what
    product = max(thresholds(recipe.how), default=0.0) * (what.beta if isinstance(what, gradient_differences) else 0.0)
    if product <= 1:
        return None
    return (
        f"{name}: alpha * beta * xi = {product:g} is above 1: the residual may grow faster than it is sent, "
        f"and the method may not converge; a smaller beta or xi is safe"
    )


def _check(name: str, recipe: Recipe) -> None:
    reason, got = _refusal(recipe)
    if reason:
        expected = "what=gradients() or gradient_differences(), when=together(), then=step()"
        raise RecipeError(
            explain(
                f"{name} can't be compared here: {reason}", got=got, expected=expected, to_type=f'--method "{EXAMPLE}"'
            )
        )


def _refusal(recipe: Recipe) -> tuple[str, str]:
    """Return why the study cannot run a recipe, and the word that is the reason; else two empty strings."""
    if recipe.asynchronous:
        return "it has no rounds to count, since workers do not wait", f"when={recipe.when}"
    if not isinstance(recipe.what, gradients | gradient_differences):
        return "it does not exchange gradients", f"what={recipe.what}"
    if recipe.when != together():
        return "a round is one step here", f"when={recipe.when}"
    if not isinstance(recipe.then, step):
        return "gradient descent takes the step itself", f"then={recipe.then}"
    return "", ""
