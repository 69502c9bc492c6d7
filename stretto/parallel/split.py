"""Split of a model into stages: the cuts that make the slowest stage fastest, by dynamic programming."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.errors import ModelError, explain
from stretto.parallel.calls import Calls

Stage = tuple[int, int]
"""First call of a stage, and the first one after it."""


@dataclass(frozen=True)
class Costs:
    """Costs of a forward and a backward pass, by call."""

    seconds: Sequence[float]
    """Time to compute each call."""
    sending_s: Mapping[int, float]
    """Time to send the tensor of each cut, and its gradient back."""
    held: Sequence[int]
    """Bytes of the trained parameters that each call is the first to use."""
    memory: Sequence[int] | None = None
    """Bytes that each stage can hold; None without a limit."""
    kept: Sequence[int] = ()
    """Bytes that the forward pass of each call keeps for its backward pass, by micro-batch."""
    together: int = 1
    """Number of micro-batches whose activations are in memory at the same time."""
    between_s: float = 0.0
    """Time of the code between modules, which every rank runs for each micro-batch."""

    def of(self, number: int, stage: Stage) -> float | None:
        """Return the time of a stage, given its number: of computing, or of receiving its input.

        Returns None if it cannot be one.
        """
        first, end = stage
        held = sum(self.held[first:end])
        if not held or (self.memory is not None and held + self.activations(stage) > self.memory[number]):
            return None
        return max(sum(self.seconds[first:end]), self.sending_s.get(first, 0.0))

    def activations(self, stage: Stage) -> int:
        """Return the bytes of a stage's activations."""
        return self.together * sum(self.kept[slice(*stage)])


@dataclass(frozen=True)
class Split:
    """First calls of all stages, and the time of the slowest one."""

    begins: tuple[int, ...]
    slowest_s: float


def best_split(costs: Costs, cuts: Sequence[int], stages: int, without: int | None = None) -> Split | None:
    """Return the split into this number of stages whose slowest one is fastest; None if there is none.

    `cuts` are the calls at which the model can be cut, in order, except for the cut `without`.
    """
    ends = [0, *(cut for cut in cuts if cut != without), len(costs.seconds)]
    best: dict[int, Split] = {0: Split((), 0.0)}
    for stage in range(stages):
        longer: dict[int, Split] = {}
        for first, end in itertools.combinations(ends, 2):
            before, time_s = best.get(first), costs.of(stage, (first, end)) if first in best else None
            if before is None or time_s is None:
                continue
            found = Split((*before.begins, first), max(before.slowest_s, time_s))
            if end not in longer or found.slowest_s < longer[end].slowest_s:
                longer[end] = found
        best = longer
    return best.get(len(costs.seconds))


def next_best(costs: Costs, cuts: Sequence[int], split: Split) -> Split | None:
    """Return the best split that lacks one of the cuts of this one; None if there is no other."""
    others = (best_split(costs, cuts, len(split.begins), without=cut) for cut in split.begins[1:])
    return min((one for one in others if one is not None), key=lambda one: one.slowest_s, default=None)


def measured_split(calls: Calls, costs: Costs, stages: int) -> Split:
    """Return the best split of a model. Raise ModelError if it can't be cut into that number of stages."""
    split = best_split(costs, sorted(calls.cuts), stages)
    if split is not None:
        return split
    most = next((few for few in range(stages - 1, 1, -1) if best_split(costs, sorted(calls.cuts), few)), 1)
    memory = f", of at most {min(costs.memory) >> 20} MB each" if costs.memory is not None else ""
    raise ModelError(
        explain(
            f"the model cannot be cut into {stages} stages with trained parameters{memory}",
            got=f"a model that can be cut before {', '.join(calls.names[cut] for cut in sorted(calls.cuts)[:6])}",
            expected=f"at most {most} stages" if most > 1 else "a model of more modules, or the layout whole()",
            to_type=f'--layout "pipeline(stages={most})"' if most > 1 else '--layout "whole()"',
        )
    )


def named_split(calls: Calls, names: Sequence[str]) -> Split:
    """Return the split at the first calls of these modules. Raise ModelError if the model can't be cut there."""
    begins = [0]
    for name in names:
        call = calls.names.index(name) if name in calls.names else None
        if call is None or call not in calls.cuts or call <= begins[-1]:
            raise ModelError(_cannot_begin(calls, name, call, begins[-1]))
        begins.append(call)
    return Split(tuple(begins), 0.0)


def _cannot_begin(calls: Calls, name: str, call: int | None, before: int) -> str:
    possible = [calls.names[cut] for cut in sorted(calls.cuts) if cut > before]
    if call is None:
        why = "the forward pass of the model calls no such module, or only within another one"
    elif call in calls.cuts:
        why = "the stage before it begins later"
    else:
        why = calls.why_not(call)
    return explain(
        f"no stage can begin with the module {name}: {why}",
        got=name,
        expected=f"one of {', '.join(possible[:12])}" if possible else "earlier names for the stages before",
        to_type='split="measured"',
    )
