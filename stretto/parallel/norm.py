"""The norm of the gradients that other stages hold, as the gradient of one placeholder parameter.

`clip_grad_norm_(model.parameters(), ...)` and `GradScaler` look at all gradients of the model. A rank has those of its
own stage; the smallest parameter of the other stages gets a gradient with the 2-norm of all gradients of other stages,
or NaN if one of them is not finite. It is removed before the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.parallel.link import Link
from stretto.strategies.optimizers import Optimizers
from stretto.strategies.parameter_view import is_held


class GradientNorm:
    """The placeholder at one rank. At all ranks `follow` is called in each backward pass."""

    def __init__(self, model: nn.Module, optimizers: Optimizers, link: Link) -> None:
        given = {id(one) for one in optimizers.parameters}
        others = [one for one in model.parameters() if not is_held(one) and one.requires_grad and id(one) in given]
        self._link, self._placeholder = link, min(others, key=lambda one: one.numel(), default=None)
        self._parameters: Sequence[Tensor] = ()
        self._is_queued = False
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._remove)

    def follow(self, parameters: Sequence[Tensor]) -> None:
        """Set the placeholder's gradient at the end of the backward pass under way, after exchanges of gradients."""
        if not self._is_queued:
            self._is_queued, self._parameters = True, parameters
            _at_end(lambda: _at_end(self._set))

    def _set(self) -> None:
        self._is_queued = False
        gradients = [one.grad for one in self._parameters if one.grad is not None]
        norms = [torch.linalg.vector_norm(one, dtype=_wide(one)).double() for one in gradients]
        own = torch.stack(norms).square().sum().cpu() if norms else torch.zeros((), dtype=torch.float64, device="cpu")
        total = self._link.sum(own.reshape(1).clone())
        if self._placeholder is not None:
            others = (total - own).clamp_min(0).sqrt() if bool(total.isfinite()) else total * float("nan")
            gradient = torch.zeros(self._placeholder.shape, dtype=self._placeholder.dtype, device=self._link.device)
            gradient.view(-1)[0] = float(others[0])
            self._placeholder.grad = gradient

    def _remove(self, *_: Any) -> None:
        if self._placeholder is not None:
            self._placeholder.grad = None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _at_end(act: Any) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(act)
