"""Gradients with NaN or infinity."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from stretto.strategies.model_sync import plain_name
from stretto.strategies.optimizers import parameters_of
from stretto.strategies.parameter_view import is_held, local
from stretto.transport.device_memory import Arriving


def has_non_finite_gradient(optimizer: Optimizer) -> bool:
    """Return True if any gradient of this optimizer's parameters holds NaN or infinity."""
    held = [(is_held(one), one.grad) for one in parameters_of(optimizer) if one.grad is not None]
    # of a gradient at another rank the norm is known
    return any(not bool(torch.isfinite(grad.sum() if is_here else grad.norm())) for is_here, grad in held)


class GradientCheck:
    """Check of the gradient of an optimizer's last parameter after each step: a NaN in the loss reaches it.

    The result on a device is read after the next step, before a checkpoint, or at the end of the epoch: no step waits
    for it. Of a gradient that another library owns the local tensor is checked.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._pending: tuple[Arriving, Parameter, int] | None = None
        """Sum of a gradient, its parameter, and the number of the step."""

    def after_step(self, optimizer: Optimizer, step: int) -> tuple[str, int] | None:
        """Return the name of a parameter whose gradient was not finite, and the number of that step."""
        found = self.settle()
        parameters = reversed(optimizer.param_groups[-1]["params"])
        last = next((parameter for parameter in parameters if parameter.grad is not None), None)
        if last is None:
            return found
        total = Arriving(local(last.grad.detach()).sum())
        self._pending = total, last, step
        return found if total.is_late or found is not None else self.settle()

    def settle(self) -> tuple[str, int] | None:
        """Return what `after_step` returns, for the last step."""
        pending, self._pending = self._pending, None
        if pending is None or math.isfinite(pending[0].read()):
            return None
        names = {id(parameter): plain_name(name) for name, parameter in self._model.named_parameters()}
        return names.get(id(pending[1]), "a parameter outside the model"), pending[2]
