"""Measures the passes of a model's modules on this machine, and chooses the stages of a simulated pipeline by them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from stretto.parallel.calls import Calls, record_calls
from stretto.parallel.link import CPU
from stretto.parallel.measure import measured_costs
from stretto.parallel.micro_batches import micro_batch
from stretto.parallel.split import Costs, Split, measured_split, named_split
from stretto.parallel.stages import by_stage, described
from stretto.recipe.layout import pipeline
from stretto.runtime.device_random import kept_random_states
from stretto.simulator.compute.cost_model import CostModel
from stretto.simulator.layouts.replica import Measurement


@dataclass(frozen=True)
class _Found:
    """The first batch: its calls and their costs, of one micro-batch and of the whole batch."""

    calls: Calls
    costs: Costs
    whole_s: float


class StageTimes(Measurement):
    """Times of the modules of a model, measured at its first forward pass; `byte_s` is the time of a byte on a link."""

    def __init__(self, layout: pipeline, byte_s: float, notice: Callable[[str], None]) -> None:
        super().__init__(layout)
        self._pipeline, self._byte_s, self._notice = layout, byte_s, notice
        self._found: _Found | None = None
        self._is_measuring = False

    def follow(self, model: nn.Module) -> None:
        """Measure a model when it is first called."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._found is None and not self._is_measuring:
                self._is_measuring = True
                self._found = self._measure(module, args, kwargs)

        model.register_forward_pre_hook(before, with_kwargs=True)

    def _measure(self, model: nn.Module, args: Any, kwargs: Any) -> _Found:
        part_args, part_kwargs = micro_batch(self._pipeline, args, kwargs)
        with kept_random_states(CPU):
            calls = record_calls(model, part_args, part_kwargs)
        measure = functools.partial(measured_costs, model, calls)
        costs = measure(part_args, part_kwargs, self._byte_s, CPU)
        return _Found(calls, costs, sum(measure(args, kwargs, self._byte_s, CPU).seconds))

    @property
    def layout(self) -> pipeline:
        """The layout with the names of the modules that its stages begin with."""
        if self._found is None:
            return self._pipeline
        calls, begins = self._found.calls, self._split(self._found).begins
        return replace(self._pipeline, split=", ".join(calls.names[first] for first in begins[1:]))

    def cost_model(self, whole: CostModel) -> CostModel:
        """Return the costs of a worker in stages, given those of a whole one."""
        if self._found is None:
            return whole
        split, seconds = self._split(self._found), self._found.costs.seconds
        self._notice(f"pipeline: {described(self._found.calls, split, self._found.costs)}")
        turns_s = tuple(one + self._found.costs.between_s for one in by_stage(split.begins, seconds))
        return replace(whole, step_s=max(whole.step_s - self._found.whole_s, 0.0), turns_s=turns_s)

    def _split(self, found: _Found) -> Split:
        """Return the best split at calls that a name stands for, since later calls of a module have none."""
        names, costs = found.calls.names, found.costs
        if self._pipeline.begins is not None:
            begins = named_split(found.calls, self._pipeline.begins).begins
            return Split(begins, max(by_stage(begins, costs.seconds)))
        cuts = {call: place for call, place in found.calls.cuts.items() if names.index(names[call]) == call}
        calls = Calls(names, cuts, found.calls.used, found.calls.sizes, found.calls.output_bytes)
        return measured_split(calls, costs, self._pipeline.stages)
