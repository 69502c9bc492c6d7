"""Parameters that are exchanged as one set: those of one optimizer, or of all where one exchange carries all.

The trained parameters may change at any time: a script freezes and thaws layers, adds parameter groups, replaces a
head. A set detects a change before the next step; the workers agree on it at their next exchange (see RecipeStrategy).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from stretto.errors import ModelError, ReplicasDifferError, explain
from stretto.loader.sample_weights import Weights
from stretto.strategies.flat_buffers import FlatBuffer, FlatParameters
from stretto.strategies.local_updates import LocalUpdates
from stretto.strategies.model_sync import Named, plain_name, trainable, trained
from stretto.strategies.optimizers import parameters_of
from stretto.strategies.parameter_view import is_held, local
from stretto.strategies.redraws import Redraws, difference
from stretto.strategies.tensor_sync import crc, follow
from stretto.transport import Transport


class Agreed(NamedTuple):
    """The parameters that are trained at any worker. Ranks of a worker, with other ones each, tell the same changes."""

    by_name: Named
    """Parameters of this rank."""
    new: Named
    """Parameters among them that no exchange carries yet."""
    has_changed: bool
    """True if any rank's have changed."""
    has_new: bool
    """True if any rank's are new."""


class ParameterSet:
    """The parameters that these optimizers train, flat, and how far their training is from the last exchange."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], transport: Transport) -> None:
        self.optimizers, self.weights = optimizers, Weights(transport)
        self._model, self._transport = model, transport
        self.flat_parameters: FlatParameters | None = None
        self.rounds: LocalUpdates | None = None
        """Exchange of a recipe of parameters."""
        self.has_stepped = False
        """True if an optimizer has stepped since the last exchange."""
        self._former: dict[int, Parameter] = {}
        """All parameters that the model has had, by id."""
        self._replaced: set[int] = set()
        """Ids of parameters that an optimizer still holds, and that the script has replaced in the model."""
        self._seen: list[tuple[int, bool]] = []
        self._elsewhere: set[str] | None = None
        """Names of the trained parameters that other ranks hold, of any worker, when the workers agreed last."""
        self._before: dict[int, Tensor] = {}
        """Values of parameters outside the flat buffers before their first step, by the parameter's id."""
        self._redraws = Redraws([])
        self.redrawn: dict[str, int] = {}
        """Checksums of parameters that the script has drawn again since the workers last compared them, by name."""

    def flatten(self, named: Named, spare: bool, tables: Container[int] = ()) -> None:
        """Lay these parameters into flat buffers; `tables` are the ids of those whose rows are exchanged alone."""
        self.flat_parameters, self._before = FlatParameters(named, spare, tables), {}
        self.see()

    def see(self) -> None:
        """Note that the workers have agreed on the parameters that are trained now."""
        self._seen = self._signature()
        if self._elsewhere is None:
            self._elsewhere = self._trained_elsewhere()

    @property
    def parts(self) -> Sequence[FlatBuffer]:
        """Flat buffers of these parameters; empty if this rank trains none."""
        return self.flat_parameters.parts if self.flat_parameters is not None else ()

    @property
    def laid(self) -> set[int]:
        """Ids of the parameters in the flat buffers."""
        return {id(slot.parameter) for part in self.parts for slot in part.slots}

    def names(self) -> list[str]:
        """Return the names of the parameters in the flat buffers, in the order of the model."""
        return [slot.name for slot in reversed(self.flat_parameters.slots)] if self.flat_parameters is not None else []

    def is_laid(self) -> bool:
        """True if all parameters are still in their places in the flat buffers: a script may have moved its model."""
        return all(part.in_place() for part in self.parts)

    def has_changed(self) -> bool:
        """True if other parameters are trained than the workers have agreed on, or if some were drawn again.

        Cost: a look at each parameter.
        """
        return bool(self.redrawn) or self._signature() != self._seen

    def note_values(self, has_stepped: bool, is_alone: bool) -> None:
        """Note the values of the parameters, which the script may change until the next look, unless they are noted.

        A worker that `is_alone` may change all, and forgets them.
        """
        if is_alone:
            self._redraws = Redraws([])
            return
        if self._redraws.parts is not self.parts:
            self._redraws = Redraws(self.parts)
        if has_stepped or not self._redraws.is_current():
            self._redraws.note()

    def look_for_redraws(self) -> None:
        """Add the parameters that the script has drawn again since they were noted to `redrawn`."""
        if self._redraws.parts is self.parts:
            self.redrawn |= self._redraws.found()

    def keep_values(self) -> None:
        """Remember the values of parameters that are new to the exchange, before a step changes them."""
        for parameter in self.strangers():
            self._before.setdefault(id(parameter), local(parameter.detach()).clone())

    def strangers(self) -> list[Parameter]:
        """Return the parameters that are trained and that no exchange carries yet."""
        laid = self.laid
        return [parameter for parameter in self.trained_parameters() if id(parameter) not in laid]

    def trained_parameters(self) -> list[Parameter]:
        """Return the parameters that the optimizers train now."""
        return [parameter for parameter in self.held_parameters() if trained(parameter)]

    def held_parameters(self) -> list[Parameter]:
        """Return the parameters of this rank that the optimizers hold, trained or frozen."""
        return [parameter for parameter in self._given() if is_held(parameter)]

    def _signature(self) -> list[tuple[int, bool]]:
        """Return the trained parameters of all ranks by id: what a script changes, it changes at all of them."""
        return [(id(parameter), is_held(parameter)) for parameter in self._given() if trained(parameter)]

    def _trained_elsewhere(self) -> set[str]:
        given = {id(one) for one in self._given() if not is_held(one) and trained(one)}
        return {plain_name(name) for name, one in self._model.named_parameters() if id(one) in given}

    def is_trained_elsewhere(self) -> bool:
        """Return True if another rank, of any worker, trains a parameter of this set."""
        return bool(self._trained_elsewhere() if self._elsewhere is None else self._elsewhere)

    def _given(self) -> list[Parameter]:
        """Return the parameters that the optimizers hold, without any that the script has replaced."""
        given = (parameter for each in self.optimizers for parameter in parameters_of(each))
        return [parameter for parameter in given if id(parameter) not in self._replaced]

    def trainable(self) -> Named:
        """Return the parameters that the optimizers train, by name, without parameters that the script has replaced."""
        named = trainable(self._model, self.optimizers, self._former)
        current = {id(parameter): parameter for parameter in self._model.parameters()}
        self._former |= current
        self._replaced = self._former.keys() - current.keys()
        return named

    # --- agreeing -----------------------------------------------------------------------------------------------

    def agree(self, at_start: bool) -> Agreed:
        """Agree with all workers on the union of their trained parameters.

        New parameters must be equal everywhere; at the start of an epoch, where no worker has used them yet, all take
        those of the first worker. Raises ModelError, at all workers, where they are not.
        """
        laid = self.laid
        redrawn, self.redrawn = self.redrawn, {}
        names = [(name, id(parameter) in laid) for name, parameter in self.trainable()]
        replies = [
            msgspec.msgpack.decode(reply, type=tuple[list[tuple[str, bool]], set[str], dict[str, int]])
            for reply in self._transport.all_gather_bytes(
                msgspec.msgpack.encode((names, self._trained_elsewhere(), redrawn))
            )
        ]
        if (text := difference([each for *_, each in replies])) is not None:
            raise ReplicasDifferError(text)
        wanted = {name for names, *_ in replies for name, _ in names}
        unlaid = {name for names, *_ in replies for name, is_laid in names if not is_laid}
        elsewhere = set[str]().union(*(names for _, names, _ in replies))
        before, self._elsewhere = self._elsewhere or set(), elsewhere
        named = {plain_name(name): parameter for name, parameter in self._model.named_parameters()}
        self._check_there(wanted, named)
        new = [(name, parameter) for name, parameter in named.items() if name in unlaid]
        self._start_alike(new, at_start)
        by_name = [(name, parameter) for name, parameter in named.items() if name in wanted]
        has_changed = bool(new) or {id(parameter) for _, parameter in by_name} != laid or elsewhere != before
        return Agreed(by_name, new, has_changed, bool(new) or bool(elsewhere - before))

    def _check_there(self, wanted: set[str], named: dict[str, Parameter]) -> None:
        held = {id(parameter) for parameter in self.held_parameters()}
        missing = sorted(name for name in wanted if name not in named or id(named[name]) not in held)
        replies = self._transport.all_gather_bytes(msgspec.msgpack.encode(missing))
        lacking = {worker: names for worker, reply in enumerate(replies) if (names := msgspec.msgpack.decode(reply))}
        if lacking:
            worker, names = next(iter(lacking.items()))
            raise ModelError(
                explain(
                    "the workers train different parameters",
                    got=f"the optimizer of worker {worker} does not hold {', '.join(names)}; another worker's does",
                    expected="the same parameters in the optimizers of all workers",
                    to_type="add parameter groups between two epochs, on every worker",
                )
            )

    def _start_alike(self, new: Named, at_start: bool) -> None:
        values = [self._before.get(id(parameter), parameter.detach()) for _, parameter in new]
        replies = self._transport.all_gather_bytes(msgspec.msgpack.encode([crc(value) for value in values]))
        if len(set(replies)) == 1:
            return
        if at_start:
            follow(self._transport, values)
            return
        sums = [msgspec.msgpack.decode(reply, type=list[int]) for reply in replies]
        name = next(new[index][0] for index, each in enumerate(zip(*sums, strict=True)) if len(set(each)) > 1)
        raise ModelError(
            explain(
                f"{name} began to train in the middle of an epoch, and differs among the workers",
                got="other values on each worker",
                expected="the same values everywhere, before the first step that changes them",
                to_type="make new layers between two epochs, or after torch.manual_seed of the same number everywhere",
            )
        )

    @torch.no_grad()
    def agreed_values(self, exchange: LocalUpdates) -> None:
        """Let an exchange of parameters that are new start from what all had before the first step."""
        for round_range in exchange.ranges:
            for slot in round_range.part.slots:
                if (value := self._before.get(id(slot.parameter))) is not None and slot.home is None:
                    slot.view(round_range.state.agreed).copy_(value)
