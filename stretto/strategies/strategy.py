"""Strategy: the way in which a recipe hooks into the training loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from stretto.errors import ModelError, explain
from stretto.loader.global_step import Parts
from stretto.parameter_server.client_types import RuleState
from stretto.recipe.recipe import Recipe
from stretto.strategies.averaged_model import AveragedModel
from stretto.strategies.consistency_check import NO_RATES, Rates
from stretto.strategies.context import ExchangeObserver, StrategyContext
from stretto.strategies.local_updates import RoundRange
from stretto.strategies.optimizers import Optimizers
from stretto.strategies.parameter_set import ParameterSet
from stretto.strategies.round_intervals import RoundInterval
from stretto.strategies.strategy_state import StrategyState
from stretto.strategies.tensor_sync import MovingBuffers
from stretto.transport.interface import Change


class Strategy:
    """The strategy of a worker that exchanges nothing, and the interface of all strategies.

    The trainer calls `attach` once, `begin_epoch`, `before_step`, `after_step` and `end_global_step` in the loop,
    `on_generation` after a membership change, and `close` at the end of the section.
    """

    asynchronous = False
    """True if a server applies updates on arrival, so that workers do not wait for each other."""
    in_rounds = False
    """True if workers that wait for each other exchange parameters, each optimizer's as a set of its own."""
    intervals: Sequence[RoundInterval] = ()
    """Local steps between rounds, by optimizer."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        recipe: Recipe | None,
        context: StrategyContext,
        observer: ExchangeObserver,
        parameter_sets: int = 0,
    ) -> None:
        self.recipe = self.exchanged = recipe
        """The recipe, and the one by which the strategy exchanges, which may be simpler."""
        self._model, self._optimizers, self._context, self._observer = model, optimizers, context, observer
        self._transport = context.transport
        self.buffers = MovingBuffers(model, self._transport, optimizers)
        each = [[optimizer] for optimizer in optimizers] if self.in_rounds else [list(optimizers)]
        self.sets = [ParameterSet(model, own, self._transport) for own in each]
        self.parameter_sets = parameter_sets
        """Number of parameter sets created so far, in all sections: a server knows a set by this number."""
        self._averaged: AveragedModel | None = None
        self.state = StrategyState(self, model)

    # --- the training loop ----------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Lay the parameters flat, and hook into the model and the optimizers."""

    def begin_epoch(self, together: bool) -> None:
        """Begin an epoch; with `together`, agree with all workers on the parameters that are trained.

        Lay parameters flat again that a script has moved. A script may freeze, thaw, add, replace and move parameters
        between two epochs.
        """

    def before_step(self, index: int, is_carried: bool) -> None:
        """Notice parameters that the optimizer with this number trains for the first time.

        `is_carried` is True if gradients were exchanged since its last step. Raises ModelError if the recipe's exchange
        can't include such parameters.
        """

    def lay_back(self) -> None:
        """Bring parameters back into the flat buffers that a step or the script has given other memory."""
        for part in [part for parameter_set in self.sets for part in parameter_set.parts]:
            part.lay_back()

    def note_values(self, has_stepped: bool) -> None:
        """Note the parameters when a global step begins, or an optimizer `has_stepped`: the script's code runs next.

        Ranks of a worker do not: they hold other parts, and would decide apart. Nor does a worker that is alone.
        """
        for parameter_set in self.sets if self._transport.siblings is None else ():
            parameter_set.note_values(has_stepped, is_alone=not self._transport.has_others)

    def look_for_redraws(self) -> None:
        """Look for layers that the script has drawn again; the next exchange compares the workers' values."""
        for parameter_set in self.sets:
            parameter_set.look_for_redraws()

    def after_step(self, index: int, steps: int) -> bool:
        """Exchange if that is due after the `steps`-th step of this optimizer.

        Returns True if the parameters may be equal at all workers now.
        """
        return False

    def end_global_step(self, has_stepped: bool) -> None:
        """End a global step, in which an optimizer `has_stepped` or not."""

    def push_all(self) -> None:
        """Push the remaining update to a server, and wait until it is applied."""

    def mean_loss(self, loss: Any) -> Any:
        """Return the mean of all workers' losses where all have to decide alike by it; else the loss itself."""
        return loss

    def on_backward(self) -> None:
        """Begin an exchange of gradients in the backward pass under way, which reaches the model at all ranks."""

    def accumulate(self, on: bool) -> None:
        """Suspend the exchange of gradients, or resume it."""

    @property
    def exchanges_gradients(self) -> bool:
        """True if gradients are exchanged: all workers step with the same ones."""
        return False

    @property
    def has_stepped(self) -> bool:
        """True if parameters are exchanged, and an optimizer has stepped since the last exchange."""
        return any(parameter_set.has_stepped for parameter_set in self.sets)

    def close(self) -> None:
        """Remove all hooks from the parameters and the optimizer when the section has ended."""

    # --- the averaged model ---------------------------------------------------------------------------------------

    def sync_for_evaluation(self, called: bool = False) -> None:
        """Replace this worker's parameters by the averaged model, or by the server's, if they differ.

        Workers that do not wait for each other wait at a barrier first, because they were `called`, or because it is
        due.
        """

    def note_shown(self) -> None:
        """Note the parameters, which all workers hold and the script may change before it continues to train."""

    def resume(self, own: bool = True) -> None:
        """Continue training after an evaluation sync, with the worker's own parameters or a server's version."""

    @contextmanager
    def newest(self) -> Iterator[None]:
        """Set the parameters to the server's newest version in a `with` block; no other worker waits."""
        yield

    def average_buffers(self, samples: int) -> None:
        """Average the buffers that an epoch without an optimizer step has changed, weighted by the workers' samples.

        Such an epoch estimates the statistics of batch-norm, as `torch.optim.swa_utils.update_bn` does.
        """

    @property
    def drift(self) -> float | None:
        """Last measured distance of this worker's parameters from the mean, relative to the norm of the mean."""
        return self._averaged.drift if self._averaged is not None else None

    def check(self, when: str, rates: Rates = NO_RATES, steps: Sequence[int] = ()) -> bool:
        """Compare the replicas of all workers, which must be equal now. Return False if there is nothing to compare.

        Parameters that no optimizer trains are compared, too: none may have changed at one worker alone. The parameters
        of an optimizer that has stepped since their last exchange are compared only while the averaged model is in
        place. So are learning rates that schedulers have chosen by a number, and the `steps` of each optimizer.
        """
        return False

    # --- weights and membership -----------------------------------------------------------------------------------

    def add_samples(self, own: int, total: int, parts: Parts | None) -> None:
        """Add the samples of a global step to the weights: those of this worker, and of all."""
        for parameter_set in self.sets:
            parameter_set.weights.add(own, total, parts)

    def weigh(self, number: float | None, is_sum: bool) -> None:
        """Give this worker's batch a weight in the mean of the next exchange. Sums are of gradients alone."""
        if is_sum and self.recipe is not None:
            raise ModelError(_only_gradients_are_added())
        for parameter_set in self.sets:
            parameter_set.weights.weigh(number, is_sum)

    def forget(self, global_steps: int) -> None:
        """Remove the samples of the last global steps, in which no optimizer stepped, from the weights."""
        for parameter_set in self.sets:
            parameter_set.weights.forget(global_steps)

    def undo(self) -> None:
        """Undo the steps since the last exchange, and set the gradients to zero: their batches are trained again."""

    def carried(self) -> bool:
        """Note that an exchange has ended. Return True if no optimizer has stepped since its last exchange."""
        for parameter_set in self.sets:
            parameter_set.weights.carried()
        return True

    @property
    def is_carried(self) -> bool:
        """True if exchanges have carried all samples, or if nothing is exchanged."""
        return self.recipe is None or all(parameter_set.weights.is_carried for parameter_set in self.sets)

    def on_generation(self, change: Change, behind: bool) -> None:
        """Adapt weights and codec states to a changed membership.

        If this worker is a round `behind`, the failed workers were part of that round, and stay in its weights.
        """
        for parameter_set in self.sets if not behind else ():
            parameter_set.weights.remove_failed(change.gone)

    # --- the server -----------------------------------------------------------------------------------------------

    @property
    def blocked_s(self) -> float | None:
        """Seconds for which the staleness bound has blocked this worker; None without a bound."""
        return None

    @property
    def versions_read(self) -> Sequence[int]:
        """Version of each shard at the last read; empty without a server."""
        return []

    def take_outcomes(self) -> list[tuple[int, int, int, int]]:
        """Return the updates of this worker that a server has applied since the last call."""
        return []

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def keeps_own_optimizer(self) -> bool:
        """True if the optimizer's state differs from worker to worker."""
        return True

    @property
    def keeps_own_model(self) -> bool:
        """True if the parameters differ from worker to worker between two global steps, after an exchange."""
        return False

    @property
    def replicas_differ(self) -> bool:
        """True if the parameters of the workers differ until their mean is in place, by which an epoch ends."""
        return False

    def load_difference(self, differs: bool) -> None:
        """Load `replicas_differ` of a state: the first step after it may be in the next epoch."""

    @property
    def shards(self) -> int:
        """Number of shards that hold the parameters; 0 without a server."""
        return 0

    @property
    def own_parameters(self) -> Sequence[Tensor]:
        """This worker's own parameters, by flat buffer, if a server's version has replaced them; else empty."""
        return []

    def load_own_parameters(self, state: Mapping[str, Any]) -> None:
        """Load parameters of this worker that are only pulled towards the server's."""

    @property
    def states(self) -> Sequence[Any]:
        """States of the exchange, in a fixed order."""
        return []

    @property
    def codec_states(self) -> list[list[Any]]:
        """Codec states of each range, one for each shard."""
        return [[state] for state in self.states]

    @property
    def ranges(self) -> list[RoundRange]:
        """Ranges of parameters that are exchanged in rounds."""
        return []

    def rule_state(self) -> RuleState | None:
        """Return the state of a server's rule, after a barrier. Raises RollbackRequiredError."""
        return None

    def load_rule_state(self, rule_state: RuleState) -> None:
        """Send the loaded parameters, and the state of its rule, to the server."""

    def train_like(self, trained: list[list[str]]) -> None:
        """Exchange the parameters that a loaded state names: the script may have frozen or thawed some since."""


def _only_gradients_are_added() -> str:
    return explain(
        "stretto.weight(sum=True) adds gradients, which this recipe does not exchange",
        got="a recipe that exchanges parameters or updates, or does not wait",
        expected="a recipe of gradients, or losses that are means",
        to_type='--recipe allreduce; or a loss with reduction="mean"',
    )
