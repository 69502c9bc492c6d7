"""The part of a worker without a batch in a global step in which others have one.

The other workers run the script's loop; an idle worker can't, since it has no batch. So in such a global step the root,
the first worker with a batch, broadcasts its actions: an exchange begins, the optimizer steps, the global step ends. An
idle worker takes part in exchanges with weight 0, steps with the root's gradients, and copies the root's schedulers and
gradient scalers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stretto.errors import ModelError, explain
from stretto.strategies.optimizers import Optimizers
from stretto.strategies.tensor_sync import follow, heard
from stretto.training.schedule import Schedules
from stretto.transport import Transport

EXCHANGE, COUNT, END = b"exchange", b"count", b"end"
STEP = b"step "
"""Prefix of a step's message; the optimizer's index in the script's list follows."""
Plain = dict[str, Any]


def step_of(index: int) -> bytes:
    """Return the message for a step of this optimizer.

    >>> step_of(1), stepped(step_of(1)), stepped(END)
    (b'step 1', 1, None)
    """
    return STEP + str(index).encode()


def stepped(action: bytes) -> int | None:
    """Return the index of the optimizer whose step a message announces; None for another message."""
    return int(action.removeprefix(STEP)) if action.startswith(STEP) else None


def broadcast_gradients(transport: Transport, root: int, parameters: list[nn.Parameter]) -> None:
    """Broadcast the gradients that the optimizer is about to use, after clipping and unscaling, to the idle workers."""
    has = msgspec.msgpack.encode([one.grad is not None for one in parameters])
    present = msgspec.msgpack.decode(transport.broadcast_bytes(has, root), type=list[bool])
    for parameter, held in zip(parameters, present, strict=True):
        if held and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif not held:
            parameter.grad = None
    follow(transport, [one.grad for one in parameters if one.grad is not None], root)


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
        self._asked = 0

    def broadcast(self, transport: Transport, root: int) -> None:
        """Broadcast the root's settings to the idle workers."""
        received = heard(transport, lambda: msgspec.msgpack.encode(self.state()), root)
        if received is not None:
            self.take(msgspec.msgpack.decode(received, type=list[list[Plain]]))

    def state(self) -> list[list[Plain]]:
        """Return the plain values of the optimizer's groups, the schedulers and the scalers."""
        positions = [self._schedules.state()] if self._schedules is not None else []
        return [[_plain(one) for one in kind] for kind in self._kinds()] + [positions]

    def take(self, state: list[list[Plain]]) -> None:
        """Adopt the state of another worker."""
        groups, schedulers, scalers, *rest = state
        for position in rest[0] if rest else ():
            if self._schedules is not None:
                self._schedules.take(position)
        mine = self._kinds()
        if len(groups) != len(mine[0]):
            raise ModelError(
                explain(
                    "the optimizers of the workers have other parameter groups",
                    got=f"{len(mine[0])} groups here, {len(groups)} at another worker",
                    expected="the same groups at all workers",
                    to_type="add parameter groups between two epochs, on every worker",
                )
            )
        for setting, plain in [*zip(mine[0], groups, strict=True), *zip(mine[1], schedulers, strict=False)]:
            _take(setting, plain)
        for scaler, plain in zip(self._scalers, scalers, strict=False):
            scaler.load_state_dict(plain)

    def _kinds(self) -> list[list[Plain]]:
        schedulers = [found for one in self._optimizers for found in _schedulers(one)]
        return [self._optimizers.param_groups, schedulers, self._scaler_states()]

    def _scaler_states(self) -> list[Plain]:
        """The collector, which is slow, is asked for scalers at the 1st, 2nd, 4th, 8th ... time until there is one."""
        self._asked += 1
        if not self._scalers and self._asked & (self._asked - 1) == 0:
            self._scalers = [one for one in self._find() if one.is_enabled()]
        return [one.state_dict() for one in self._scalers]


def _schedulers(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the attributes of an optimizer's learning-rate schedulers, in a fixed order.

    Only the garbage collector has a list of them. It is slow, so it is used only where a scheduler has marked the
    optimizer.
    """
    if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return []
    referrers = gc.get_referrers(optimizer)
    found = [vars(one) if isinstance(one, LRScheduler) else one for one in referrers]
    mine = [one for one in found if isinstance(one, dict) and one.get("optimizer") is optimizer and "last_epoch" in one]
    return sorted(mine, key=lambda one: sorted(_plain(one)))


def _plain(settings: dict[str, Any]) -> Plain:
    return {name: value for name, value in settings.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return isinstance(value, int | float | str | bool | None)


def _take(settings: dict[str, Any], received: Plain) -> None:
    for name, value in received.items():
        settings[name] = tuple(value) if isinstance(settings.get(name), tuple) else value
