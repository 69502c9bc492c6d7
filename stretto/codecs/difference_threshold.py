"""Fewer bits by sending the numbers that are large beside the parameters' own moves."""

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
        """theta - theta^before (nothing in the first round), and theta is the next round's theta^before."""
        moved = self.theta - self.before
        self.before.copy_(self.theta)
        return moved.to(like.dtype)


def parameter_moves(codec: Codec, context: CodecContext) -> ParameterMoves:
    """A memory of the parameters' moves; RecipeError where it is not known what is exchanged about them."""
    if context.theta is None:
        raise RecipeError(
            explain(
                f"{codec} compares what is sent with the parameters' moves, and here there are no parameters",
                got=str(codec),
                expected="an encoding of gradients or of their differences, between workers that go together",
                to_type="top_k(0.01)",
            )
        )
    return ParameterMoves(context.theta.detach(), context.workers)


@dataclass(frozen=True, repr=False)
class difference_threshold(Sparsifier):
    """Send the numbers that are large beside the last move of their parameter; GD-SEC's rule.

    a_i is sent when |a_i| > (xi / M) |theta_i^k - theta_i^(k-1)|, with M workers

    theta^k are the parameters now, theta^(k-1) those when the worker last encoded. At first nothing has moved, and all
    that is not zero is sent. With `gradient_differences` and `error_feedback` it is GD-SEC; converges when
    alpha * beta * xi <= 1 for gradients of the sum of the workers' losses with learning rate alpha.

    Cost: the numbers that are sent, exactly, and their places; 0 where none is sent. Memory: a copy of theta.
    """

    xi: Annotated[float, Range(least=0)]

    papers = ("Chen, Blum, Takac, Sadler 2022 (2202.02491)",)
    needs_theta = True

    def init_state(self, like: Tensor, context: CodecContext = SINGLE_WORKER) -> ParameterMoves:
        return parameter_moves(self, context)

    def select(self, x: Tensor, residual: Tensor | None, state: ParameterMoves) -> tuple[Tensor, Tensor]:
        indices, values = kernels.on(x).take_moved(x, residual, state.moved(x), self.xi / state.workers)
        return indices, values
