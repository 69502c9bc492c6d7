"""The workers of a simulation as their layout divides them: time of a step, and bytes between the ranks of a worker.

A simulated worker trains a whole model, whatever its layout. What it exchanges with other workers is cut into the parts
of its ranks, of which each takes the links of its own rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from stretto.errors import mistyped
from stretto.recipe.layout import Layout
from stretto.recipe.recipe import Recipe
from stretto.simulator.compute.cost_model import CostModel
from stretto.simulator.engine import Worker
from stretto.simulator.network.links import Links
from stretto.strategies.optimizers import Optimizers

Scaled = Callable[[float], float]
"""Function from the seconds of some computing to the seconds that a worker takes for it."""


class Measurement:
    """Measurement of what a layout needs besides the time of a step: here nothing, since the model is not split."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def follow(self, model: nn.Module) -> None:
        """Look at the model of the first measured worker."""

    @property
    def layout(self) -> Layout:
        """The layout, with all that was measured for it."""
        return self._layout

    def cost_model(self, whole: CostModel) -> CostModel:
        """Return the costs of a worker under the layout, given those of a whole one."""
        return whole


class Replica:
    """A worker of one process; base of those of several ranks. All workers of a simulation share the object."""

    overlaps = True
    """True if gradients are exchanged while the backward pass computes others."""

    has_stages = False
    """True if `--step-time` may have times of stages."""

    def __init__(
        self,
        layout: Layout,
        links: Links,
        cost_model: CostModel,
        notice: Callable[[str], None],
        write: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        if cost_model.turns_s and not self.has_stages:
            problem, got = "times per micro-batch are those of stages", f"{layout}, and times of stages"
            stages = f'--layout "pipeline(stages={len(cost_model.turns_s)})"'
            raise mistyped(problem, got, "a pipeline, or the time of a step alone", stages)
        self.layout, self.links, self.cost_model = layout, links, cost_model
        self.notice, self.write = notice, write
        """Shows a line; writes an event of a kind with these fields."""
        self.ranks = links.ranks

    def measurement(self) -> Measurement:
        """Return a measurement of what this layout needs besides the time of a step."""
        return Measurement(self.layout)

    def follow(self, worker: Worker, model: nn.Module, optimizers: Optimizers, recipe: Recipe | None) -> None:
        """Look at the model of a worker, which calls `distribute`. Raise StrettoError if its ranks can't share it."""

    def parts(self, nbytes: int, item_bytes: int) -> Sequence[int]:
        """Return the bytes of each rank's part of a tensor of all parameters."""
        return [nbytes]

    def step_s(self, scaled: Scaled, samples: int = 0) -> float:
        """Return the seconds of a step with this number of samples, without exchanges among workers."""
        return scaled(self.cost_model.step_of(samples))

    @property
    def largest_share(self) -> float:
        """Largest share of the parameters that a rank holds."""
        return 1.0

    @property
    def agreement_s(self) -> float:
        """Seconds in which the ranks of a worker agree that an exchange is complete."""
        return 0.0

    @property
    def agreement_bytes(self) -> int:
        """Bytes that the ranks of a worker send to each other for that."""
        return 0


def create_replica(
    layout: Layout,
    links: Links,
    cost_model: CostModel,
    notice: Callable[[str], None],
    write: Callable[..., None] = lambda *_, **__: None,
) -> Replica:
    """Return the workers of a simulation under a layout, which names their class by its import path."""
    module, _, name = layout.simulated_by.rpartition(".")
    made: Any = getattr(importlib.import_module(module), name)
    replica: Replica = made(layout, links, cost_model, notice, write)
    return replica
