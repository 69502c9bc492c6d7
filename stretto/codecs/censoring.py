"""Censoring: a vector is sent whole or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from stretto.codecs.base import SINGLE_WORKER, CodecContext
from stretto.codecs.difference_threshold import ParameterMoves, parameter_moves
from stretto.codecs.sparsifier import Sparsifier
from stretto.lazy_torch import torch
from stretto.spec import Range

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class censored(Sparsifier):
    """Send the whole vector if it is large compared with the parameters' last move, and nothing otherwise.

    a is sent when ||a|| > (xi / M) ||theta^k - theta^(k-1)||, with M workers

    CGD when a is the difference between the gradient and the last sent one: `gradient_differences(beta=1)`.
    Before the first move every nonzero vector is sent. `stretto.how.difference_threshold` applies the same rule to each
    number. Cost: all numbers and a byte, or 0. Memory: a copy of theta.
    """

    xi: Annotated[float, Range(least=0)]

    papers = ("Chen, Blum, Sadler 2021 (1909.03631)", "Chen et al. 2018 (1805.09965)")
    needs_theta = True

    def init_state(self, like: Tensor, context: CodecContext = SINGLE_WORKER) -> ParameterMoves:
        return parameter_moves(self, context)

    def select(self, x: Tensor, residual: Tensor | None, state: ParameterMoves) -> tuple[Tensor, Tensor]:
        a = x if residual is None else residual.add_(x)
        if _norm(a) <= self.xi / state.workers * _norm(state.moved(x)):
            return a.new_empty(0, dtype=torch.int32), a.new_empty(0)
        values = a.clone()
        if residual is not None:
            residual.zero_()
        return torch.arange(a.numel(), dtype=torch.int32, device=a.device), values


def _norm(a: Tensor) -> float:
    return float(torch.linalg.vector_norm(a, dtype=torch.float64))
