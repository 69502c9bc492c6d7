"""Workers with sharded models, simulated: a whole model, and the time of its parts and of their exchanges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stretto.errors import ModelError
from stretto.parallel import refusals
from stretto.parallel.schedule import sharded_seconds
from stretto.parallel.sharded import layers_of
from stretto.recipe.layout import sharded
from stretto.recipe.recipe import Recipe
from stretto.simulator.compute.cost_model import CostModel
from stretto.simulator.engine import Worker
from stretto.simulator.layouts.ranks import RankedReplica
from stretto.simulator.layouts.replica import Scaled
from stretto.simulator.network.links import Links
from stretto.strategies.optimizers import Optimizers


class ShardedReplica(RankedReplica):
    """A worker whose ranks divide every parameter, and each batch, among them."""

    def __init__(self, layout: sharded, links: Links, cost_model: CostModel, *reports: Callable[..., None]) -> None:
        super().__init__(layout, links, cost_model, *reports)
        self._layout = layout
        self._group_bytes: list[int] = []
        """Bytes of the parameters that are gathered together, for each layer and for the rest."""
        self._followed: WeakSet[nn.Module] = WeakSet()

    def follow(self, worker: Worker, model: nn.Module, optimizers: Optimizers, recipe: Recipe | None) -> None:
        """Find the parts of the model. Raise StrettoError if it cannot be divided."""
        refusals.refuse_indivisible(model, optimizers, "divided among processes")
        refusals.refuse_unshardable(model)
        refusals.refuse_matrix_codec(recipe, self._layout)
        names = [name for name, one in refusals.batch_norms(model).items() if one.training]
        if names:
            raise ModelError(refusals.batch_norm_of_part(names[0]))
        layers = [[*layer.parameters()] for layer in layers_of(model)]
        within = {id(one) for layer in layers for one in layer}
        layers.append([one for one in model.parameters() if id(one) not in within])
        self._group_bytes = [sum(map(self._padded, layer)) for layer in layers if layer]
        parts = [[self._part(one, rank) for one in model.parameters()] for rank in range(self.ranks)]
        self.weights = [float(sum(sizes)) for sizes in parts]
        step_s = self.step_s(lambda seconds: seconds)
        if model not in self._followed:
            self._followed.add(model)
            self._count_passes(worker, model)
        self.notice(f"sharded: {len(self._group_bytes)} groups of parameters; a step takes {step_s * 1e3:.3g} ms")

    def _count_passes(self, worker: Worker, model: nn.Module) -> None:
        """Count the bytes of parameters that all ranks gather in each pass, and of gradients that they sum."""
        nbytes = (self.ranks - 1) * sum(self._group_bytes)

        def count(_: nn.Module, _args: Any, found: Any) -> None:  # a copy of the model must not copy the simulation
            worker.count_rank_bytes(nbytes)
            output = next((one for one in tree_leaves(found) if isinstance(one, Tensor) and one.requires_grad), None)
            if output is not None:
                output.register_hook(lambda _: worker.count_rank_bytes(2 * nbytes))  # type: ignore[no-untyped-call]

        model.register_forward_hook(count)

    def step_s(self, scaled: Scaled, samples: int = 0) -> float:
        """Return the seconds of a step: a part of that of the whole batch, and the exchanges of parameters."""
        return sharded_seconds(scaled(self.cost_model.step_of(samples)), self.ranks, self._group_bytes, self.ring)

    def _part(self, parameter: Tensor, rank: int) -> int:
        """Return the bytes of a rank's part, along the first dimension."""
        chunks = parameter.detach().chunk(self.ranks)
        return chunks[rank].numel() * parameter.element_size() if rank < len(chunks) else 0

    def _padded(self, parameter: Tensor) -> int:
        """Return the bytes of a parameter that is gathered from equally large parts."""
        return self.ranks * self._part(parameter, 0)
