"""Gradients with NaN or infinity."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim import Optimizer

from stretto.strategies.model_sync import plain_name
from stretto.strategies.optimizers import parameters_of


def has_non_finite_gradient(optimizer: Optimizer) -> bool:
    """Return True if any gradient of this optimizer's parameters holds NaN or infinity."""
    gradients = (parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None)
    return any(not bool(torch.isfinite(gradient.sum())) for gradient in gradients)


def non_finite_parameter(model: nn.Module, optimizer: Optimizer) -> str | None:
    """Return the name of the optimizer's last parameter if its gradient is not finite: a NaN in the loss reaches it."""
    parameters = reversed(optimizer.param_groups[-1]["params"])
    last = next((parameter for parameter in parameters if parameter.grad is not None), None)
    if last is None or math.isfinite(last.grad.sum()):
        return None
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    return names.get(id(last), "a parameter outside the model")
