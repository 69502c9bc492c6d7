"""What do workers exchange?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stretto.axis import Answer

if TYPE_CHECKING:
    from torch import Tensor


PIECE = 1 << 16
"""Numbers that are worked on at a time, so that the second operation finds them in the processor's cache."""


class What(Answer):
    """Base of the answers to *what*."""

    axis = "what"
    example: ClassVar[str] = "gradients()"


class OfParameters(What):
    """Something about the parameters, exchanged after local steps.

    It travels as the change since the parameters last agreed, `theta_i - theta_old`: the sum of n changes loses far
    fewer bits to rounding than the sum of n shares of the parameters, and what no worker changed stays bit for bit.
    """

    def bring(self, theta: Tensor, agreed: Tensor, share: float, out: Tensor) -> None:
        """Write this worker's contribution, weighted by its share of the samples, into `out`."""
        import torch

        flat: tuple[Any, ...] = (theta, agreed, out)
        for now, before, piece in zip(*(one.split(PIECE) for one in flat), strict=True):
            torch.sub(now, before, out=piece).mul_(share)


@dataclass(frozen=True, repr=False)
class gradients(What):
    """The gradient of each backward pass, agreed before `backward()` returns.

    `g = sum_i (n_i / n) g_i`, with n_i the samples of worker i. Cost: the bytes of the model a backward pass.
    """


@dataclass(frozen=True, repr=False)
class updates(OfParameters):
    """The change of the parameters over the local steps, so learning rate and momentum are inside.

    `D_i = theta_i - theta_old`, with theta_old the parameters last agreed. The optimizer's state stays local.
    """


@dataclass(frozen=True, repr=False)
class parameters(OfParameters):
    """The parameters themselves: `theta = sum_i (n_i / n) theta_i`, sent as their change (see OfParameters).

    optimizer_state says what becomes of the optimizer's state at an exchange: "keep" it as each worker has it,
    "average" it with the parameters (twice the bytes with momentum, three times with Adam), or "reset" it to zero.
    """

    optimizer_state: Literal["average", "keep", "reset"] = "keep"
