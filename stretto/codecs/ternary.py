"""Stochastic ternary quantisation (TernGrad)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from stretto import kernels
from stretto.codecs.base import SINGLE_WORKER, CodecContext, SingleRound, refuse_not_finite
from stretto.codecs.bucket_messages import RoundSeeds, bucket_message_sizes, concatenate_message, split_message
from stretto.lazy_torch import torch
from stretto.spec import Range

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class ternary(SingleRound):
    """TernGrad: the largest magnitude of each bucket, and -1, 0 or 1 for each number, drawn without bias.

        g_i = clamp(a_i, +-c sigma) ,  s = max |g| ,  carried_i = s * sign(g_i) * b_i ,  P(b_i = 1) = |g_i| / s

    c is `clip` and sigma the root mean square of the bucket: few numbers exceed it, and without them s, and with it the
    noise, is several times smaller. With `clip=None` nothing is clipped and the result is unbiased; otherwise the
    clipped part is lost unless a residual keeps it. Cost: a byte for five numbers and 4 a bucket; three passes over the
    numbers, one without clipping.
    """

    clip: Annotated[float, Range(least=1)] | None = 2.5
    bucket: Annotated[int, Range(least=1, most=1 << 30)] = 16384

    papers = ("Wen et al. 2017 (1705.07878)",)

    @property
    def unbiased(self) -> bool:
        """True if the expectation of the decoded message is the input."""
        return self.clip is None

    def init_state(self, like: Tensor, context: CodecContext = SINGLE_WORKER) -> RoundSeeds:
        return RoundSeeds(context)

    def encode(self, x: Tensor, state: Any) -> Tensor:
        refuse_not_finite(x, self)
        return concatenate_message(*self._drawn(self._clipped(x), state))

    def encode_with_residual(self, x: Tensor, residual: Tensor, state: Any) -> Tensor:
        refuse_not_finite(x, self)
        scales, packed = self._drawn(self._clipped(x.copy_(residual.add_(x))), state)
        kernels.on(residual).add_quantised(residual, packed, -scales, 1, self.bucket)
        return concatenate_message(scales, packed)

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        self.add_to(like.zero_(), message)
        return like

    def add_to(self, total: Tensor, message: Tensor) -> None:
        if message.numel():
            scales, packed = split_message(message, *bucket_message_sizes(total.numel(), self.bucket, 1), self)
            kernels.on(total).add_quantised(total, packed, scales, 1, self.bucket)

    def values_sent(self, message: Tensor, like: Tensor) -> int:
        return like.numel() if message.numel() else 0

    def bytes_of(self, x: Tensor) -> int:
        scales, packed = bucket_message_sizes(x.numel(), self.bucket, 1)
        return 4 * scales + packed

    def _drawn(self, x: Tensor, state: RoundSeeds) -> tuple[Tensor, Tensor]:
        packed, scales = kernels.on(x).quantise(x, None, 1, self.bucket, "max", state.seed())
        return scales, packed

    def _clipped(self, x: Tensor) -> Tensor:
        """Clip x in place to `clip` times the root mean square of each bucket."""
        if self.clip is None:
            return x
        full = x.numel() - x.numel() % self.bucket
        for rows in (x[:full].view(-1, self.bucket), x[full:].view(1, -1)):
            if rows.numel():
                limit = self.clip * rows.shape[1] ** -0.5 * _norms(rows)
                rows.clamp_(-limit, limit)
        return x


def _norms(rows: Tensor) -> Tensor:
    """Return the Euclidean norm of each row; in float64, which is slow, if squares exceed the range of float32."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    unsure = ((norms < 1e-15) | (norms > 1e18)).flatten()
    if bool(unsure.any()):
        norms[unsure] = torch.linalg.vector_norm(rows[unsure], dim=1, keepdim=True, dtype=torch.float64).to(norms.dtype)
    return norms
