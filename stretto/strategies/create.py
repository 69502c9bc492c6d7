"""Choice of the strategy that carries out a recipe."""

from __future__ import annotations

from torch import nn

from stretto.recipe.recipe import Recipe
from stretto.recipe.what import gradients
from stretto.strategies.async_strategy import AsyncStrategy
from stretto.strategies.context import ExchangeObserver, StrategyContext
from stretto.strategies.gradient_strategy import GradientStrategy
from stretto.strategies.local_strategy import LocalStrategy
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
    """Return the strategy of a recipe, attached to the model; without a recipe it exchanges nothing."""
    strategy: Strategy
    if recipe is None:
        strategy = Strategy(model, optimizers, None, context, observer, parameter_sets)
    elif recipe.asynchronous:
        if context.transport.server is None:
            raise TypeError(f"{recipe} needs a transport to a server")
        strategy = AsyncStrategy(model, optimizers, recipe, context, observer, parameter_sets)
    elif isinstance(recipe.what, gradients):
        strategy = GradientStrategy(model, optimizers, recipe, context, observer, parameter_sets)
    else:
        strategy = LocalStrategy(model, optimizers, recipe, context, observer, parameter_sets)
    strategy.attach()
    return strategy
