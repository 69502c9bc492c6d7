"""Workers in pipeline stages, simulated: a whole model, and the time and the bytes of its stages.

The split is that which the layout names. Without names, and without measured times of stages, it divides parameters
about equally.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from stretto.errors import LaunchError, ModelError, mistyped
from stretto.parallel import refusals
from stretto.parallel.calls import Calls, record_calls
from stretto.parallel.link import CPU
from stretto.parallel.measure import held_bytes
from stretto.parallel.micro_batches import micro_batch, refuse_mixing, rows_of
from stretto.parallel.schedule import Batch, Boundary, Schedule, pipeline_schedule
from stretto.parallel.split import Costs, measured_split, named_split
from stretto.recipe.layout import pipeline
from stretto.recipe.recipe import Recipe
from stretto.runtime.device_random import kept_random_states
from stretto.simulator.compute.cost_model import CostModel
from stretto.simulator.compute.stage_times import StageTimes
from stretto.simulator.engine import Worker
from stretto.simulator.layouts.ranks import RankedReplica
from stretto.simulator.layouts.replica import Measurement, Scaled
from stretto.simulator.network import wire_bytes
from stretto.simulator.network.links import Links
from stretto.strategies.optimizers import Optimizers


class StagedReplica(RankedReplica):
    """A worker whose ranks run the stages of a pipeline."""

    has_stages = True

    def __init__(self, layout: pipeline, links: Links, cost_model: CostModel, *reports: Callable[..., None]) -> None:
        super().__init__(layout, links, cost_model, *reports)
        self._layout = layout
        self._calls: Calls | None = None
        """Calls of the model's modules; None before the first forward pass of any worker."""
        self._row_bytes: list[float] = []
        """Bytes of one sample at each boundary, and of its outputs."""
        self._boundaries = [Boundary()] * (self.ranks - 1)
        self._batch = Batch(layout.micro_batches)
        self._is_recording = False
        self._followed: WeakSet[nn.Module] = WeakSet()
        if cost_model.turns_s and len(cost_model.turns_s) != self.ranks:
            raise _other_stages(cost_model, layout)

    def measurement(self) -> Measurement:
        """Return a measurement of the model's modules."""
        return StageTimes(self._layout, self.hop(0, 1).byte_s, self.notice)

    def follow(self, worker: Worker, model: nn.Module, optimizers: Optimizers, recipe: Recipe | None) -> None:
        """Split the model at its first forward pass, and count the bytes of all its passes."""
        refusals.refuse_indivisible(model, optimizers, "split into stages")
        if model in self._followed:
            return
        self._followed.add(model)
        self._calls = None
        if recipe is not None and not recipe.how.encodes_parts_alike and worker.number == 0:
            self.notice(f"{recipe.how} encodes the whole model in a simulation, and each stage apart in a live run")

        # functions of their own, not methods: a copy of the model must not copy the simulation
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._split_first(module, args, kwargs)

        def after(_: nn.Module, args: Any, kwargs: Any, found: Any) -> None:
            self._count(worker, rows_of((args, kwargs)), found)

        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(after, with_kwargs=True)

    def step_s(self, scaled: Scaled, samples: int = 0) -> float:
        """Return the seconds of a step: those besides the stages, and those of the stages' schedule."""
        besides_s = self.cost_model.step_s if self.cost_model.turns_s else 0.0
        besides_s += self.cost_model.sample_s * samples
        base_s = besides_s + self._layout.micro_batches * sum(self._turns_s)
        slower = scaled(base_s) / base_s if base_s else 1.0
        return besides_s * slower + self._schedule(slower).seconds

    @property
    def _turns_s(self) -> Sequence[float]:
        """Seconds of a micro-batch in each stage; where none were measured, equal parts of those of a step."""
        parts = self.ranks * self._layout.micro_batches
        return self.cost_model.turns_s or (self.cost_model.step_s / parts,) * self.ranks

    def _schedule(self, slower: float = 1.0) -> Schedule:
        """Return the schedule of a step, in which each end of a message costs its stage processor time."""
        turns = [one * slower for one in self._turns_s]
        ends = [2 * ((stage > 0) + (stage < self.ranks - 1)) for stage in range(self.ranks)]
        nbytes = max(one.nbytes for one in self._boundaries)
        end_s = self.cost_model.collective_s(wire_bytes.sealed_messages(int(nbytes)), nbytes, 1)
        whole = [turn + count * end_s for turn, count in zip(turns, ends, strict=True)]
        return pipeline_schedule(whole, self._boundaries, self._batch)

    # --- the split ----------------------------------------------------------------------------------------------

    def _split_first(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Split the model, at the first call of any worker."""
        if self._calls is not None or self._is_recording:
            return
        if self._layout.micro_batches > 1 and model.training and (names := list(refusals.batch_norms(model))):
            raise ModelError(refusals.batch_norm(names[0], self._layout))
        part_args, part_kwargs = micro_batch(self._layout, args, kwargs)
        self._is_recording = True
        try:
            refuse_mixing(model, self._layout, args, kwargs, CPU)
            with kept_random_states(CPU):
                self._calls = record_calls(model, part_args, part_kwargs)
        finally:
            self._is_recording = False
        self._divide(model, self._calls, rows_of((args, kwargs)), rows_of((part_args, part_kwargs)))

    def _divide(self, model: nn.Module, calls: Calls, rows: int, part_rows: int) -> None:
        """Choose the stages, and from them the parts of the parameters and the bytes at the boundaries."""
        begins = self._begins(model, calls)
        held: list[float] = [0.0] * self.ranks
        for name, one in model.named_parameters():
            if one.requires_grad:
                held[calls.stage_of(name, begins)] += one.numel() * one.element_size()
        self.weights = held
        sizes = [*(calls.sizes[first] for first in begins[1:]), calls.output_bytes]
        self._row_bytes = [size / max(part_rows, 1) for size in sizes]
        turn_rows = rows / self._layout.micro_batches
        self._boundaries = [
            Boundary(nbytes * turn_rows, self.hop(stage, stage + 1), self.hop(stage + 1, stage))
            for stage, nbytes in enumerate(self._row_bytes[:-1])
        ]
        last = self.ranks - 1
        outputs = self.slowest((last, rank) for rank in range(last))
        self._batch = Batch(self._layout.micro_batches, self._row_bytes[-1] * rows, outputs)
        self._report([calls.names[first] or calls.names[1] for first in begins])

    def _begins(self, model: nn.Module, calls: Calls) -> Sequence[int]:
        if self._layout.begins is not None:
            return named_split(calls, self._layout.begins).begins
        held = held_bytes(model, calls)
        return measured_split(calls, Costs(held, {}, held), self.ranks).begins

    def _report(self, modules: Sequence[str]) -> None:
        """Show the stages, which begin with these modules, and write their predicted pass into the log."""
        schedule = self._schedule()
        computing = schedule.computing
        stages = ", ".join(f"stage {stage} from {name}" for stage, name in enumerate(modules))
        how = "" if self.cost_model.turns_s else "; stages that compute equally long, since none was measured"
        step_s = self.step_s(lambda seconds: seconds)
        self.notice(f"pipeline: {stages}{how}; a step takes {step_s * 1e3:.3g} ms, bubble {schedule.bubble:.2f}")
        self.write(
            "stages",
            layout=str(self._layout),
            modules=list(modules),
            micro_batches=self._layout.micro_batches,
            predicted_s=round(schedule.seconds, 6),
            computing=[round(one, 6) for one in computing],
            activations=[],
            balance=round(sum(computing) / len(computing) / max(*computing, 1e-12), 4),
        )

    # --- bytes --------------------------------------------------------------------------------------------------

    def _count(self, worker: Worker, rows: int, found: Any) -> None:
        """Count the bytes of a forward pass, and those of the backward pass when it reaches the outputs."""
        if self._is_recording or self._calls is None:
            return
        outputs = [one for one in tree_flatten(found)[0] if isinstance(one, Tensor)]
        for one in outputs if self._layout.micro_batches > 1 else ():
            refusals.refuse_other_rows(one, rows)
        worker.count_rank_bytes(self._forward_bytes(rows))
        output = next((one for one in outputs if one.requires_grad), None)
        if output is not None:
            count = functools.partial(worker.count_rank_bytes, self._backward_bytes(rows))
            output.register_hook(lambda _: count())  # type: ignore[no-untyped-call]

    def _forward_bytes(self, rows: int) -> int:
        outputs = (self.ranks - 1) * wire_bytes.sealed_exchange_bytes(round(rows * self._row_bytes[-1]))
        return self._boundary_bytes(rows) + outputs

    def _backward_bytes(self, rows: int) -> int:
        return self._boundary_bytes(rows) + 2 * wire_bytes.sealed_gather_bytes(self.ranks, NORM_BYTES)

    def _boundary_bytes(self, rows: int) -> int:
        """Return the bytes of the micro-batches of a batch over all boundaries, in one direction."""
        count = max(1, min(self._layout.micro_batches, rows))
        pieces = [rows // count + (piece < rows % count) for piece in range(count)]
        return sum(
            wire_bytes.sealed_exchange_bytes(round(piece * nbytes))
            for nbytes in self._row_bytes[:-1]
            for piece in pieces
        )


NORM_BYTES = 8
"""Bytes of the sum of the squared norms of gradients, which the ranks add in each backward pass."""


def _other_stages(cost_model: CostModel, layout: pipeline) -> LaunchError:
    given = len(cost_model.turns_s)
    problem = f"times of {given} stages are given, and the layout has {layout.stages}"
    expected = f"{layout.stages} times per micro-batch, or none, for stages that compute equally long"
    to_type = f'--step-time "2ms, {" ".join(["1ms"] * layout.stages)} per micro-batch"'
    return mistyped(problem, f'--step-time "{cost_model}"', expected, to_type)
