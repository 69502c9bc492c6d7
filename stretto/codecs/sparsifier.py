"""Base of codecs that send some of the numbers; they differ in the rule that selects them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

from stretto import kernels
from stretto.codecs.base import SingleRound, refuse_not_finite
from stretto.collective_ops import AllReduceMean, CollectiveCoroutine
from stretto.errors import TransportError
from stretto.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


class Sparsifier(SingleRound):
    """Base of sparsifiers: a message holds indices (`stretto.kernels.reference.index_coding`), then values.

    A subclass selects; it may also override how indices (`encode_indices`, `decode_indices`) and values
    (`encode_values`, `decode_values`) are encoded. If nothing is selected, the message is empty. Cost: 7 to 10 bits an
    index for 1% to 0.1% of the numbers, and the bytes of the values.
    """

    fixed_size = False

    @property
    def linear(self) -> bool:
        """True if all workers select the same indices, so that an all-reduce can add their values."""
        return False

    @property
    def values_exact(self) -> bool:
        """True if the selected values are sent unchanged."""
        return True

    @property
    def exact_split(self) -> bool:
        """True if each number is decoded exactly or left whole in the residual, so that both sum to the input."""
        return self.values_exact

    @property
    def overshoots(self) -> bool:
        """True if it sends more than the input, to be unbiased."""
        return False

    def select(self, x: Tensor, residual: Tensor | None, state: Any) -> tuple[Tensor, Tensor]:
        """Return (indices (k,) int32 ascending, values (k,)) of `residual + x`; `residual` becomes the rest."""
        raise NotImplementedError

    def max_values(self, n: int) -> int:
        """Return the maximum of selected numbers out of n."""
        return n

    def encode_indices(self, indices: Tensor, like: Tensor, state: Any) -> Tensor:
        """Return the encoded indices into `like`."""
        return cast("Tensor", kernels.on(like).pack_indices(indices, like.numel()))

    def decode_indices(self, message: Tensor, like: Tensor) -> tuple[Tensor, int]:
        """Return the indices in a message and their length in bytes. Raises TransportError for a malformed message."""
        try:
            indices, used = kernels.on(like).unpack_indices(message, like.numel())
        except ValueError as error:
            raise TransportError(f"a message of another worker is not in the encoding {self}: {error}") from error
        return indices, used

    def encode_values(self, values: Tensor, indices: Tensor, state: Any) -> Tensor:
        """Return the encoded values at these indices."""
        return values

    def decode_values(self, encoded: Tensor, indices: Tensor, like: Tensor) -> Tensor:
        """Return the values in the bytes after the indices, in the shape and dtype of `like`."""
        self.check_length(encoded, like.nbytes)
        return aligned(encoded, like.dtype)

    def value_bytes(self, count: int, like: Tensor) -> int:
        """Return the maximum of bytes of `encode_values` for this count of numbers of `like`."""
        return count * like.element_size()

    def check_length(self, encoded: Tensor, nbytes: int) -> None:
        """Raise TransportError unless `nbytes` bytes follow the indices."""
        if encoded.numel() != nbytes:
            raise TransportError(
                f"a message of another worker is not in the encoding {self}: "
                f"{encoded.numel()} bytes follow the indices, expected {nbytes}"
            )

    def encode(self, x: Tensor, state: Any) -> Tensor:
        refuse_not_finite(x, self)
        indices, values = self.select(x, None, state)
        return self._message(indices, self.encode_values(values, indices, state), x, state)

    def encode_with_residual(self, x: Tensor, residual: Tensor, state: Any) -> Tensor:
        refuse_not_finite(x, self)
        indices, values = self.select(x, residual, state)
        encoded = self.encode_values(values.clone(), indices, state)
        if not self.values_exact:
            errors = values - self.decode_values(encoded.view(torch.uint8), indices, torch.empty_like(values))
            kernels.on(residual).add_at(residual, indices, errors)
        return self._message(indices, encoded, x, state)

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        self.add_to(like.zero_(), message)
        return like

    def add_to(self, total: Tensor, message: Tensor) -> None:
        indices, used = self.decode_indices(message, total)
        values = self.decode_values(message[used:], indices, total.new_empty(indices.numel()))
        kernels.on(total).add_at(total, indices, values)

    def exchange(self, message: Tensor, like: Tensor) -> CollectiveCoroutine:
        if not self.linear:
            return (yield from super().exchange(message, like))
        indices, used = self.decode_indices(message, like)
        summed = cast("Tensor", (yield AllReduceMean(aligned(message[used:], self.value_dtype(like)))))
        values = self.decode_values(summed.view(torch.uint8), indices, like.new_empty(indices.numel()))
        kernels.on(like).add_at(like.zero_(), indices, values)
        return like

    def value_dtype(self, like: Tensor) -> torch.dtype:
        """Return the dtype of encoded values."""
        return like.dtype

    def values_sent(self, message: Tensor, like: Tensor) -> int:
        return self.decode_indices(message, like)[0].numel()

    def bytes_of(self, x: Tensor) -> int:
        count = self.max_values(x.numel())
        return self.max_index_bytes(count, x.numel()) + self.value_bytes(count, x)

    def max_index_bytes(self, count: int, n: int) -> int:
        """Return the maximum of bytes of `encode_indices` for at most this count of n indices."""
        if count == 0 or count == n:
            return (n + 14) // 8 if count else 0
        rice = min(count * (low + 1) + (n - count >> low) for low in range(31))
        head = 1 + math.ceil(count.bit_length() / 7)
        return min(head + (rice + 7) // 8, 1 + (n + 7) // 8)

    def _message(self, indices: Tensor, encoded: Tensor, like: Tensor, state: Any) -> Tensor:
        if indices.numel() == 0:
            return torch.empty(0, dtype=torch.uint8, device=like.device)
        return torch.cat([self.encode_indices(indices, like, state), encoded.view(torch.uint8)])


def aligned(encoded: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as numbers of a dtype, whatever their alignment."""
    return encoded.clone().view(dtype)


def share_of(ratio: float, n: int) -> int:
    """Return the count of a share of n numbers, rounded up: at least one unless n is 0."""
    return min(n, math.ceil(round(ratio * n, 6))) or min(n, 1)


def without_zeros(indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries without zero values, which need not be sent."""
    if bool(values.all()):
        return indices, values
    is_nonzero = values != 0
    return indices[is_nonzero], values[is_nonzero]
