"""A worker's pass over a batch of weight 0: its changes at this worker are taken back.

The last global step of whole batches may have fewer batches than there are workers. The others then make the script's
pass over the batch of the step's first worker, so that all loops, schedulers, scalers and counters make the same steps.
Such a pass has no gradient: each parameter has the gradient afterwards that was accumulated before it, or zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from stretto.strategies import backward_calls
from stretto.strategies.optimizers import Optimizers, parameters_of
from stretto.strategies.parameter_view import is_held, local
from stretto.strategies.tensor_sync import unheld

Values = list[tuple[Tensor, Tensor]]
"""Tensors, each with its values of before."""
Kept = tuple[Optimizer, dict[Any, Any], list[dict[str, Any]]]
"""An optimizer with its state and its groups of before."""


class WeightlessPass:
    """Keeps the values that a pass of weight 0 may change, and puts them back.

    `in_rounds`: the replicas differ between two exchanges, so that this worker's alone is to be as before, with the
    parameters that no optimizer holds. Else all make the same step, and with it all that the script does after it.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers, in_rounds: bool) -> None:
        self._model, self._optimizers, self._in_rounds = model, optimizers, in_rounds
        self.is_on = False
        """True in a global step in which this worker's batch has weight 0."""
        self._depth = 0
        """Number of backward passes under way, one within the other."""
        self._gradients: list[tuple[Parameter, Tensor | None]] = []
        """Gradients of before the backward pass under way."""
        self._buffers: Values = []
        self._parameters: Values = []
        """Parameters of before the optimizer's step under way."""
        self._states: list[Kept] = []
        backward_calls.watch(self._before_backward, self._after_backward)

    def close(self) -> None:
        """Look at no backward pass any more: the section has ended."""
        backward_calls.unwatch(self._before_backward)

    def begin(self) -> None:
        """Begin a global step in which this worker's batch has weight 0."""
        self.is_on = True
        self.keep_buffers()

    def end(self, has_stepped: bool) -> None:
        """End the global step."""
        if self.is_on and (self._in_rounds or not has_stepped):
            _put_back(self._buffers)
        self.is_on, self._buffers = False, []

    def keep_buffers(self) -> None:
        """Keep the present buffers, after a step that may have exchanged them."""
        others = unheld(self._model, self._optimizers) if self._in_rounds else []
        self._buffers = _kept([one for _, one in (*self._model.named_buffers(), *others)]) if self.is_on else []

    # --- gradients ------------------------------------------------------------------------------------------------

    def _before_backward(self, _losses: Sequence[Tensor], _create_graph: bool) -> None:
        self._depth += 1
        if self.is_on and self._depth == 1:
            held = [one for one in self._optimizers.parameters if is_held(one)]
            self._gradients = [(one, one.grad) for one in held]
            for one in held:
                one.grad = None

    def _after_backward(self) -> None:
        self._depth -= 1
        if not self._depth:
            self.take_back_gradients()

    def take_back_gradients(self) -> None:
        """Put the gradients and the buffers of before the backward pass back, unless that is done."""
        for parameter, before in self._gradients:
            if before is not None or parameter.grad is not None:
                parameter.grad = before if before is not None else torch.zeros_like(parameter.grad)  # type: ignore[arg-type]
        if self._gradients:
            _put_back(self._buffers)
        self._gradients = []

    # --- steps of an optimizer ------------------------------------------------------------------------------------

    def before_step(self, index: int) -> None:
        """Keep the values that the step of this optimizer changes, which is made without a sample."""
        optimizer = self._optimizers.each[index]
        self._parameters = _kept(parameters_of(optimizer))
        for one in (*self._optimizers.around[index], optimizer):
            groups = [{name: value for name, value in group.items() if name != "params"} for group in one.param_groups]
            self._states.append((one, dict(one.state), groups))
            for key, value in one.state.items():
                one.state[key] = _copied(value)

    def after_step(self) -> None:
        """Put back the values that the step has changed, and the buffers, before an exchange has them."""
        _put_back(self._parameters)
        for optimizer, state, groups in self._states:
            optimizer.state.clear()
            optimizer.state.update(state)
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.update(before)
        if self._in_rounds:
            _put_back(self._buffers)
        self._parameters, self._states = [], []


def _kept(tensors: Sequence[Tensor]) -> Values:
    held = [local(one.detach()) for one in tensors if is_held(one)]
    return [(one, one.clone()) for one in held]


def _put_back(values: Values) -> None:
    for tensor, before in values:
        tensor.copy_(before)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value
