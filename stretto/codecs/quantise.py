"""Quantisation to levels of each bucket's norm (QSGD)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from stretto import kernels
from stretto.codecs.base import SINGLE_WORKER, Codec, CodecContext, SingleRound, refuse_not_finite
from stretto.errors import TransportError
from stretto.lazy_torch import torch
from stretto.spec import Range
from stretto.state import State

if TYPE_CHECKING:
    from torch import Tensor

NUMBERS_A_BYTE = {127: 1, 7: 2, 1: 5}


@dataclass(frozen=True, repr=False)
class quantise(SingleRound):
    """QSGD: every number is rounded to a whole number of levels of its bucket's norm.

        carried_i = sign(a_i) * xi_i * norm(a) / s ,  xi_i = floor(s * |a_i| / norm(a) + u_i) ,  s = 2^(bits - 1) - 1

    u_i is uniform in [0, 1), which is unbiased (`stochastic`), or 1/2, which rounds to the nearest level. The
    norm is the largest magnitude among `bucket` numbers, or the Euclidean norm of these. Cost: bits/8 bytes a number
    (1/5 with 2 bits, which hold -1, 0 or 1) and 4 a bucket; one pass over the numbers. A number is off by less than
    norm / s, by half of that when rounded to the nearest.
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
        return self._message(x, None, state)

    def encode_with_residual(self, x: Tensor, residual: Tensor, state: Any) -> Tensor:
        return self._message(x, residual, state)

    def _message(self, x: Tensor, residual: Tensor | None, state: RoundSeeds | None) -> Tensor:
        refuse_not_finite(x, self)
        seed = state.seed() if state else None
        packed, scales = kernels.on(x).quantise(x, residual, self.levels, self.bucket, self.norm, seed)
        return joined(scales, packed)

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        self.add_to(like.zero_(), message)
        return like

    def add_to(self, total: Tensor, message: Tensor) -> None:
        if message.numel():
            scales, packed = parted(message, *self.lengths(total.numel()), self)
            kernels.on(total).add_quantised(total, packed, scales, self.levels, self.bucket)

    def values_sent(self, message: Tensor, like: Tensor) -> int:
        return like.numel() if message.numel() else 0

    def bytes_of(self, x: Tensor) -> int:
        scales, packed = self.lengths(x.numel())
        return 4 * scales + packed

    def lengths(self, numbers: int) -> tuple[int, int]:
        """Return the number of scales and of bytes of levels in a message about this count of numbers."""
        return -(-numbers // self.bucket), -(-numbers // NUMBERS_A_BYTE[self.levels])


class RoundSeeds(State):
    """Number of rounds of one worker, and a seed for each."""

    transient = ("_of",)

    def __init__(self, context: CodecContext) -> None:
        self._of = f"{context.seed} {context.worker}"
        self.round = 0

    def seed(self) -> int:
        """Return the next round's seed: a 32-bit hash of the run's seed, the worker and the round."""
        self.round += 1
        mixed = hashlib.blake2b(f"{self._of} {self.round}".encode(), digest_size=4)
        return int.from_bytes(mixed.digest(), "little")


def joined(scales: Tensor, packed: Tensor) -> Tensor:
    """Return one message: float32 scales, then packed bytes."""
    return torch.cat([scales.flatten().view(torch.uint8), packed])


def parted(message: Tensor, scales: int, packed: int, codec: Codec) -> tuple[Tensor, Tensor]:
    """Return the scales and packed bytes of a message. Raise TransportError if its length is wrong."""
    if message.dtype != torch.uint8 or message.numel() != 4 * scales + packed:
        raise TransportError(
            f"a message of another worker is not in the encoding {codec}: {message.numel()} numbers of "
            f"{str(message.dtype).removeprefix('torch.')}, expected {4 * scales + packed} bytes"
        )
    return message[: 4 * scales].clone().view(torch.float32), message[4 * scales :]
