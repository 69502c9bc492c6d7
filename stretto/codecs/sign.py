"""Signs with mean magnitudes (1-bit SGD, EF-sign)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from stretto import kernels
from stretto.codecs.base import SingleRound, refuse_not_finite
from stretto.codecs.bucket_messages import concatenate_message, split_message
from stretto.lazy_torch import torch
from stretto.spec import Range

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class sign(SingleRound):
    """Send one bit per number, its sign; it decodes to the mean of its bucket's numbers of that sign, or to +-one mean.

        means="two": carried_i = mean(a_j : a_j >= 0) where a_i >= 0, else mean(a_j : a_j < 0)        (1-bit SGD)
        means="one": carried_i = mean |a| where a_i >= 0, else -mean |a|                              (EF-sign)

    Biased, so use it inside `error_feedback`; it is a contraction. Cost: a bit a number and 8 bytes (4
    with one mean) a bucket; one pass over the numbers.
    """

    means: Literal["two", "one"] = "two"
    bucket: Annotated[int, Range(least=1, most=1 << 30)] = 65536

    papers = ("Seide et al. 2014", "Karimireddy et al. 2019 (1901.09847)")

    def sources(self) -> tuple[str, ...]:
        return self.papers[:1] if self.means == "two" else self.papers[1:]

    def contraction(self, n: int) -> float:
        """Return the delta of ||a - C(a)||^2 <= (1 - delta) ||a||^2, which is ||a||_1^2 / (d ||a||^2) for d numbers."""
        return 1 / max(1, min(n, self.bucket))

    def encode(self, x: Tensor, state: Any) -> Tensor:
        return self._encode(x, None)

    def encode_with_residual(self, x: Tensor, residual: Tensor, state: Any) -> Tensor:
        return self._encode(x, residual)

    def _encode(self, x: Tensor, residual: Tensor | None) -> Tensor:
        refuse_not_finite(x, self)
        packed, scales = kernels.on(x).sign_pack(x, residual, self.bucket, self.means == "two")
        return concatenate_message(scales if self.means == "two" else scales.amax(1), packed)

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        self.add_to(like.zero_(), message)
        return like

    def add_to(self, total: Tensor, message: Tensor) -> None:
        if message.numel() == 0:
            return
        scales, packed = split_message(message, *self._message_sizes(total.numel()), self)
        scale_pairs = scales.view(-1, 2) if self.means == "two" else torch.stack([-scales, scales], 1)
        kernels.on(total).add_sign(total, packed, scale_pairs, self.bucket)

    def values_sent(self, message: Tensor, like: Tensor) -> int:
        return like.numel() if message.numel() else 0

    def bytes_of(self, x: Tensor) -> int:
        scales, packed = self._message_sizes(x.numel())
        return 4 * scales + packed

    def _message_sizes(self, numbers: int) -> tuple[int, int]:
        """Return the number of means and of bytes of signs in a message about this count of numbers."""
        buckets = -(-numbers // self.bucket)
        return 2 * buckets if self.means == "two" else buckets, -(-numbers // 8)
