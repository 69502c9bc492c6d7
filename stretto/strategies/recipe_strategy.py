"""Parts that the strategies of all recipes share: trained parameters, the averaged model, and their comparison."""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Sequence

from torch import Tensor, nn

from stretto.errors import ModelError, ReplicasDifferError, explain
from stretto.recipe.recipe import Recipe
from stretto.recipe.what import momenta
from stretto.strategies.averaged_model import AveragedModel
from stretto.strategies.carried_state import Piece, add_residuals, carry_over, residuals
from stretto.strategies.collective_runner import finish
from stretto.strategies.consistency_check import NO_RATES, Rates, compare
from stretto.strategies.flat_buffers import FlatBuffer, in_buffers
from stretto.strategies.local_updates import RoundRange
from stretto.strategies.model_sync import Named, plain_name
from stretto.strategies.one_bit_adam import FrozenVariance
from stretto.strategies.optimizers import parameters_of, refuse_optimizers
from stretto.strategies.parameter_set import ParameterSet
from stretto.strategies.parameter_view import is_held
from stretto.strategies.strategy import Strategy
from stretto.strategies.tensor_sync import FlatTensors, crc, unheld


class RecipeStrategy(Strategy):
    """A strategy that exchanges sets of parameters, held in flat buffers, by a recipe."""

    recipe: Recipe
    exchanged: Recipe
    _frozen: FrozenVariance | None = None
    _is_changed = False
    """True if the script has changed the model at this worker, and the workers have not been compared since."""
    _shown: Sequence[int] | None = None
    """Checksums of the parameters where all workers held the same ones without an averaged model in place."""

    def attach(self) -> None:
        """Refuse optimizers that the recipe can't train, then create an exchange of each set of parameters."""
        if self._transport.has_others:
            refuse_optimizers(self.recipe, self._optimizers, self._transport.workers)
            if isinstance(self.recipe.what, momenta):
                self._frozen = FrozenVariance(self._optimizers.each[0], self.recipe.what, self._is_warm)
        for parameter_set in self.sets:
            self._rebuild(parameter_set, parameter_set.trainable())

    def _is_warm(self) -> bool:
        """Return True if the last result was a momentum, not a gradient."""
        return False

    def begin_epoch(self, together: bool) -> None:
        """Agree on the trained parameters if `together`, and lay moved parameters flat again."""
        if together:
            self._agree_on_changes(at_start=True)
        for parameter_set in self.sets:
            self._lay_again(parameter_set)

    def _lay_again(self, parameter_set: ParameterSet) -> bool:
        """Lay parameters flat again that the script has moved. Return False if they have not moved."""
        flat_parameters = parameter_set.flat_parameters
        if flat_parameters is None or parameter_set.is_laid():
            return False
        self._rebuild(parameter_set, [(slot.name, slot.parameter) for slot in reversed(flat_parameters.slots)])
        return True

    def close(self) -> None:
        """Remove the hooks from the optimizer."""
        if self._frozen is not None:
            self._frozen.release()

    # --- trained parameters ---------------------------------------------------------------------------------------

    def _agree_on_changes(self, at_start: bool) -> None:
        """If any worker's trained parameters have changed, do the round that is under way, and agree on the new set."""
        if not self._transport.has_others:
            has_changed = any(parameter_set.has_changed() for parameter_set in self.sets)
            for parameter_set in self.sets if has_changed else ():
                self._follow_changes(parameter_set, at_start)
            return
        own = struct.pack("??", any(parameter_set.has_changed() for parameter_set in self.sets), self._is_changed)
        flags = [struct.unpack("??", message) for message in self._transport.all_gather_bytes(own)]
        self._is_changed = False
        changed = [worker for worker, (_, model) in enumerate(flags) if model]
        if changed and len(changed) < len(flags):
            raise ReplicasDifferError(_changed_alone(changed))
        if changed:
            self.check("after the script changed the model")
        if not any(trained for trained, _ in flags):
            return
        for parameter_set in self.sets:
            self._finish_round(parameter_set)
            self._follow_changes(parameter_set, at_start)

    def _finish_round(self, parameter_set: ParameterSet) -> None:
        """Do the round that is under way, before the parameters in it change."""

    def _follow_changes(self, parameter_set: ParameterSet, at_start: bool) -> bool:
        """Exchange the parameters that are trained now. Return True if they have changed.

        Average parameters first that were stepped before any exchange.
        """
        agreed = parameter_set.agree(at_start)
        if not agreed.has_changed:
            parameter_set.see()
            return False
        late = self._average_new(parameter_set, agreed.new) if agreed.has_new and not at_start else []
        self._rebuild(parameter_set, agreed.by_name, late)
        return True

    def _average_new(self, parameter_set: ParameterSet, new: Named) -> list[RoundRange]:
        """Average parameters that were stepped before any exchange; return their ranges."""
        return []

    def _refuse_late(self, parameter_set: ParameterSet) -> None:
        """Raise ModelError if parameters began to train that no exchange includes."""
        if parameter_set.has_changed() and self._transport.has_others and (strangers := parameter_set.strangers()):
            raise ModelError(_began_late(self.recipe, self._model, strangers))

    def _rebuild(self, parameter_set: ParameterSet, by_name: Named, late: Sequence[RoundRange] = ()) -> None:
        """Lay these parameters flat and exchange them from now on, keeping the state of those exchanged before."""
        before = residuals(self.exchanged.how, self._pieces(parameter_set))
        if self._is_unused(parameter_set, by_name):
            self._drop_exchange(parameter_set)
            parameter_set.flat_parameters = None
            parameter_set.see()
            return
        ranges = [*self._ranges_of(parameter_set), *late]
        parameter_set.flatten(by_name, self.in_rounds, self._tables(by_name))
        self._count_and_create(parameter_set)
        carry_over(ranges, self._ranges_of(parameter_set))
        add_residuals(self.exchanged.how, before, self._pieces(parameter_set))
        if self._shown is not None:  # a pipeline that is divided before its first epoch
            self.note_shown()

    def _is_unused(self, parameter_set: ParameterSet, by_name: Named) -> bool:
        """Return True if no rank of this worker has parameters to exchange."""
        return not by_name and not parameter_set.is_trained_elsewhere()

    def _tables(self, by_name: Named) -> Container[int]:
        """Return the ids of the parameters whose rows are exchanged by themselves."""
        return ()

    def _count_and_create(self, parameter_set: ParameterSet) -> None:
        self.parameter_sets += 1
        self._create_exchange(parameter_set)

    def _create_exchange(self, parameter_set: ParameterSet) -> None:
        """Create the exchange of a parameter set for its flat buffers."""
        raise NotImplementedError

    def _drop_exchange(self, parameter_set: ParameterSet) -> None:
        """Drop the exchange of a parameter set without parameters."""

    def _pieces(self, parameter_set: ParameterSet) -> list[Piece]:
        """Return the codec states of a parameter set, with the ranges that they belong to."""
        return []

    def _ranges_of(self, parameter_set: ParameterSet) -> list[RoundRange]:
        return []

    def train_like(self, trained: list[list[str]]) -> None:
        """Exchange the parameters that a loaded state names: the script may have frozen or thawed some since."""
        by_name = {plain_name(name): parameter for name, parameter in self._model.named_parameters()}
        for parameter_set, names in zip(self.sets, trained, strict=True):
            held = {id(each) for optimizer in parameter_set.optimizers for each in parameters_of(optimizer)}
            lacking = [name for name in names if name not in by_name or id(by_name[name]) not in held]
            if lacking:
                raise ModelError(_cant_follow(lacking))
            self._rebuild(parameter_set, [(name, each) for name, each in by_name.items() if name in set(names)])

    # --- the averaged model ---------------------------------------------------------------------------------------

    @property
    def _parts(self) -> list[FlatBuffer]:
        return [part for each in self.sets for part in each.parts]

    def _average(
        self, share: Callable[[ParameterSet], Callable[[], float]], read: Callable[[], bool] | None = None
    ) -> None:
        """Put the averaged model in place; `share` returns the function that returns a set's share."""
        sets = [
            ([part for part in each.parts if not part.width], share(each))  # tables of rows are read, not averaged
            for each in self.sets
            if each.flat_parameters is not None
        ]
        account = self._context.tally.account("evaluation_sync")
        with in_buffers(self._parts):
            self._averaged = AveragedModel(sets, self.buffers, self._transport, account, read)

    def resume(self, own: bool = True) -> None:
        """Continue training after an evaluation sync; values that the script has changed since stay."""
        averaged, self._averaged = self._averaged, None
        if averaged is None:
            is_changed = self._has_changed_shown()
        else:
            with in_buffers(self._parts):
                is_changed = self._put_back(averaged, own)
        if is_changed:
            self._continue_changed()

    def note_shown(self) -> None:
        """Note the checksums of the parameters."""
        self._shown = self._checksums()

    def _checksums(self) -> Sequence[int]:
        """Return those of each parameter, where it is: buffers that hold none would take the memory of all."""
        return [crc(slot.source.local) for part in self._parts if not part.width for slot in part.slots]

    def _has_changed_shown(self) -> bool:
        """Return True, once, if the script has changed the parameters since `note_shown`."""
        shown, self._shown = self._shown, None
        return shown is not None and shown != self._checksums()

    def _continue_changed(self) -> None:
        """Continue from parameters that the script has changed, which are no update of this worker."""
        self._is_changed = True
        self._context.events.notice("the script changed the model before an epoch; training continues from its values")
        for parameter_set in self.sets:
            if parameter_set.flat_parameters is not None:
                self._count_and_create(parameter_set)
                parameter_set.has_stepped = False

    def _put_back(self, averaged: AveragedModel, own: bool) -> bool:
        """Put this worker's own parameters back. Return True if the script has changed the model."""
        is_changed = averaged.is_changed()
        if not is_changed:
            averaged.put_back()
        return is_changed

    def average_buffers(self, samples: int) -> None:
        """Average the buffers that an epoch without an optimizer step has changed."""
        if self._transport.workers == 1:
            return
        self.buffers.agree()
        flat, account = FlatTensors(self.buffers.floating()), self._context.tally.account("evaluation_sync")

        def means() -> list[Tensor]:
            counts = self._transport.all_gather_bytes(struct.pack("<q", samples))
            total = sum(struct.unpack("<q", count)[0] for count in counts)
            return finish(flat.ask_mean(self._transport, samples / total, account))

        with self._context.timer.on("exchanging"):
            flat.take(self._transport.attempt(means))

    def check(self, when: str, rates: Rates = NO_RATES, steps: Sequence[int] = ()) -> bool:
        """Compare the replicas of all workers, which must be equal now. Return False if there is nothing to compare."""
        if self._transport.workers == 1:
            return False
        agreed = [each for each in self.sets if self._averaged is not None or not each.has_stepped]
        parts = [part for each in agreed for part in each.parts]
        excluded = {id(one) for each in self.sets if each not in agreed for one in each.trained_parameters()}
        if self._averaged is None and not self.exchanges_gradients:
            excluded |= {id(one) for _, one in unheld(self._model, self._optimizers)}
        held = ((plain_name(name), one) for name, one in self._model.named_parameters() if is_held(one))
        by_name = {name: one for name, one in held if id(one) not in excluded}
        compared = {id(slot.parameter) for part in parts for slot in part.slots}
        others = {name: one for name, one in by_name.items() if id(one) not in compared}
        buffers = {f"part {index}": part.theta for index, part in enumerate(parts)}
        with in_buffers(parts):
            compare(self._transport, buffers | others, by_name, rates, when, steps)
        return True


def _changed_alone(workers: Sequence[int]) -> str:
    return explain(
        f"replicas differ: the script changed the model of worker {', '.join(map(str, workers))} alone before an epoch",
        got=f"a change on {len(workers)} of the workers",
        expected="the same change on every worker",
        to_type="load the same file on all workers: model.load_state_dict(torch.load(path)) without a condition",
    )


def _began_late(recipe: Recipe, model: nn.Module, strangers: Sequence[nn.Parameter]) -> str:
    names = {id(one): plain_name(name) for name, one in model.named_parameters()}
    first = names.get(id(strangers[0]), "a parameter outside the model")
    return explain(
        f"{first} began to train in the middle of an epoch, where {recipe} can't follow",
        got=f"{len(strangers)} parameters that the optimizer trains and no exchange includes",
        expected="a change of what is trained before an epoch begins",
        to_type="freeze, thaw and add parameters between two epochs, or use a recipe such as local_sgd(every=16)",
    )


def _cant_follow(lacking: Sequence[str]) -> str:
    return explain(
        "the loaded state has parameters that the optimizer does not hold yet",
        got=f"no {', '.join(lacking[:3])} in the optimizer when stretto.distribute is called",
        expected="all parameters that will ever train in the optimizer from the beginning",
        to_type="give the optimizer all parameters at first, and freeze those that wait with requires_grad_(False)",
    )
