"""The part of a worker without a batch in a global step in which others have one.

The other workers run the script's loop; an idle worker can't, since it has no batch. So in such a global step the root,
the first worker with a batch, broadcasts its actions: the model is called for the first time, an exchange begins, the
optimizer steps, the global step ends. An idle worker takes part in the division of the model, and in exchanges with
weight 0, steps with the root's gradients, and copies the root's schedulers and gradient scalers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from stretto.errors import ModelError, explain
from stretto.loader.global_step import GlobalStep
from stretto.runtime.phase_timer import Stopwatch
from stretto.strategies.optimizers import Optimizers, parameters_of, refuse_idle
from stretto.strategies.parameter_view import is_held, local
from stretto.strategies.strategy import Strategy
from stretto.strategies.tensor_sync import broadcast_from, follow
from stretto.training.schedule import Schedules
from stretto.training.schedulers import schedulers_of
from stretto.transport import Transport

NONE, ZERO, KEPT = range(3)
"""State of an optimizer's gradients at the end of a global step: none, zeros, or others."""
EXCHANGE, LOSS, DIVIDE, END = b"exchange", b"loss", b"divide", b"end"
STEP, STEP_AROUND = b"step ", b"step around "
"""Prefixes of a step's message, the second if the optimizer around it steps without a closure.

The optimizer's index in the script's list follows, and gradients if they are exchanged.
"""
Plain = dict[str, Any]


def step_of(index: int, is_around: bool = False) -> bytes:
    """Return the message for a step of this optimizer.

    >>> step_of(1), stepped(step_of(1)), stepped(step_of(1, is_around=True)), stepped(END)
    (b'step 1', 1, 1, None)
    """
    return (STEP_AROUND if is_around else STEP) + str(index).encode()


def stepped(action: bytes) -> int | None:
    """Return the index of the optimizer whose step a message announces; None for another message."""
    return int(action.removeprefix(STEP_AROUND).removeprefix(STEP)) if action.startswith(STEP) else None


def broadcast_gradients(transport: Transport, root: int, parameters: list[nn.Parameter]) -> None:
    """Broadcast the gradients that the optimizer is about to use, after clipping and unscaling, to the idle workers.

    If the root fails, an idle worker broadcasts its own, of which those of other stages of a pipeline are no tensors.
    """
    parameters = [one for one in parameters if is_held(one)]
    has = msgspec.msgpack.encode([parameter.grad is not None for parameter in parameters])
    present = msgspec.msgpack.decode(transport.broadcast_bytes(has, root), type=list[bool])
    for parameter, held in zip(parameters, present, strict=True):
        if held and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif not held:
            parameter.grad = None
    follow(transport, [parameter.grad for parameter in parameters if parameter.grad is not None], root)


def clear_gradients_alike(transport: Transport, root: int, optimizers: Optimizers) -> None:
    """Clear, at the idle workers, the gradients of each optimizer that the root's script has cleared after its step.

    An idle worker runs no line of the script: the next backward pass would add to the gradients of this step.
    """
    held = [[one for one in parameters_of(each) if is_held(one) and one.grad is not None] for each in optimizers]
    grads: list[list[Tensor]] = [[one.grad for one in each if one.grad is not None] for each in held]
    state = [NONE if not each else KEPT if any(bool(local(one).any()) for one in each) else ZERO for each in grads]
    states = transport.broadcast_bytes(bytes(state), root)
    for parameters, at_root in zip(held, states, strict=True):
        for parameter in parameters if at_root != KEPT else ():
            parameter.grad = None if at_root == NONE else torch.zeros_like(parameter)


class IdleWorkers:
    """Both sides of a global step in which some workers have no batch: the root's, and that of an idle worker."""

    def __init__(self, transport: Transport, optimizers: Optimizers, settings: Settings, timer: Stopwatch) -> None:
        self._transport, self._optimizers, self._settings, self._timer = transport, optimizers, settings, timer
        self.is_following = False
        """True while this worker follows the root."""

    def _root(self, global_step: GlobalStep) -> int:
        """Return the rank of the step's root; 0 if it has failed."""
        members = self._transport.members
        return members.index(global_step.root) if global_step.root in members else 0

    def announce(self, global_step: GlobalStep | None, action: bytes) -> None:
        """Broadcast an action of the root, if the global step has idle workers."""
        if global_step is not None and global_step.incomplete and not self.is_following:
            self._transport.broadcast_bytes(action, self._root(global_step))

    def announce_step(
        self, global_step: GlobalStep | None, index: int, with_gradients: bool, is_around: bool = False
    ) -> None:
        """Broadcast that this optimizer steps, or the one around it, and the gradients that it steps with."""
        self.announce(global_step, step_of(index, is_around))
        if with_gradients and global_step is not None and global_step.incomplete and not self.is_following:
            broadcast_gradients(self._transport, self._root(global_step), parameters_of(self._optimizers.each[index]))

    def end(self, global_step: GlobalStep, with_gradients: bool) -> None:
        """End a global step at the root: broadcast that it ends, and the settings that it has changed."""
        self.announce(global_step, END)
        if global_step.incomplete:
            self._end_alike(global_step, with_gradients)

    def _end_alike(self, global_step: GlobalStep, with_gradients: bool) -> None:
        if with_gradients:
            clear_gradients_alike(self._transport, self._root(global_step), self._optimizers)
        self._settings.broadcast(self._transport, self._root(global_step))

    def follow(
        self,
        global_step: GlobalStep,
        strategy: Strategy,
        count_step: Callable[[int], None],
        divide: Callable[[], None],
    ) -> None:
        """Follow the root in a global step that has no batch for this worker.

        `count_step` counts a step of an optimizer. `divide` takes part in the division of the model.
        """
        if not global_step.incomplete:  # no other worker has a batch that this one lacks: another rank has it
            return
        if strategy.exchanges_gradients:
            refuse_idle(self._optimizers, "a step with fewer batches", self._transport.workers, is_split=False)
        self.is_following = True
        while (action := self._receive(global_step)) != END:
            if action == EXCHANGE:
                strategy.take_part()
            elif action == LOSS:
                strategy.mean_loss(None)
            elif action == DIVIDE:
                divide()
            elif (index := stepped(action)) is not None:
                if strategy.exchanges_gradients:
                    optimizer = self._optimizers.each[index]
                    broadcast_gradients(self._transport, self._root(global_step), parameters_of(optimizer))
                    around = self._optimizers.around[index] if action.startswith(STEP_AROUND) else ()
                    (*around, optimizer)[0].step()
                else:
                    count_step(index)
        self._end_alike(global_step, strategy.exchanges_gradients)
        self.is_following = False

    def _receive(self, global_step: GlobalStep) -> bytes:
        with self._timer.on("waiting"):
            return self._transport.broadcast_bytes(lambda: END, self._root(global_step))


class Settings:
    """State besides the parameters that a step changes: optimizer settings, schedulers and gradient scalers.

    `scalers` returns the script's gradient scalers. `schedules` holds the schedulers' position.
    """

    def __init__(
        self, optimizers: Optimizers, scalers: Callable[[], list[GradScaler]], schedules: Schedules | None = None
    ) -> None:
        self._schedules = schedules
        self._optimizers, self._find = optimizers, scalers
        self._scalers: list[GradScaler] = []

    def broadcast(self, transport: Transport, root: int) -> None:
        """Broadcast the root's settings to the idle workers."""
        received = broadcast_from(transport, lambda: msgspec.msgpack.encode(self.state()), root)
        if received is not None:
            self.take(msgspec.msgpack.decode(received, type=list[list[Plain]]))

    def state(self) -> list[list[Plain]]:
        """Return the plain values of the optimizer's groups, the schedulers and the scalers."""
        positions = [self._schedules.state()] if self._schedules is not None else []
        return [[_plain(settings) for settings in kind] for kind in self._kinds()] + [positions]

    def take(self, state: list[list[Plain]]) -> None:
        """Adopt the state of another worker."""
        groups, schedulers, scalers, *rest = state
        for position in rest[0] if rest else ():
            if self._schedules is not None:
                self._schedules.take(position)
        own = self._kinds()
        if len(groups) != len(own[0]):
            raise ModelError(
                explain(
                    "the optimizers of the workers have other parameter groups",
                    got=f"{len(own[0])} groups here, {len(groups)} at another worker",
                    expected="the same groups at all workers",
                    to_type="add parameter groups between two epochs, on every worker",
                )
            )
        for setting, plain in [*zip(own[0], groups, strict=True), *zip(own[1], schedulers, strict=False)]:
            _take(setting, plain)
        for scaler, plain in zip(self._scalers, scalers, strict=False):
            scaler.load_state_dict(plain)

    def _kinds(self) -> list[list[Plain]]:
        schedulers = [vars(scheduler) for optimizer in self._optimizers.all for scheduler in schedulers_of(optimizer)]
        return [self._optimizers.param_groups, schedulers, self._scaler_states()]

    def _scaler_states(self) -> list[Plain]:
        self._scalers = [scaler for scaler in self._find() if scaler.is_enabled()]
        return [scaler.state_dict() for scaler in self._scalers]


def _plain(settings: dict[str, Any]) -> Plain:
    return {name: value for name, value in settings.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, int | float | str | bool | None)


def _take(settings: dict[str, Any], received: Plain) -> None:
    for name, value in received.items():
        settings[name] = tuple(value) if isinstance(settings.get(name), tuple) else value
