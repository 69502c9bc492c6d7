"""Messages of codecs that quantise by bucket: a scale for each bucket, then packed levels; seeds of their rounding."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from stretto.codecs.base import Codec, CodecContext
from stretto.errors import TransportError
from stretto.lazy_torch import torch
from stretto.state import State

if TYPE_CHECKING:
    from torch import Tensor

CODES_PER_BYTE = {127: 1, 7: 2, 1: 5}
"""Quantised numbers packed in one byte, by number of levels."""


class RoundSeeds(State):
    """Seeds of one worker's stochastic rounding, one per round: a counter and a hash."""

    transient = ("_seed_prefix",)

    def __init__(self, context: CodecContext) -> None:
        self._seed_prefix = f"{context.seed} {context.worker}"
        self.round = 0

    def seed(self) -> int:
        """Return the next round's seed: a 32-bit hash of the run's seed, the worker and the round."""
        self.round += 1
        digest = hashlib.blake2b(f"{self._seed_prefix} {self.round}".encode(), digest_size=4)
        return int.from_bytes(digest.digest(), "little")


def bucket_message_sizes(numbers: int, bucket: int, levels: int) -> tuple[int, int]:
    """Return the number of scales and of bytes of levels in a message about this count of numbers.

    >>> bucket_message_sizes(1000, bucket=512, levels=7)
    (2, 500)
    """
    return -(-numbers // bucket), -(-numbers // CODES_PER_BYTE[levels])


def concatenate_message(scales: Tensor, packed: Tensor) -> Tensor:
    """Return one message: float32 scales, then packed bytes."""
    return torch.cat([scales.flatten().view(torch.uint8), packed])


def split_message(message: Tensor, scales: int, packed: int, codec: Codec) -> tuple[Tensor, Tensor]:
    """Return the scales and packed bytes of a message. Raise TransportError if its length is wrong."""
    if message.dtype != torch.uint8 or message.numel() != 4 * scales + packed:
        raise TransportError(
            f"a message of another worker is not in the encoding {codec}: {message.numel()} numbers of "
            f"{str(message.dtype).removeprefix('torch.')}, expected {4 * scales + packed} bytes"
        )
    return message[: 4 * scales].clone().view(torch.float32), message[4 * scales :]
