"""The strategy of recipes that exchange gradients among workers that wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.codecs import exact
from stretto.errors import ModelError, explain
from stretto.recipe.recipe import Recipe
from stretto.recipe.what import gradients
from stretto.strategies import backward_calls
from stretto.strategies.carried_state import Piece
from stretto.strategies.collective_runner import CollectiveRunner, finish
from stretto.strategies.gradient_allreduce import GradientAllReduce
from stretto.strategies.optimizers import parameters_of
from stretto.strategies.parameter_set import ParameterSet
from stretto.strategies.recipe_strategy import RecipeStrategy
from stretto.transport.interface import Change

LOSSES = 8
"""Number of the first losses of which it is seen if they are sums: a script may have several models."""


class GradientStrategy(RecipeStrategy):
    """All-reduces the gradients of all optimizers as one set, in the backward pass."""

    _gradients: GradientAllReduce | None = None
    """The exchange; None while no rank of this worker trains a parameter."""
    _is_accumulating = False
    """True while the exchange is suspended."""
    _losses_left = LOSSES
    """Number of the next losses that are looked at."""

    def attach(self) -> None:
        """Create the exchange; hook parameters that begin to train, before the backward pass reaches them.

        A worker that stays alone has nothing to send: its gradients are the mean.
        """
        if not self._transport.has_others:
            self.exchanged = Recipe()
        super().attach()
        backward_calls.watch(self._before_backward)

    def begin_epoch(self, together: bool) -> None:
        """Agree on the trained parameters if `together`, and hook all parameters of the optimizers."""
        if together:
            self._agree_on_changes(at_start=True)
        parameter_set = self.sets[0]
        if not self._lay_again(parameter_set) and self._gradients is not None:
            self._gradients.follow(parameter_set.held_parameters())

    def _before_backward(self, losses: Sequence[Tensor], create_graph: bool) -> None:
        """Hook parameters that begin to train; look at the first losses."""
        if self._gradients is None:
            return
        if self.sets[0].has_changed():
            self._gradients.follow(self.sets[0].held_parameters())
        if self._transport.workers == 1 or self._is_accumulating:
            return
        if create_graph:
            raise ModelError(_graph_of_gradients())
        if self._losses_left:
            self._losses_left -= 1
            if any(map(backward_calls.is_sum, losses)):
                self._losses_left = 0
                self._context.events.notice(_sum_of_losses(self._transport.workers))

    def before_step(self, index: int, is_carried: bool) -> None:
        """Raise ModelError if the optimizer steps with gradients or parameters that no exchange includes."""
        if self._gradients is not None and not is_carried and self._transport.has_others:
            self._gradients.refuse_unexchanged(parameters_of(self._optimizers.each[index]))
        self._refuse_late(self.sets[0])

    def weigh(self, number: float | None, is_sum: bool) -> None:
        """Give this worker's batch a weight in the mean of the next exchange, or have the gradients added."""
        self.sets[0].weights.weigh(number, is_sum)
        if is_sum:
            self._losses_left = 0

    def mean_loss(self, loss: Any) -> Any:
        """Return the mean of all workers' losses, weighted as their gradients: an optimizer may decide by it."""
        is_number = isinstance(loss, float) or (isinstance(loss, Tensor) and loss.numel() == 1)
        if self._gradients is None or not is_number:
            return loss
        weights = self.sets[0].weights
        own_loss = float(loss.detach() if isinstance(loss, Tensor) else loss)
        own_loss = 0.0 if self._observer.is_weightless else own_loss
        device = next((part.theta.device for part in self.sets[0].parts), torch.device("cpu"))
        kind = torch.float64 if device.type in ("cpu", "cuda") else torch.float32

        def add() -> Tensor:
            own = torch.tensor([own_loss * weights.share()], dtype=kind, device=device)
            return finish([CollectiveRunner(self._transport, exact().average(own, None))])[0]

        mean = self._transport.attempt(add)
        return torch.full_like(loss, mean.item(), requires_grad=False) if isinstance(loss, Tensor) else mean.item()

    def on_backward(self) -> None:
        """Begin the exchange, though the backward pass may reach no parameter of this rank."""
        if self._gradients is not None:
            self._gradients.begin_in_backward()

    def accumulate(self, on: bool) -> None:
        """Suspend the exchange of gradients, or resume it."""
        self._is_accumulating = on
        if self._gradients is not None:
            self._gradients.paused = on

    @property
    def exchanges_gradients(self) -> bool:
        """True if a rank of this worker trains a parameter."""
        return self._gradients is not None

    @property
    def keeps_own_optimizer(self) -> bool:
        """False while gradients are exchanged: the optimizers of all workers have the same state."""
        return self._gradients is None

    def close(self) -> None:
        """Remove all hooks from the model, the parameters and the optimizer."""
        backward_calls.unwatch(self._before_backward)
        self._drop_exchange(self.sets[0])
        super().close()

    def sync_for_evaluation(self, called: bool = False) -> None:
        """Copy the buffers of worker 0; the parameters are equal at all workers."""
        self._agree_on_changes(at_start=False)
        if self._gradients is not None:
            self.buffers.agree()
            self.buffers.follow_lead()

    def _continue_changed(self) -> None:
        """Have the workers compared that the script has changed: the next gradients are those of the new parameters."""
        self._is_changed = True

    def on_generation(self, change: Change, behind: bool) -> None:
        """Adapt weights and codec states to a changed membership; of a round that is under way, after it."""
        super().on_generation(change, behind)
        if self._gradients is not None:
            self._gradients.codec_states.regroup(len(change.members), bool(change.came), behind)

    def _is_warm(self) -> bool:
        return self._gradients is not None and self._gradients.is_warm

    def _follow_changes(self, parameter_set: ParameterSet, at_start: bool) -> bool:
        has_changed = super()._follow_changes(parameter_set, at_start)
        if has_changed and self._gradients is not None and not at_start:
            self._gradients.exchange()
        return has_changed

    def _create_exchange(self, parameter_set: ParameterSet) -> None:
        self._drop_exchange(parameter_set)
        self._gradients = GradientAllReduce(
            parameter_set,
            self.exchanged,
            self._context,
            self._observer,
            lambda: self._follow_changes(parameter_set, at_start=False),
        )
        self._gradients.paused = self._is_accumulating  # the first call of a model, which splits it, may be within

    def _drop_exchange(self, parameter_set: ParameterSet) -> None:
        if self._gradients is not None:
            self._gradients.release()
        self._gradients = None

    @property
    def states(self) -> Sequence[Any]:
        """State of each bucket."""
        return self._gradients.codec_states.states if self._gradients is not None else []

    @property
    def codec_states(self) -> list[list[Any]]:
        """Codec state of each bucket."""
        return [[self._codec_state(state)] for state in self.states]

    def _codec_state(self, state: Any) -> Any:
        assert isinstance(self.exchanged.what, gradients)
        return self.exchanged.what.codec_state(state)

    def _pieces(self, parameter_set: ParameterSet) -> list[Piece]:
        if self._gradients is None or not self._transport.has_others:
            return []
        return [
            Piece(self._codec_state(bucket.state), bucket.part, bucket.start, bucket.stop)
            for bucket in self._gradients.buckets
        ]


def _graph_of_gradients() -> str:
    return explain(
        "backward(create_graph=True) records how each gradient was computed, which the mean of all workers has lost",
        got="loss.backward(create_graph=True) under a recipe that exchanges gradients",
        expected="a graph of this worker's own gradients, beside the exchange or without one",
        to_type="torch.autograd.grad(loss, list(model.parameters()), create_graph=True) for a penalty, and one "
        'loss.backward() for the sum; for an optimizer that needs the graph: --recipe "local_sgd(every=1)", which '
        "exchanges parameters",
    )


def _sum_of_losses(workers: int) -> str:
    return (
        f"the loss is a sum over the samples of a batch, and its gradients are averaged over {workers} workers: a step "
        f"is 1/{workers} of that of one process with the same samples in one batch; a mean over the samples "
        '(reduction="mean") makes both alike'
    )
