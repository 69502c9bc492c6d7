"""Sums of the gradients of parameters over the micro-batches of a batch, and hooks of parameters."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

Hook = Callable[[Tensor], Tensor]


@contextmanager
def summed_gradients(parameters: Sequence[nn.Parameter], times: int) -> Iterator[list[Tensor | None]]:
    """Yield the sum for each parameter of the gradients that `torch.autograd.grad` computes within; None without one.

    Each gradient is added once it is computed, so one gradient at a time is in memory beside the sums. `times` is the
    number of calls: the first of several gradients is copied, since another tensor may have the same memory.
    """
    sums: list[Tensor | None] = [None] * len(parameters)

    def adds(place: int) -> Hook:
        def add(gradient: Tensor) -> Tensor:
            before = sums[place]
            found = gradient if times == 1 else gradient.clone() if before is None else before.add_(gradient)
            sums[place] = found
            return found  # in place of the gradient, whose memory is free then

        return add

    with only_hooks(parameters, [adds(place) for place in range(len(parameters))]):
        yield sums


@contextmanager
def only_hooks(parameters: Sequence[nn.Parameter], hooks: Sequence[Hook | None]) -> Iterator[None]:
    """Run these hooks of the gradients of parameters within, and not the script's, which are for whole batches."""
    given = [one._backward_hooks for one in parameters]
    for one, hook in zip(parameters, hooks, strict=True):
        _set_hooks(one, OrderedDict({0: hook}) if hook is not None else None)
    try:
        yield
    finally:
        for one, hooks_before in zip(parameters, given, strict=True):
            _set_hooks(one, hooks_before)


def _set_hooks(parameter: nn.Parameter, hooks: Any) -> None:
    parameter._backward_hooks = None  # torch adds hooks that are set to those of before
    if hooks is not None:
        parameter._backward_hooks = hooks
