"""The exchange of parameters or updates after local steps: a round commits as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from stretto.codecs import CodecContext
from stretto.errors import NotFiniteError
from stretto.recipe.recipe import Recipe
from stretto.recipe.then import OnParameters, OuterState
from stretto.recipe.what import OfParameters, parameters
from stretto.strategies.codec_state import CodecStates
from stretto.strategies.collective_runner import CollectiveRunner, finish
from stretto.strategies.context import ExchangeObserver, StrategyContext
from stretto.strategies.flat_buffers import SPARE, FlatBuffer, FlatParameters, in_buffers
from stretto.strategies.marks import counts_of, differ
from stretto.strategies.tensor_sync import FlatTensors, MovingBuffers, OptimizerState


class RoundRange:
    """State of one flat buffer between rounds: outer state, codec state, and the tensor that is sent."""

    def __init__(self, part: FlatBuffer, recipe: Recipe, context: CodecContext) -> None:
        self.part = part
        self.state = OuterState(part.theta)
        self.codec_state = recipe.how.init_state(part.theta, context)
        self.scratch = torch.empty_like(part.theta)
        self._other: Tensor | None = None

    def swap_scratch(self) -> None:
        """Swap the two scratch tensors: another worker may still need the last round's results, which may be in one."""
        other = torch.empty_like(self.scratch) if self._other is None else self._other
        self.scratch, self._other = other, self.scratch

    def clear_spare(self) -> None:
        """Set the elements that belong to no parameter to zero again: flags of a round were in them."""
        for tensor in (self.part.theta, self.state.agreed, self.state.velocity):
            if tensor is not None:
                tensor[-SPARE:] = 0


class LocalUpdates:
    """Exchanges the contribution that a recipe computes from the parameters, and applies the mean as the recipe says.

    The model does not change before all results have arrived and are finite: a round commits as a whole or not at all.
    The rounds of a single worker change nothing and leave no residual.
    """

    def __init__(
        self,
        flat_parameters: FlatParameters,
        recipe: Recipe,
        context: StrategyContext,
        observer: ExchangeObserver,
        optimizer_state: OptimizerState,
        buffers: MovingBuffers,
        optimizers: Sequence[Optimizer],
    ) -> None:
        assert isinstance(recipe.what, OfParameters)
        assert isinstance(recipe.then, OnParameters)
        self._what, self._then, self._how = recipe.what, recipe.then, recipe.how
        transport, tally = context.transport, context.tally
        self._transport, self._timer, self._observer = transport, context.timer, observer
        self._tally, self._account = tally, tally.account(type(recipe.what).__name__)
        self._optimizer_state, self._buffers, self._optimizers = optimizer_state, buffers, optimizers
        device = flat_parameters.parts[0].theta.device if flat_parameters.parts else None
        rides = recipe.how.elementwise and bool(flat_parameters.parts)
        self._flag = None if rides else torch.zeros(SPARE, device=device)
        """A change of the trained parameters, and the mark; None where the spare elements of a buffer carry them."""
        self._own_flags = np.zeros(SPARE, np.float32)
        with in_buffers(flat_parameters.parts):
            self.ranges = [RoundRange(part, recipe, tally.context(part)) for part in flat_parameters.parts]
        self.drift: float | None = None
        self._began = 0.0
        self._elastic = transport.repeats_attempts
        self.codec_states = CodecStates([round_range.codec_state for round_range in self.ranges], self._elastic)

    @property
    def _state_rule(self) -> str:
        return self._what.optimizer_state if isinstance(self._what, parameters) else "keep"

    @torch.no_grad()
    def run(
        self, share: Callable[[], float], mark: int | None, measure_drift: bool = False, changed: bool = False
    ) -> bool:
        """Do one round. `share` returns this worker's fraction of the samples since the last; all fractions sum to 1.

        `mark` is that of the step, which all workers must have in common (see marks.py).

        When a worker fails during the round, the remaining workers repeat the round from its beginning. Returns True if
        any worker has `changed` what it trains since the workers last agreed on that.
        """
        with in_buffers([round_range.part for round_range in self.ranges]):
            return self._run(share, mark, measure_drift, changed)

    def _run(self, share: Callable[[], float], mark: int | None, measure_drift: bool, changed: bool) -> bool:
        before = self._timer.switch("encoding")
        self._buffers.agree(again=False)
        extras = [FlatTensors(self._buffers.floating(self._optimizers))]
        self._own_flags[:] = [float(changed), *counts_of(mark)]
        if self._flag is not None:
            self._flag.copy_(torch.from_numpy(self._own_flags))
            extras.append(FlatTensors([self._flag]))
        if self._state_rule == "average":
            extras.append(self._optimizer_state.to_average())
        self.codec_states.begin()
        for round_range in self.ranges if self._elastic else ():
            round_range.swap_scratch()
        means, extra_means = self._transport.attempt(
            lambda: self._exchange(share(), extras), lambda: self._retry(share(), extras)
        )
        self._observer.exchange_ended(self._timer.spent["exchanging"] - self._began)
        flags = extra_means[1][0] if self._flag is not None else means[0][-SPARE:]
        has_changed, *marks = flags.tolist()
        if differ(marks):
            self._observer.refuse_apart()
        self._refuse_not_finite(means)
        if measure_drift:
            self.drift = _relative_distance(self.ranges, means)
        self._commit(means)
        for extra, averaged in zip(extras, extra_means, strict=True):
            extra.take(averaged)
        self.codec_states.end()
        self._timer.switch(before)
        return bool(has_changed > 0)

    def _exchange(self, share: float, extras: list[FlatTensors]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Return the means of all contributions and extras; a single worker encodes nothing."""
        state = self._tally.account("state")
        if self._transport.workers == 1:
            self._contribute(share)
            self._add_flags()
            return [round_range.scratch for round_range in self.ranges], [
                finish(extra.ask_mean(self._transport, share)) for extra in extras
            ]
        operations = self._start_all(share)
        return self._wait(operations, [extra.ask_mean(self._transport, share, state) for extra in extras])

    def _retry(self, share: float, extras: list[FlatTensors]) -> tuple[list[Tensor], list[list[Tensor]]]:
        self.codec_states.restore()
        return self._exchange(share, extras)

    def _contribute(self, share: float) -> None:
        for round_range in self.ranges:
            self._what.bring(round_range.part.theta, round_range.state.agreed, share, round_range.scratch)

    def _add_flags(self) -> None:
        """Write this worker's flags into the spare elements that are sent, if they travel there."""
        if self._flag is None:
            self.ranges[0].scratch[-SPARE:].copy_(torch.from_numpy(self._own_flags))

    def _start_all(self, share: float) -> list[CollectiveRunner]:
        self._contribute(share)
        norm = self._tally.norm_of([round_range.scratch for round_range in self.ranges])
        self._add_flags()
        try:
            operations = [self._start(round_range) for round_range in self.ranges]
        except NotFiniteError as error:
            raise self._locate_non_finite() or error from None
        self._tally.measure_residual_later(norm, self._how, [round_range.codec_state for round_range in self.ranges])
        return operations

    def _start(self, round_range: RoundRange) -> CollectiveRunner:
        operation = CollectiveRunner(
            self._transport, self._how.average(round_range.scratch, round_range.codec_state), self._account
        )
        if self._account is not None and operation.ask is not None:
            self._account.count_raw(round_range.scratch.nbytes)
            self._tally.count_values(self._how, operation.ask.tensor, round_range.scratch)
        return operation

    def _locate_non_finite(self) -> NotFiniteError | None:
        """Return the error that names this worker's tensor that is not finite; None if all are finite."""
        for round_range in self.ranges:
            if not torch.isfinite(round_range.scratch.sum()):
                return NotFiniteError(_not_finite(round_range, round_range.scratch, self._how))
        return None

    def _wait(
        self, operations: list[CollectiveRunner], extras: list[list[CollectiveRunner]]
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        self._timer.switch("exchanging")
        self._began = self._timer.spent["exchanging"]
        means = finish(operations)
        extra_means = [finish(each) for each in extras]
        self._timer.switch("encoding")
        return means, extra_means

    def _commit(self, means: list[Tensor]) -> None:
        if self._transport.workers == 1:  # its parameters are the agreed ones, for workers that join later
            for round_range in self.ranges if self._elastic else ():
                round_range.state.agreed.copy_(round_range.part.theta)
            return
        for round_range, mean in zip(self.ranges, means, strict=True):
            self._then.apply(round_range.part.theta, mean, round_range.state)
        if self._flag is None:
            self.ranges[0].clear_spare()
        if self._state_rule == "reset":
            self._optimizer_state.reset()

    def _refuse_not_finite(self, means: list[Tensor]) -> None:
        for round_range, mean in zip(self.ranges, means, strict=True):
            if not torch.isfinite(mean.sum()):
                raise NotFiniteError(_not_finite(round_range, mean, self._how))


def _not_finite(round_range: RoundRange, mean: Tensor, how: object) -> str:
    for slot in round_range.part.slots:
        wrong = mean[slot.start : slot.stop]
        if not torch.isfinite(wrong).all():
            own = round_range.part.theta[slot.start : slot.stop]
            where = "this worker's own, too" if not torch.isfinite(own).all() else f"not this worker's (how={how})"
            return f"the agreed change of {slot.name} is NaN or infinite; {where}; nothing was changed by this round"
    return "the sum of an exchange is infinite; nothing was changed by this round"


def _relative_distance(ranges: list[RoundRange], means: list[Tensor]) -> float | None:
    """Return this worker's distance from the mean of all workers, relative to the norm of the mean."""
    distance = norm_of_mean = 0.0
    for round_range, mean in zip(ranges, means, strict=True):
        stop = round_range.part.slots[-1].stop  # flags follow
        theta = round_range.state.agreed[:stop] + mean[:stop]
        distance += float((round_range.part.theta[:stop] - theta).norm()) ** 2
        norm_of_mean += float(theta.norm()) ** 2
    return (distance / norm_of_mean) ** 0.5 if norm_of_mean else None
