"""Optimizers that `stretto.distribute` was not given: what they move at one worker, the other workers do not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stretto.errors import ModelError, ScriptError, explain
from stretto.strategies.model_sync import plain_name
from stretto.strategies.optimizers import Optimizers, held_by, parameters_of
from stretto.strategies.parameter_view import is_held, local
from stretto.strategies.tensor_sync import crc

watching: ContextVar[Callable[[Optimizer], None] | None] = ContextVar("watching", default=None)
"""Callback before every step of any optimizer at this worker; several workers may share a process."""
FIRST_VALUES = 1 << 14
"""Number of values of each parameter that are compared: an update by hand changes nearly all."""
_installed: list[Any] = []


def watch(act: Callable[[Optimizer], None]) -> None:
    """Call `act` before each step of any optimizer of this worker's script."""
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_before_step))
    watching.set(act)


def unwatch() -> None:
    """Look at no step any more: the section has ended."""
    watching.set(None)


def _before_step(optimizer: Optimizer, *_arguments: Any) -> None:
    if (act := watching.get()) is not None:
        act(optimizer)


class OutsideOptimizers:
    """Looks for parameters of the model, or of another one, that are trained past the exchange.

    `step_of` is the number of the global step that the loop is in, None outside of one: what a script trains before and
    after its loop is its own affair.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers, step_of: Callable[[], int | None]) -> None:
        self._model, self._optimizers, self._step_of = model, optimizers, step_of
        self._seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """The first global step that an outside optimizer stepped in."""
        self._values: dict[str, int] = {}
        """Checksums of the first values of each parameter when an epoch began."""

    def note_values(self) -> None:
        """Note the first values of the parameters that the optimizers hold."""
        self._values = self._first_values()

    def _first_values(self) -> dict[str, int]:
        held = {id(one) for one in self._optimizers.parameters if is_held(one)}
        named = [(plain_name(name), one) for name, one in self._model.named_parameters() if id(one) in held]
        return {name: crc(local(one.detach()).reshape(-1)[:FIRST_VALUES]) for name, one in named}

    def refuse_updates_by_hand(self, gather: Callable[[bytes], Sequence[bytes]] | None = None) -> None:
        """Raise ScriptError if the script has changed parameters since `note_values`, and no optimizer has stepped.

        With `gather`, which exchanges messages of all workers, at all of them if one has: a worker without a batch
        has not.
        """
        noted, self._values = self._values, {}
        found = self._first_values() if noted else {}
        changed = [name for name, value in noted.items() if found.get(name, value) != value]
        if gather is not None:
            told = [msgspec.msgpack.decode(one, type=list[str]) for one in gather(msgspec.msgpack.encode(changed))]
            changed = max(told, key=len)
        if changed:
            raise ScriptError(_by_hand(changed))

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise ModelError where an optimizer would let the workers drift apart in silence."""
        step = self._step_of()
        if step is None or any(optimizer is one for one in self._optimizers.all):
            return
        if any(inner is one for inner in held_by(optimizer) for one in self._optimizers):
            raise ModelError(_is_around(type(optimizer).__name__))
        names = {id(one): plain_name(name) for name, one in self._model.named_parameters()}
        held = parameters_of(optimizer)
        mine = [names[id(one)] for one in held if id(one) in names and one.grad is not None]
        if mine:
            raise ModelError(_moves(type(optimizer).__name__, mine))
        if any(isinstance(one, nn.Parameter) for one in held) and self._seen.setdefault(optimizer, step) != step:
            raise ModelError(_drifts(type(optimizer).__name__, len(held)))

    def check_held(self) -> None:
        """Raise ModelError if a parameter of the model has a gradient, and no given optimizer to step with it."""
        held = {id(one) for one in self._optimizers.parameters}
        parameters = self._model.named_parameters()
        asked = ((name, one) for name, one in parameters if one.requires_grad and one.grad is not None)
        lost = [plain_name(name) for name, one in asked if id(one) not in held]
        if lost:
            raise ModelError(_not_held(lost))


def refuse_step_outside(iterations: int, is_same_thread: bool, is_in_epoch: bool) -> None:
    """Raise ScriptError for an optimizer step before the loader's first batch, after its last, or in another thread."""
    if not iterations:
        raise ScriptError(
            explain(
                "an optimizer steps, but no batch of the loader that stretto.distribute returned was taken",
                got="a step before any iteration over the distributed loader: every worker would train on all data",
                expected="a loop over what the call returned",
                to_type="loader = stretto.distribute(model, optimizer, loader), then: for batch in loader: ...",
            )
        )
    if not is_same_thread:
        raise ScriptError(
            explain(
                "the batches of the distributed loader are taken in another thread than the optimizer's steps",
                got="an iteration in a thread of its own, as of a prefetching wrapper: exchanges belong to a step",
                expected="the loop and the steps in one thread",
                to_type="wrap the script's own loader: stretto.distribute(model, optimizer, Prefetch(loader)), or use "
                "DataLoader(..., num_workers=2)",
            )
        )
    if not is_in_epoch:
        raise ScriptError(
            explain(
                "an optimizer steps after the distributed loader has come to its end: the epoch of all workers is over",
                got="a step after the loop, as for list(loader), itertools.cycle(loader), a wrapper that reads ahead, "
                "or gradients that are left over",
                expected="each step in the loop, before the next batch is taken",
                to_type="for batch in loader: ..., with the step for what is left over at stretto.is_last_batch(); "
                "a wrapper around the script's own loader: stretto.distribute(model, optimizer, Prefetch(loader)); "
                "stretto.finish() before training without the loader",
            )
        )


def _by_hand(names: list[str]) -> str:
    return explain(
        f"the optimizer was never stepped, and the script has changed {names[0]} itself in the loop",
        got=f"{_parameters(len(names))} changed without a step: each worker would train for itself",
        expected="a step of the optimizer that stretto.distribute was given, in each update",
        to_type="optimizer.step() in place of the update by hand (torch.optim.SGD(model.parameters(), lr=...) is "
        "p -= lr * p.grad); stretto.finish() before training without the loader",
    )


def _moves(kind: str, names: list[str]) -> str:
    return explain(
        f"an optimizer that stretto.distribute was not given is about to change {names[0]}",
        got=f"a step of {kind} over {_parameters(len(names))} of the model",
        expected="every optimizer of the loop in the call, so that its steps are exchanged",
        to_type="stretto.distribute(model, [first, second], loader); a new optimizer: call stretto.distribute again",
    )


def _is_around(kind: str) -> str:
    return explain(
        f"{kind} steps an optimizer that stretto.distribute was given from within, and was not given itself",
        got=f"a step of {kind} around the optimizer in the call",
        expected="the outer one alone, whose steps are seen with those of the optimizer in it",
        to_type=f"stretto.distribute(model, optimizer, loader) with the {kind} as the optimizer",
    )


def _drifts(kind: str, count: int) -> str:
    return explain(
        "an optimizer that stretto.distribute was not given trains another model in the loop",
        got=f"{kind} over {_parameters(count)}, which would differ among the workers",
        expected="every model and every optimizer of the loop in the call",
        to_type="stretto.distribute([generator, discriminator], [opt_g, opt_d], loader)",
    )


def _not_held(names: list[str]) -> str:
    return explain(
        f"{names[0]} has a gradient, and no optimizer that stretto.distribute was given holds it",
        got=f"{_parameters(len(names))} with a gradient, in no optimizer: {', '.join(names[:4])}",
        expected="every trainable parameter of the model in one of the optimizers",
        to_type="parameter.requires_grad_(False) for what is not trained, or a list of all optimizers of the loop",
    )


def _parameters(count: int) -> str:
    return f"{count} parameter{'s' * (count != 1)}"
