"""Rounding to 16-bit floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from stretto.codecs.base import SingleRound, refuse_not_finite

if TYPE_CHECKING:
    from torch import Tensor

MOST = {"bf16": (2 - 2**-7) * 2.0**127, "fp16": 65504.0}
"""Largest finite number of each format."""


@dataclass(frozen=True, repr=False)
class cast(SingleRound):
    """Send every number as a 16-bit float: "bf16" keeps the range of float32, "fp16" has 3 bits more precision.

    Half the bytes of float32. Linear up to rounding: an all-reduce rounds partial sums to 16 bits. A number
    beyond 65504 becomes infinite as fp16, and is then refused instead of trained on.
    """

    to: Literal["bf16", "fp16"]

    linear = True
    elementwise = True
    papers = ("Micikevicius et al. 2018 (1710.03740)",)

    def encode(self, x: Tensor, state: Any) -> Tensor:
        return x.bfloat16() if self.to == "bf16" else x.half()

    def encode_with_residual(self, x: Tensor, residual: Tensor, state: Any) -> Tensor:
        """Return the message; the excess over the range of fp16 stays in the residual instead of becoming infinite."""
        refuse_not_finite(x, self)
        residual.add_(x)
        limit = MOST[self.to]
        message = self.encode(residual.clamp(-limit, limit), state)
        residual.sub_(message)
        return message

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        return like.copy_(message)

    def bytes_of(self, x: Tensor) -> int:
        return 2 * x.numel()
