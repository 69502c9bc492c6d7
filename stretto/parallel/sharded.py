"""A model whose parameters are divided among the ranks of a worker, by FSDP2 (`torch.distributed.fsdp.fully_shard`).

    rank 0                                      rank 1
    samples 0 to 3 of the worker's batch        samples 4 to 6
    gathers the parameters of a layer    <-->   gathers the parameters of a layer
    runs it, and frees them                     runs it, and frees them
    ...                                         ...
    backward of a layer, with its samples       backward of a layer, with its samples
    its part of the mean gradient        <-->   its part of the mean gradient
    optimizer step of its parts                 optimizer step of its parts

The mean is weighted by samples: a rank multiplies its gradients by its share of the batch before they are summed. A
rank without samples in a short batch runs one of the others', with share 0, since all ranks gather all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import Parameter

from stretto.checkpoint import whole_state
from stretto.checkpoint.storage import State
from stretto.data.assignment import Ranges
from stretto.data.shares import portion
from stretto.errors import ModelError
from stretto.loader.arrangement import Batch
from stretto.loader.epoch_order import first_of, part_of, samples_in
from stretto.parallel import refusals
from stretto.parallel.part_operations import act_as_whole
from stretto.parallel.pass_record import memory_figures
from stretto.parallel.rank_group import mesh_of
from stretto.parallel.rank_parts import RankContext, RankParts, uncompiled
from stretto.parallel.shard_exchanges import AllGather, Exchanged, WeightedReduceScatter
from stretto.parallel.shards import Shards
from stretto.recipe.layout import sharded
from stretto.runtime.device_random import kept_random_states, seed_for, seed_of
from stretto.strategies.parameter_view import note_own_shard
from stretto.transport.interface import Traffic

CONTAINERS = (nn.Sequential, nn.ModuleList)
"""Modules whose children are layers, of which one after another is gathered."""

_divided: WeakSet[nn.Module] = WeakSet()
"""Models that are divided: a section continues with the parts of the section before."""


class ShardedModel(RankParts):
    """One rank's part of a sharded model. The model is divided when the section begins."""

    keeps_exchanges = False

    def __init__(self, layout: sharded, context: RankContext) -> None:
        self._context, self._link = context, context.link
        self._model, self._optimizers = context.model, context.optimizers
        self.rank = self._link.rank
        self._share = 1 / self._link.ranks
        """This rank's share of the samples of the batch under way."""
        self._exchanged = Exchanged(context.timer)
        self._passes = 0
        refusals.refuse_indivisible(self._model, self._optimizers, "divided among processes")
        refusals.refuse_unshardable(self._model)
        refusals.refuse_hooks(self._model, isinstance(self._model, FSDPModule))
        refusals.refuse_matrix_codec(context.recipe, layout)
        self._mesh = mesh_of(self._link, context.timeout_s)
        self._shards = Shards(self._model, self._optimizers, self._link)

    def begin(self, facts: Any) -> None:
        """Divide the model and the state of its optimizers."""
        codec = self._context.recipe.how if self._context.recipe is not None else None
        if codec is not None and not codec.encodes_parts_alike and self._context.workers > 1:
            self._context.notice(f"{codec} encodes the part of each rank apart, not the whole parameters")
        if self._model not in _divided:
            refusals.refuse_divided_parts(self._model, FSDPModule)
            self._divide()
            self._refuse_new_parameters()
            _divided.add(self._model)
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                reduce_scatter = WeightedReduceScatter(self._exchanged, self._factor)
                module.set_custom_all_gather(AllGather(self._exchanged))  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]
        given = vars(self._model).get("forward")
        given = getattr(given, "given", given)  # the model may have been divided before
        forward = uncompiled(self._seeded(given or type(self._model).forward.__get__(self._model)), inner=True)
        forward.given = given  # type: ignore[attr-defined]
        self._model.forward = forward
        self._shards.give_whole_states()
        act_as_whole()

    def traffic(self) -> Traffic:
        """Return the bytes of gathered parameters and of summed gradients, by their sizes."""
        return Traffic(self._exchanged.nbytes, self._exchanged.nbytes, self._exchanged.nbytes == 0)

    def figures(self) -> dict[str, Any]:
        """Return the memory of this rank."""
        return {"memory": memory_figures(self._model, self._optimizers, self._link.device)}

    def _divide(self) -> None:
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            dist.broadcast(tensor.detach(), 0)
        self._notice_large_root()
        named = [*self._model.named_parameters(remove_duplicate=False)]  # they live on until all ids are compared
        for layer in layers_of(self._model):
            _shard(layer, self._mesh)
        _shard(self._model, self._mesh)
        for one in self._model.parameters():
            note_own_shard(one)
        self._shards.repoint({id(one): name for name, one in named})

    def _refuse_new_parameters(self) -> None:
        """Let each later forward pass raise ModelError for parameters that came to the model after it was divided."""
        named = self._model.named_parameters(remove_duplicate=False)
        modules, names = WeakSet(self._model.modules()), {name for name, _ in named}
        to_type = f'all layers before the first stretto.distribute, or --layout "pipeline(stages={self._link.ranks})"'

        def refuse(model: nn.Module, _args: Any) -> None:
            for place, module in model.named_modules():
                for name, _ in module.named_parameters(place, recurse=False):
                    if module not in modules or name not in names:
                        raise ModelError(refusals.new_parameter(name, "divided among processes", to_type))

        self._model.register_forward_pre_hook(refuse, prepend=True)

    def _notice_large_root(self) -> None:
        within = sum(one.numel() for layer in layers_of(self._model) for one in layer.parameters())
        total = sum(one.numel() for one in self._model.parameters())
        if 2 * within < total:
            self._context.notice(
                f"sharded: {1 - within / total:.0%} of the parameters are in no layer of an nn.Sequential or "
                "nn.ModuleList, and are gathered together"
            )

    def gathered(self, own: bytes) -> Sequence[bytes]:
        """Return the messages of all ranks; they call this together."""
        return self._link.gather(own)

    # --- batches ------------------------------------------------------------------------------------------------

    def loaded(self, batch: Batch) -> Batch:
        """Return this rank's samples of a batch; one of another rank's if it has none."""
        start, stop = portion(len(batch), self.rank, self._link.ranks)
        return batch[start:stop] or batch[:1]

    def enter(self, flat: Sequence[Any], ranges: Ranges) -> bool:
        """Weight the gradients of the batch of these ranges."""
        samples = sum(stop - start for start, stop in ranges)
        start, stop = portion(samples, self.rank, self._link.ranks)
        self._share = (stop - start) / samples
        return True

    def cut(self, batch: Any) -> Any:
        """Return this rank's samples of a stream's batch, and weight its gradients."""
        own = part_of(batch, self.rank, self._link.ranks)
        self._share = (0 if own is None else samples_in(own)) / samples_in(batch)
        return first_of(batch) if own is None else own

    def _factor(self) -> float:
        """Return the factor of this rank's gradients, of which the ranks compute the mean."""
        return self._share * self._link.ranks

    def _seeded(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the model's forward pass with other random numbers at each rank, as for other samples."""
        batch_norms = refusals.batch_norms(self._model)

        def call(*args: Any, **kwargs: Any) -> Any:
            if name := next((name for name, one in batch_norms.items() if one.training), None):
                raise ModelError(refusals.batch_norm_of_part(name))
            self._passes += 1
            refusals.refuse_hooks(self._model, is_divided=True)
            if not self._model.training:
                return forward(*args, **kwargs)
            with kept_random_states(self._link.device):
                seed_for(self._link.device, self._seed())
                return forward(*args, **kwargs)

        return call

    def _seed(self) -> int:
        text = f"{torch.initial_seed()}:{self._passes}:{self.rank}"
        return seed_of(text.encode())

    # --- whole states -------------------------------------------------------------------------------------------

    def joined(self, state: State) -> State:
        """Return the state of the whole model at rank 0."""
        joined = whole_state.joined([state])
        own = {worker: (facts, self._shards.whole(tensors)) for worker, (facts, tensors) in joined.own.items()}
        return State(joined.facts, self._shards.whole(joined.tensors), own)

    def joined_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the whole tensors at rank 0."""
        return self._shards.whole(tensors)

    def part_of(self, state: State) -> State:
        """Return the state with this rank's parts of whole tensors."""
        own = {worker: (facts, self._shards.parts(tensors)) for worker, (facts, tensors) in state.own.items()}
        return State(state.facts, self._shards.parts(state.tensors), own)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the outermost layers in lists of layers, except layers that share a parameter with another module."""
    uses = _uses(model)
    return [layer for layer in _in_lists(model) if (own := _uses(layer)) and all(uses[one] == own[one] for one in own)]


def _in_lists(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS):
            yield child
        else:
            yield from _in_lists(child)


def _uses(module: nn.Module) -> dict[Parameter, int]:
    """Return how many modules have each parameter of their own."""
    found: dict[Parameter, int] = {}
    for one in module.modules():
        for parameter in one.parameters(recurse=False):
            found[parameter] = found.get(parameter, 0) + 1
    return found


def _shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the parameters of a module that no module within it has divided; they are freed after each pass."""
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
