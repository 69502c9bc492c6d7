"""Sparsification by the parameters' own moves (GD-SEC)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from stretto import kernels
from stretto.codecs.base import SINGLE_WORKER, Codec, CodecContext
from stretto.codecs.sparsifier import Sparsifier
from stretto.errors import RecipeError, explain
from stretto.spec import Range
from stretto.state import Members, State

if TYPE_CHECKING:
    from torch import Tensor


class ParameterMoves(State):
    """State of codecs that compare with the parameters' moves: the parameters, and their values when last encoded."""

    transient = ("theta", "workers")

    def __init__(self, theta: Tensor, workers: int) -> None:
        self.theta = theta
        self.before = theta.clone()
        self.workers = workers

    def reset(self, members: Members) -> None:
        """Use the new number of workers."""
        self.workers = members.workers

    def moved(self, like: Tensor) -> Tensor:
        """Return theta minus its value at the last call (0 in the first round)."""
        moved = self.theta - self.before
        self.before.copy_(self.theta)
        return moved.to(like.dtype)


def parameter_moves(codec: Codec, context: CodecContext) -> ParameterMoves:
    """Return the state of the parameters' moves. Raise RecipeError if the exchanged tensor has no parameters."""
    if context.theta is None:
        raise RecipeError(
            explain(
                f"{codec} compares the tensor with the parameters' moves, and here there are no parameters",
                got=str(codec),
                expected="an encoding of gradients or their differences, in a synchronous recipe",
                to_type="top_k(0.01)",
            )
        )
    return ParameterMoves(context.theta.detach(), context.workers)


@dataclass(frozen=True, repr=False)
class difference_threshold(Sparsifier):
    """Send the numbers that are large compared with the last move of their parameter; GD-SEC's rule.

    a_i is sent when |a_i| > (xi / M) |theta_i^k - theta_i^(k-1)|, with M workers

    theta^k are the parameters now, theta^(k-1) those when the worker last encoded. Before the first move every
    nonzero number is sent. With `gradient_differences` and `error_feedback` it is GD-SEC; converges when
    alpha * beta * xi <= 1 for gradients of the sum of the workers' losses with learning rate alpha.

    Cost: the exact values that are sent and their indices; 0 if none is sent. Memory: a copy of theta.
    """

    xi: Annotated[float, Range(least=0)]

    papers = ("Chen, Blum, Takac, Sadler 2022 (2202.02491)",)
    needs_theta = True
    encodes_parts_alike = True

    def init_state(self, like: Tensor, context: CodecContext = SINGLE_WORKER) -> ParameterMoves:
        return parameter_moves(self, context)

    def select(self, x: Tensor, residual: Tensor | None, state: ParameterMoves) -> tuple[Tensor, Tensor]:
        indices, values = kernels.on(x).take_larger_than_change(x, residual, state.moved(x), self.xi / state.workers)
        return indices, values
