"""What is done with the answer?

`theta` are the parameters, flat; `answer` is what the workers agreed on, of the same length: for all that changes the
parameters at an exchange, the mean change since they last agreed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from stretto.axis import Answer, Range

if TYPE_CHECKING:
    from torch import Tensor


class Memory:
    """What a worker remembers between exchanges of one flat range: the parameters last agreed, and a velocity."""

    def __init__(self, theta: Tensor) -> None:
        self.agreed = theta.clone()
        self.velocity: Tensor | None = None


PIECE = 1 << 16
"""Numbers that are worked on at a time, so that the second operation finds them in the processor's cache."""


def _add(theta: Tensor, answer: Tensor, agreed: Tensor, weight: float) -> None:
    """`agreed += weight * answer; theta = agreed`."""
    flat: tuple[Any, ...] = (theta, answer, agreed)
    for now, change, before in zip(*(one.split(PIECE) for one in flat), strict=True):
        now.copy_(before.add_(change, alpha=weight))


class Then(Answer):
    """Base of the answers to *then*."""

    axis = "then"
    example: ClassVar[str] = "replace()"


class OnParameters(Then):
    """An answer that changes the parameters at the exchange."""

    def apply(self, theta: Tensor, answer: Tensor, memory: Memory) -> None:
        """Set `theta` and the memory to the new agreed parameters; `answer` is the mean change of all workers."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class step(Then):
    """Let the optimizer use the answer as the gradient: whatever it does with a gradient it does with the mean."""


@dataclass(frozen=True, repr=False)
class replace(OnParameters):
    """Take the mean of the parameters: `theta = theta_old + answer`, where the answer is the mean change."""

    def apply(self, theta: Tensor, answer: Tensor, memory: Memory) -> None:
        _add(theta, answer, memory.agreed, 1.0)


class Weight(Answer):
    """Base of the weights of `add`."""

    axis = "weight"
    example: ClassVar[str] = "constant(1.0)"


@dataclass(frozen=True, repr=False)
class constant(Weight):
    """The same weight c for every answer."""

    c: Annotated[float, Range(above=0)]


@dataclass(frozen=True, repr=False)
class add(OnParameters):
    """Add the answer to the parameters last agreed: `theta = theta_old + c * answer`."""

    weight: Weight = constant(1.0)

    def apply(self, theta: Tensor, answer: Tensor, memory: Memory) -> None:
        assert isinstance(self.weight, constant)
        _add(theta, answer, memory.agreed, self.weight.c)


@dataclass(frozen=True, repr=False)
class outer(OnParameters):
    """Step an outer SGD with the outer gradient `d = -answer`, as DiLoCo does.

    v = momentum * v + d;  theta = theta_old - lr * (d + momentum * v)   with nesterov
                           theta = theta_old - lr * v                    without
    Memory: the parameters last agreed and v.
    """

    lr: Annotated[float, Range(above=0)] = 0.7
    momentum: Annotated[float, Range(least=0, below=1)] = 0.9
    nesterov: bool = True

    papers = ("Douillard et al. 2023 (2311.08105)", "Sutskever et al. 2013 (Nesterov momentum)")

    def apply(self, theta: Tensor, answer: Tensor, memory: Memory) -> None:
        if memory.velocity is None:
            memory.velocity = answer.new_zeros(answer.shape)
        memory.velocity.mul_(self.momentum).sub_(answer)
        if self.nesterov:
            memory.agreed.add_(answer, alpha=self.lr).sub_(memory.velocity, alpha=self.lr * self.momentum)
        else:
            memory.agreed.sub_(memory.velocity, alpha=self.lr)
        theta.copy_(memory.agreed)
