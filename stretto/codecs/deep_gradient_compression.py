"""Deep gradient compression: top-k of a sum of local momentum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from stretto import kernels
from stretto.codecs.base import SINGLE_WORKER, CodecContext
from stretto.codecs.sparsifier import Sparsifier, share_of, without_zeros
from stretto.lazy_torch import torch
from stretto.spec import Range
from stretto.state import Members, State

if TYPE_CHECKING:
    from torch import Tensor

STAGES = (0.25, 0.0625, 0.0156, 0.004)


class MomentumState(State):
    """State of `deep_gradient_compression`: the momentum u, the residual v of its sum, and the number of rounds."""

    transient = ("workers",)
    replicated = ("round",)

    def __init__(self, like: Tensor, workers: int) -> None:
        self.u = torch.zeros_like(like)
        self.v = torch.zeros_like(like)
        self.workers = workers
        self.round = 0

    def reset(self, members: Members) -> None:
        """Use the new number of workers."""
        self.workers = members.workers


@dataclass(frozen=True, repr=False)
class deep_gradient_compression(Sparsifier):
    """Deep gradient compression: momentum is applied before sparsification, and cleared where values were sent.

    u = m u + x;  v = v + u;  send the ceil(ratio * n) largest of v;  where sent: v = 0, u = 0

    The optimizer must be plain SGD, since its momentum would count twice. `warm_up`: number of rounds for each of the
    stages of 25, 6.25, 1.56 and 0.4% before `ratio` applies. `clip` limits the norm of the mean gradient, as
    clip_grad_norm_ does, before the mean is known: contributions x_i (which sum to it) are scaled to a norm of at most
    clip / sqrt(N), since the squared norms of N independent contributions add up. v is the residual.

    Cost: as `top_k(ratio)`; in warm-up as top_k of the stage.
    """

    ratio: Annotated[float, Range(above=0, most=1)] = 0.001
    momentum: Annotated[float, Range(least=0, below=1)] = 0.9
    warm_up: Annotated[int, Range(least=0)] = 0
    clip: Annotated[float, Range(above=0)] | None = None

    papers = ("Lin et al. 2018 (1712.01887)",)
    keeps_residual = True

    def init_state(self, like: Tensor, context: CodecContext = SINGLE_WORKER) -> MomentumState:
        return MomentumState(like, context.workers)

    def residual(self, state: MomentumState) -> Tensor:
        return state.v

    def select(self, x: Tensor, residual: Tensor | None, state: MomentumState) -> tuple[Tensor, Tensor]:
        state.u.mul_(self.momentum).add_(self._clipped(x, state.workers))
        ratio = self._ratio(state.round)
        state.round += 1
        indices, values = kernels.on(x).take_largest(state.u, state.v, share_of(ratio, x.numel()))
        state.u[indices] = 0
        return without_zeros(indices, values)

    def max_values(self, n: int) -> int:
        return share_of(self._ratio(0), n)

    def encode_with_residual(self, x: Tensor, residual: Tensor, state: Any) -> Tensor:
        raise NotImplementedError(f"{self} keeps its own residual")

    def _ratio(self, round_: int) -> float:
        stage = round_ // self.warm_up if self.warm_up else len(STAGES)
        return max(self.ratio, STAGES[stage]) if stage < len(STAGES) else self.ratio

    def _clipped(self, x: Tensor, workers: int) -> Tensor:
        if self.clip is None:
            return x
        norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
        limit = self.clip / math.sqrt(workers)
        return x.mul_(limit / norm) if norm > limit else x
