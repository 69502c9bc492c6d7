"""An exchange with an asynchronous server, outside a training loop."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from torch.optim import Optimizer

from stretto import codecs
from stretto.recipe.recipe import Recipe
from stretto.runtime.phase_timer import Stopwatch
from stretto.strategies.asynchronous import AsyncServer
from stretto.strategies.context import StrategyContext
from stretto.strategies.flat_buffers import FlatParameters
from stretto.strategies.optimizers import Optimizers
from stretto.strategies.traffic_counters import Tally


def open_exchange(
    client: Any,
    flat_parameters: FlatParameters,
    recipe: Recipe,
    optimizer: Optimizer,
    codec_context: codecs.CodecContext,
    settle: Callable[[list[Any]], object] = lambda leases: None,
    parameter_set: int = 1,
) -> AsyncServer:
    """Return an exchange whose applied leases are passed to `settle`."""
    unused = cast("Any", None)
    context = StrategyContext(client, Stopwatch(lambda: 0.0), unused, Tally(codec_context), unused, unused)
    observer = cast("Any", SimpleNamespace(settle=settle, exchange_ended=lambda blocked_s: None))
    exchange = AsyncServer(client, flat_parameters, parameter_set, recipe, Optimizers([optimizer]), context, observer)
    exchange.open()
    return exchange
