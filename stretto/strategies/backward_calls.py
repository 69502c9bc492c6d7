"""The backward passes of a script, watched where torch begins them.

A hook on the model would be an attribute of it: part of its copies and files, and of what `torch.jit.script` compiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

Act = Callable[[Sequence[Tensor], bool], None]
End = Callable[[], None]
watching: ContextVar[tuple[tuple[Act, End | None], ...]] = ContextVar("watching", default=())
"""Callbacks before and after every backward pass of this worker; several workers may share a process."""

SUM = 2
"""Number by which torch's losses save that they add the losses of the samples; 0 for a loss of each sample."""
_KEEP_A_SUM = ("AddBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0", "ViewBackward0", "SqueezeBackward0")
"""Operations after which a sum over the samples is one; a product or a quotient may make it a mean."""
_OF_EACH_SAMPLE = ("AbsBackward0", "PowBackward0")
_CHOOSE = ("IndexBackward0", "GatherBackward0")
"""Operations that choose the losses of some samples, or each sample's logarithm of a probability."""


def watch(act: Act, then: End | None = None) -> None:
    """Call `act` before each backward pass, with the losses and True if it records a graph of the gradients.

    Call `then` after it, also if it fails.
    """
    if not hasattr(torch.autograd.backward, "_stretto_wraps"):
        torch.autograd.backward = _wrapped(torch.autograd.backward)
    watching.set((*watching.get(), (act, then)))


def unwatch(act: Act) -> None:
    """Call `act` no more: the section has ended."""
    watching.set(tuple(pair for pair in watching.get() if pair[0] != act))


def _wrapped(original: Any) -> Any:
    @functools.wraps(original)
    def backward(
        tensors: Any, grad_tensors: Any = None, retain_graph: Any = None, create_graph: bool = False, **rest: Any
    ) -> Any:
        acts = watching.get()
        if acts:
            losses = [tensors] if isinstance(tensors, Tensor) else [one for one in tensors if isinstance(one, Tensor)]
            for act, _ in acts:
                act(losses, create_graph)
        try:
            return original(tensors, grad_tensors, retain_graph, create_graph, **rest)
        finally:
            for then in (then for _, then in acts if then is not None):
                then()

    backward._stretto_wraps = original  # type: ignore[attr-defined]
    return backward


def is_sum(loss: Tensor) -> bool:
    """Return True if a loss adds the losses of its samples, as far as torch's own operations show that.

    >>> x = torch.ones(4, requires_grad=True)
    >>> is_sum(torch.nn.functional.mse_loss(x, torch.zeros(4), reduction="sum")), is_sum((x**2).mean())
    (True, False)
    """
    nodes = [loss.grad_fn]
    while nodes:
        node: Any = nodes.pop()
        before = [one for one, _ in node.next_functions if one is not None] if node is not None else []
        if getattr(node, "_saved_reduction", None) == SUM:
            return True
        if node is not None and node.name() == "SumBackward0" and any(map(_is_of_samples, before)):
            return True
        if node is not None and node.name() in _KEEP_A_SUM:
            nodes += before
    return False


def _is_of_samples(node: Any) -> bool:
    """Return True if this operation computes a loss of each sample, and not a penalty of a parameter."""
    is_known = getattr(node, "_saved_reduction", None) == 0 or node.name() in _OF_EACH_SAMPLE
    before = [one for one, _ in node.next_functions if one is not None]
    if node.name() in _CHOOSE:
        return any(one.name() == "LogSoftmaxBackward0" or _is_of_samples(one) for one in before)
    return is_known and [one.name() for one in before] != ["torch::autograd::AccumulateGrad"]
