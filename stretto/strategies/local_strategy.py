"""The strategy of recipes that exchange parameters or updates after local steps, among workers that wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.strategies.carried_state import Piece
from stretto.strategies.flat_buffers import FlatParameters
from stretto.strategies.local_updates import LocalUpdates, RoundRange
from stretto.strategies.model_sync import Named
from stretto.strategies.parameter_set import ParameterSet
from stretto.strategies.round_strategy import RoundStrategy
from stretto.strategies.tensor_sync import OptimizerState
from stretto.transport.interface import Change

MEASURE_DRIFT_EVERY_S = 5.0


class LocalStrategy(RoundStrategy):
    """Does rounds that end in the mean of the workers' contributions, applied as the recipe's `then` says."""

    _drift_at = 0.0

    def before_step(self, index: int, is_carried: bool) -> None:
        """Keep the values of parameters that the optimizer trains for the first time."""
        if self.sets[index].has_changed():
            self.sets[index].keep_values()

    def exchange(self, parameter_set: ParameterSet, number: int) -> None:
        """Do one round; if any worker's trained parameters have changed, exchange the new ones from now on."""
        if parameter_set.rounds is not None and self._round(parameter_set, parameter_set.rounds):
            self._follow_changes(parameter_set, at_start=False)

    def _round(self, parameter_set: ParameterSet, rounds: LocalUpdates) -> bool:
        """Do one round of these parameters. Return True if any worker's trained parameters have changed."""
        now = self._context.events.t()
        measure = now - self._drift_at >= MEASURE_DRIFT_EVERY_S
        self._exchanging, parameter_set.has_stepped = parameter_set, False
        mark = self._observer.mark(self.sets.index(parameter_set))
        has_changed = rounds.run(parameter_set.weights.share, mark, measure, parameter_set.has_changed())
        if measure:
            self._drift_at = now
        return has_changed

    def _finish_round(self, parameter_set: ParameterSet) -> None:
        if parameter_set.has_stepped and parameter_set.rounds is not None:
            self._round(parameter_set, parameter_set.rounds)

    def _average_new(self, parameter_set: ParameterSet, new: Named) -> list[RoundRange]:
        if self._transport.workers == 1:
            return []
        rounds = self._create_rounds(FlatParameters(new, spare=True), parameter_set)
        parameter_set.agreed_values(rounds)
        rounds.run(parameter_set.weights.share, self._observer.mark(self.sets.index(parameter_set)))
        return rounds.ranges

    def _create_exchange(self, parameter_set: ParameterSet) -> None:
        assert parameter_set.flat_parameters is not None
        parameter_set.rounds = self._create_rounds(parameter_set.flat_parameters, parameter_set)

    def _create_rounds(self, flat_parameters: FlatParameters, parameter_set: ParameterSet) -> LocalUpdates:
        optimizer_state = OptimizerState(parameter_set.optimizers[0], self._transport)
        return LocalUpdates(
            flat_parameters,
            self.recipe,
            self._context,
            self._observer,
            optimizer_state,
            self.buffers,
            parameter_set.optimizers,
        )

    def _drop_exchange(self, parameter_set: ParameterSet) -> None:
        parameter_set.rounds = None

    def on_generation(self, change: Change, behind: bool) -> None:
        """Adapt weights and codec states to a changed membership; of a round that is under way, after it."""
        super().on_generation(change, behind)
        for parameter_set in self.sets:
            if parameter_set.rounds is not None:
                states = parameter_set.rounds.codec_states
                is_late = behind and parameter_set is self._exchanging
                states.regroup(len(change.members), bool(change.came), is_late)

    @property
    def drift(self) -> float | None:
        """Last measured distance of this worker's parameters from the mean, relative to the norm of the mean."""
        if self._averaged is not None:
            return self._averaged.drift
        drifts = [each.rounds.drift for each in self.sets if each.rounds is not None]
        return max((drift for drift in drifts if drift is not None), default=None)

    @property
    def states(self) -> Sequence[Any]:
        """Codec states of the ranges."""
        return [state for each in self.sets if each.rounds is not None for state in each.rounds.codec_states.states]

    @property
    def ranges(self) -> list[RoundRange]:
        """Ranges of all sets."""
        return [each for parameter_set in self.sets for each in self._ranges_of(parameter_set)]

    def _ranges_of(self, parameter_set: ParameterSet) -> list[RoundRange]:
        return parameter_set.rounds.ranges if parameter_set.rounds is not None else []

    def _pieces(self, parameter_set: ParameterSet) -> list[Piece]:
        ranges = self._ranges_of(parameter_set)
        return [Piece(each.codec_state, each.part, 0, each.part.theta.numel()) for each in ranges]
