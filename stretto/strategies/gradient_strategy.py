"""The strategy of recipes that exchange gradients among workers that wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

from stretto.recipe.what import gradients
from stretto.strategies.carried_state import Piece
from stretto.strategies.gradient_allreduce import GradientAllReduce
from stretto.strategies.model_sync import watch_forward
from stretto.strategies.optimizers import parameters_of
from stretto.strategies.parameter_set import ParameterSet
from stretto.strategies.recipe_strategy import RecipeStrategy
from stretto.transport.interface import Change


class GradientStrategy(RecipeStrategy):
    """All-reduces the gradients of all optimizers as one set, in the backward pass."""

    _gradients: GradientAllReduce | None = None
    """The exchange; None while no rank of this worker trains a parameter."""
    _is_accumulating = False
    """True while the exchange is suspended."""
    _hooks: Sequence[RemovableHandle] = ()

    def attach(self) -> None:
        """Create the exchange; hook parameters that begin to train, before the backward pass reaches them."""
        super().attach()
        self._hooks = watch_forward(self._model, self._follow)

    def begin_epoch(self, together: bool) -> None:
        """Agree on the trained parameters if `together`, and hook all parameters of the optimizers."""
        if together:
            self._agree_on_changes(at_start=True)
        parameter_set = self.sets[0]
        if not self._lay_again(parameter_set) and self._gradients is not None:
            self._gradients.follow(parameter_set.held_parameters())

    def _follow(self) -> None:
        if self._gradients is not None and self.sets[0].has_changed():
            self._gradients.follow(self.sets[0].held_parameters())

    def before_step(self, index: int, is_carried: bool) -> None:
        """Raise ModelError if the optimizer steps with gradients or parameters that no exchange includes."""
        if self._gradients is not None and not is_carried and self._transport.has_others:
            self._gradients.refuse_unexchanged(parameters_of(self._optimizers.each[index]))
        self._refuse_late(self.sets[0])

    def take_part(self) -> None:
        """Take part in an exchange without a gradient of this worker."""
        if self._gradients is not None:
            self._gradients.take_part()

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
        for hook in self._hooks:
            hook.remove()
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

    def _follow_changes(self, parameter_set: ParameterSet, at_start: bool, idle: bool = False) -> bool:
        has_changed = super()._follow_changes(parameter_set, at_start)
        if has_changed and self._gradients is not None and not at_start:
            self._gradients.exchange(idle)
        return has_changed

    def _create_exchange(self, parameter_set: ParameterSet) -> None:
        self._drop_exchange(parameter_set)
        self._gradients = GradientAllReduce(
            parameter_set,
            self.recipe,
            self._context,
            self._observer,
            lambda idle: self._follow_changes(parameter_set, at_start=False, idle=idle),
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
        assert isinstance(self.recipe.what, gradients)
        return self.recipe.what.codec_state(state)

    def _pieces(self, parameter_set: ParameterSet) -> list[Piece]:
        if self._gradients is None or not self._transport.has_others:
            return []
        return [
            Piece(self._codec_state(bucket.state), bucket.part, bucket.start, bucket.stop)
            for bucket in self._gradients.buckets
        ]
