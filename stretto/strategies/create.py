"""Choice of the strategy that carries out a recipe."""

from __future__ import annotations

import importlib

from torch import nn

from stretto.errors import RecipeError, explain
from stretto.recipe.recipe import Recipe
from stretto.strategies.context import ExchangeObserver, StrategyContext
from stretto.strategies.optimizers import Optimizers
from stretto.strategies.strategy import Strategy


def create_strategy(
    model: nn.Module,
    optimizers: Optimizers,
    recipe: Recipe | None,
    context: StrategyContext,
    observer: ExchangeObserver,
    parameter_sets: int,
) -> Strategy:
    """Return the strategy that a recipe names, attached to the model; without a recipe it exchanges nothing."""
    kind = Strategy if recipe is None else strategy_of(recipe)
    strategy = kind(model, optimizers, recipe, context, observer, parameter_sets)
    strategy.attach()
    return strategy


def strategy_of(recipe: Recipe) -> type[Strategy]:
    """Return the class that an answer of the recipe names by its import path. Raise RecipeError if there is none."""
    module, _, name = recipe.strategy.rpartition(".")
    try:
        imported = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module raises while it is imported
        raise _no_strategy(recipe, f"{type(error).__name__}: {error}") from error
    if not isinstance(imported, type) or not issubclass(imported, Strategy):
        raise _no_strategy(recipe, f"{imported!r}")
    return imported


def _no_strategy(recipe: Recipe, got: str) -> RecipeError:
    return RecipeError(
        explain(
            f"{recipe} names the strategy {recipe.strategy}, which can't be imported",
            got=got,
            expected="a class derived from stretto.strategies.recipe_strategy.RecipeStrategy, in a module that every "
            "process can import",
            to_type='strategy = "package.module.MyStrategy" in the class of the answer',
        )
    )
