"""Quantisation to levels of each bucket's norm (QSGD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from stretto import kernels
from stretto.codecs.base import SINGLE_WORKER, CodecContext, SingleRound, refuse_not_finite
from stretto.codecs.bucket_messages import RoundSeeds, bucket_message_sizes, concatenate_message, split_message
from stretto.spec import Range

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class quantise(SingleRound):
    """QSGD: every number is rounded to a whole number of levels of its bucket's norm.

        decoded_i = sign(a_i) * xi_i * norm(a) / s ,  xi_i = floor(s * |a_i| / norm(a) + u_i) ,  s = 2^(bits - 1) - 1

    u_i is uniform in [0, 1), which is unbiased (`stochastic`), or 1/2, which rounds to the nearest level. The
    norm is the largest magnitude among `bucket` numbers, or the Euclidean norm of these. Cost: bits/8 bytes a number
    (1/5 with 2 bits, which hold -1, 0 or 1) and 4 a bucket; one pass over the numbers. The error of a
    number is below norm / s, half of that when rounded to the nearest.
    """

    bits: Literal[8, 4, 2] = 8
    bucket: Annotated[int, Range(least=1, most=1 << 30)] = 2048
    norm: Literal["max", "l2"] = "max"
    stochastic: bool = True

    papers = ("Alistarh et al. 2017 (1610.02132)",)

    @property
    def levels(self) -> int:
        """Number of levels above zero, s."""
        return int((1 << (self.bits - 1)) - 1)

    @property
    def unbiased(self) -> bool:
        """True if the expectation of the decoded message is the input."""
        return self.stochastic

    def contraction(self, n: int) -> float | None:
        """Return the delta of ||a - C(a)||^2 <= (1 - delta) ||a||^2; None if it is no contraction."""
        return 1 / max(1, min(n, self.bucket)) if self.norm == "max" and not self.stochastic else None

    def init_state(self, like: Tensor, context: CodecContext = SINGLE_WORKER) -> Any:
        return RoundSeeds(context) if self.stochastic else None

    def encode(self, x: Tensor, state: Any) -> Tensor:
        return self._encode(x, None, state)

    def encode_with_residual(self, x: Tensor, residual: Tensor, state: Any) -> Tensor:
        return self._encode(x, residual, state)

    def _encode(self, x: Tensor, residual: Tensor | None, state: RoundSeeds | None) -> Tensor:
        refuse_not_finite(x, self)
        seed = state.seed() if state else None
        packed, scales = kernels.on(x).quantise(x, residual, self.levels, self.bucket, self.norm, seed)
        return concatenate_message(scales, packed)

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        self.add_to(like.zero_(), message)
        return like

    def add_to(self, total: Tensor, message: Tensor) -> None:
        if message.numel():  # an empty message stands for zeros
            scales, packed = split_message(message, *self.message_sizes(total.numel()), self)
            kernels.on(total).add_quantised(total, packed, scales, self.levels, self.bucket)

    def values_sent(self, message: Tensor, like: Tensor) -> int:
        return like.numel() if message.numel() else 0

    def bytes_of(self, x: Tensor) -> int:
        scales, packed = self.message_sizes(x.numel())
        return 4 * scales + packed

    def message_sizes(self, numbers: int) -> tuple[int, int]:
        """Return the number of scales and of bytes of levels in a message about this count of numbers."""
        return bucket_message_sizes(numbers, self.bucket, self.levels)
