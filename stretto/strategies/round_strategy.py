"""The strategy of recipes with rounds of local steps and an exchange of parameters, among workers that wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from stretto.errors import RecipeError, explain
from stretto.recipe.when import overhead, together
from stretto.strategies.parameter_set import ParameterSet
from stretto.strategies.recipe_strategy import RecipeStrategy
from stretto.strategies.round_intervals import interval_of
from stretto.transport.interface import Change, Transport

Found = TypeVar("Found")


class RoundStrategy(RecipeStrategy):
    """Does rounds of local steps and an exchange; each optimizer has a set of parameters, and rounds, of its own.

    A subclass defines `exchange`. Where it leaves the replicas different, it says so in `keeps_own_model`.
    """

    in_rounds = True
    _exchanging: ParameterSet | None = None
    """The set of the last round."""

    def attach(self) -> None:
        """Create an exchange of each set of parameters, and what decides when its rounds are due."""
        super().attach()
        assert isinstance(self.recipe.when, together)
        if isinstance(self.recipe.when.every, overhead) and self._transport.siblings is not None:
            raise RecipeError(
                explain(
                    f"the ranks of a worker could disagree on the local steps of {self.recipe}, by their own times",
                    got="a layout of several processes for each worker",
                    expected="one process for each worker, or a number of steps",
                    to_type='no --layout, or --recipe "local_sgd(every=16)"',
                )
            )
        self.intervals = [
            interval_of(self.recipe.when, self._transport, self._context.timer, self._context.events) for _ in self.sets
        ]

    def before_step(self, index: int, is_carried: bool) -> None:
        """Raise ModelError if the optimizer steps parameters that no exchange includes."""
        self._refuse_late(self.sets[index])

    def after_step(self, index: int, steps: int) -> bool:
        """Do a round of this optimizer's parameters if it is due. Return True if it was."""
        parameter_set = self.sets[index]
        parameter_set.has_stepped = True
        interval = self.intervals[index]
        if not interval.is_due(steps):
            return False
        self._run_round(parameter_set, interval.round_begins(steps))
        interval.round_ended(steps)
        return True

    def _run_round(self, parameter_set: ParameterSet, number: int) -> None:
        self._exchanging, parameter_set.has_stepped = parameter_set, False
        if parameter_set.flat_parameters is not None:
            with self._context.timer.on("exchanging"):
                parameter_set.weights.agree()
            self.exchange(parameter_set, number)

    def exchange(self, parameter_set: ParameterSet, number: int) -> None:
        """Do round `number`, counted from 1: replace the parameters by the result of one `attempt`."""
        raise NotImplementedError

    @property
    def transport(self) -> Transport:
        """Operations among the workers; in a round they belong into an `attempt`."""
        return self._transport

    def attempt(self, act: Callable[[], Found], in_pairs: bool = False) -> Found:
        """Run the operations of a round, from the beginning again if a worker fails in it, and count it.

        `act` may not change the parameters. `in_pairs` is True if any worker may submit an Exchange in it.
        """
        timer = self._context.timer
        before = timer.switch("exchanging")
        began = timer.spent["exchanging"]
        found = self._transport.attempt(act, in_pairs=in_pairs)
        timer.switch(before)
        self._observer.exchange_ended(timer.spent["exchanging"] - began)
        return found

    def _create_exchange(self, parameter_set: ParameterSet) -> None:
        """Keep no state between rounds."""

    def sync_for_evaluation(self, called: bool = False) -> None:
        """Put the mean of the workers' parameters in place, if an optimizer has stepped since the last round.

        After a round a script may have moved parameters that no optimizer holds, and a worker without a batch has not.
        """
        if self._averaged is not None:
            return
        self._agree_on_changes(at_start=False)
        with self._context.timer.on("exchanging"):
            if self.has_stepped:
                for parameter_set in self.sets:
                    parameter_set.weights.agree()
                self._average(self._share_in_evaluation)
            else:
                self.buffers.follow_teachers()
                if len(self.sets) > 1:  # one optimizer's pass may have changed them after the round of another one
                    self.average_buffers(1)
                self.note_shown()

    def _share_in_evaluation(self, parameter_set: ParameterSet) -> Callable[[], float]:
        """Return the function that returns the share of this worker's parameters in the evaluated mean."""
        return parameter_set.weights.share

    def carried(self) -> bool:
        """Note that a round has ended. Return True if no optimizer has stepped since its last round."""
        (self._exchanging or self.sets[0]).weights.carried()
        return not any(parameter_set.has_stepped for parameter_set in self.sets) and super().carried()

    def on_generation(self, change: Change, behind: bool) -> None:
        """Adapt weights to a changed membership; those of a round that is under way, after it."""
        for parameter_set in self.sets:
            if not behind or (self._exchanging is not None and parameter_set is not self._exchanging):
                parameter_set.weights.remove_failed(change.gone)
