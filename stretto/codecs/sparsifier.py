"""Codecs that speak of some of the numbers: which ones is what they differ in."""

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
    """Base of the codecs that select: a message says where (`stretto.kernels.reference.index_coding`) and what.

    A subclass selects; it may also say otherwise where (`tell`, `told`) and what (`say`, `hear`). Nothing to say is a
    message of no bytes. Cost: 7 to 10 bits a place for 1% to 0.1% of the numbers, and the bytes of the values.
    """

    fixed_size = False

    @property
    def linear(self) -> bool:
        """Whether all workers speak of the same numbers, so that their values may be summed on the way."""
        return False

    @property
    def values_exact(self) -> bool:
        """Whether the values that were selected are said as they are."""
        return True

    @property
    def exact_split(self) -> bool:
        """Whether every number is carried exactly or owed wholly: what is carried and what is owed are the input."""
        return self.values_exact

    @property
    def overshoots(self) -> bool:
        """Whether it says more than there is, to be right in the mean."""
        return False

    def select(self, x: Tensor, residual: Tensor | None, state: Any) -> tuple[Tensor, Tensor]:
        """(indices (k,) int32 ascending, values (k,)) of `owed + x`; `owed` becomes what is left."""
        raise NotImplementedError

    def max_values(self, n: int) -> int:
        """The most numbers of n that it selects."""
        return n

    def encode_indices(self, indices: Tensor, like: Tensor, state: Any) -> Tensor:
        """Bytes that say which places of `like` are meant."""
        return cast("Tensor", kernels.on(like).pack_indices(indices, like.numel()))

    def decode_indices(self, message: Tensor, like: Tensor) -> tuple[Tensor, int]:
        """Return the indices in a message and their length in bytes. Raises TransportError for a malformed message."""
        try:
            indices, used = kernels.on(like).unpack_indices(message, like.numel())
        except ValueError as error:
            raise TransportError(f"a message of another worker is not in the encoding {self}: {error}") from error
        return indices, used

    def encode_values(self, values: Tensor, indices: Tensor, state: Any) -> Tensor:
        """The values at these places as a message."""
        return values

    def decode_values(self, said: Tensor, indices: Tensor, like: Tensor) -> Tensor:
        """The values in the bytes behind the places, of the shape and dtype of `like`."""
        self.check_length(said, like.nbytes)
        return aligned(said, like.dtype)

    def value_bytes(self, entries: int, like: Tensor) -> int:
        """The most bytes that `say` says about so many of the numbers of `like`."""
        return entries * like.element_size()

    def check_length(self, said: Tensor, nbytes: int) -> None:
        """Raise TransportError unless so many bytes follow the places."""
        if said.numel() != nbytes:
            raise TransportError(
                f"a message of another worker is not in the encoding {self}: "
                f"{said.numel()} bytes follow the places, and {nbytes} should"
            )

    def encode(self, x: Tensor, state: Any) -> Tensor:
        refuse_not_finite(x, self)
        indices, values = self.select(x, None, state)
        return self._message(indices, self.encode_values(values, indices, state), x, state)

    def encode_with_residual(self, x: Tensor, residual: Tensor, state: Any) -> Tensor:
        refuse_not_finite(x, self)
        indices, values = self.select(x, residual, state)
        said = self.encode_values(values.clone(), indices, state)
        if not self.values_exact:
            left = values - self.decode_values(said.view(torch.uint8), indices, torch.empty_like(values))
            kernels.on(residual).add_at(residual, indices, left)
        return self._message(indices, said, x, state)

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
        """The dtype of what `say` says."""
        return like.dtype

    def values_sent(self, message: Tensor, like: Tensor) -> int:
        return self.decode_indices(message, like)[0].numel()

    def bytes_of(self, x: Tensor) -> int:
        entries = self.max_values(x.numel())
        return self.max_index_bytes(entries, x.numel()) + self.value_bytes(entries, x)

    def max_index_bytes(self, entries: int, n: int) -> int:
        """The most bytes that `tell` says about at most so many of n places."""
        if entries == 0 or entries == n:
            return (n + 14) // 8 if entries else 0
        rice = min(entries * (low + 1) + (n - entries >> low) for low in range(31))
        head = 1 + math.ceil(entries.bit_length() / 7)
        return min(head + (rice + 7) // 8, 1 + (n + 7) // 8)

    def _message(self, indices: Tensor, said: Tensor, like: Tensor, state: Any) -> Tensor:
        if indices.numel() == 0:
            return torch.empty(0, dtype=torch.uint8, device=like.device)
        return torch.cat([self.encode_indices(indices, like, state), said.view(torch.uint8)])


def aligned(said: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers of this dtype, wherever they begin."""
    return said.clone().view(dtype)


def share_of(ratio: float, n: int) -> int:
    """How many of n numbers are this share: rounded up, so at least one of those that there are."""
    return min(n, math.ceil(round(ratio * n, 6))) or min(n, 1)


def without_zeros(indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The same entries but for those that are zero: nobody misses them."""
    if bool(values.all()):
        return indices, values
    kept = values != 0
    return indices[kept], values[kept]
