"""Top-k of every chunk, with values of few bits (SparseLoCo)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from stretto import kernels
from stretto.codecs.sparsifier import Sparsifier, aligned, without_zeros
from stretto.lazy_torch import torch
from stretto.spec import Range

if TYPE_CHECKING:
    from torch import Tensor

MOST = (2 - 2**-7) * 2.0**127


@dataclass(frozen=True, repr=False)
class chunked(Sparsifier):
    """Send the `k` largest numbers of every `chunk`, their values in `bits` bits; SparseLoCo's encoding.

    bits = 2: the sign, and which of two magnitudes: the means of those of the chunk's k that lie above the middle of
    their least and largest, and of the others, as bfloat16. bits = 4, 8: sign * level * m / s, the nearest of
    s = 2^(bits-1) - 1 levels of the chunk's largest magnitude m (float32). bits = 32: exact values.
    Inside `error_feedback` the residual contains rounding errors and the numbers that were not chosen.

    Cost: about log2(chunk/k) + 1.5 + bits bits for each number sent, and 4 bytes a chunk: with the defaults 0.52% of
    float32's bytes.
    """

    chunk: Annotated[int, Range(least=1)] = 4096
    k: Annotated[int, Range(least=1)] = 64
    bits: Literal[2, 4, 8, 32] = 2

    papers = ("Sarfi et al. 2025 (2508.15706)",)

    @property
    def values_exact(self) -> bool:
        return self.bits == 32

    def contraction(self, n: int) -> float | None:
        """Return the delta of `||a - C(a)||^2 <= (1 - delta) ||a||^2`; None if values are rounded."""
        return min(1.0, self.k / min(n, self.chunk)) if self.bits == 32 and n else None

    def select(self, x: Tensor, residual: Tensor | None, state: Any) -> tuple[Tensor, Tensor]:
        return without_zeros(*kernels.on(x).take_largest_per_chunk(x, residual, self.chunk, self.k))

    def max_values(self, n: int) -> int:
        return n // self.chunk * min(self.k, self.chunk) + min(self.k, n % self.chunk)

    def encode_values(self, values: Tensor, indices: Tensor, state: Any) -> Tensor:
        if self.bits == 32:
            return values
        chunks, sizes = self._chunks(indices), values.abs().clamp(max=MOST).float()
        scales, codes = self._magnitudes(sizes, chunks) if self.bits == 2 else self._levels(sizes, chunks)
        codes |= (values < 0).to(torch.uint8) << self.bits - 1
        return torch.cat([scales.view(torch.uint8), packed(codes, self.bits)])

    def decode_values(self, encoded: Tensor, indices: Tensor, like: Tensor) -> Tensor:
        if self.bits == 32:
            return super().decode_values(encoded, indices, like)
        chunks = self._chunks(indices)
        count = int(chunks[-1]) + 1 if indices.numel() else 0
        self.check_length(encoded, 4 * count + (like.numel() * self.bits + 7) // 8)
        codes = unpacked(encoded[4 * count :], self.bits)[: like.numel()]
        sizes = (codes & (1 << self.bits - 1) - 1).long()
        if self.bits == 2:
            magnitudes = aligned(encoded[: 4 * count], torch.bfloat16)[2 * chunks + sizes].to(like.dtype)
        else:
            steps = aligned(encoded[: 4 * count], torch.float32) / self._most_level
            magnitudes = (sizes * steps[chunks]).to(like.dtype)
        return torch.where(codes >> self.bits - 1 == 1, -magnitudes, magnitudes)

    def value_bytes(self, count: int, like: Tensor) -> int:
        if self.bits == 32:
            return count * like.element_size()
        return 4 * -(-like.numel() // self.chunk) + (count * self.bits + 7) // 8

    def value_dtype(self, like: Tensor) -> torch.dtype:
        return like.dtype if self.bits == 32 else torch.uint8

    @property
    def _most_level(self) -> int:
        return (1 << self.bits - 1) - 1

    def _chunks(self, indices: Tensor) -> Tensor:
        """Return the number of each entry's chunk, counted among chunks with entries."""
        return cast("Tensor", torch.unique_consecutive(indices // self.chunk, return_inverse=True)[1])

    def _magnitudes(self, sizes: Tensor, chunks: Tensor) -> tuple[Tensor, Tensor]:
        count = int(chunks[-1]) + 1 if sizes.numel() else 0
        largest = sizes.new_zeros(count).scatter_reduce(0, chunks, sizes, "amax")
        smallest = sizes.new_full((count,), MOST).scatter_reduce(0, chunks, sizes, "amin")
        high = sizes > (smallest / 2 + largest / 2)[chunks]
        group = 2 * chunks + high
        sums = sizes.new_zeros(2 * count, dtype=torch.float64).index_add_(0, group, sizes.double())
        means = sums / group.bincount(minlength=2 * count).clamp(min=1)
        return means.clamp(max=MOST).bfloat16(), high.to(torch.uint8)

    def _levels(self, sizes: Tensor, chunks: Tensor) -> tuple[Tensor, Tensor]:
        count = int(chunks[-1]) + 1 if sizes.numel() else 0
        largest = sizes.new_zeros(count).scatter_reduce(0, chunks, sizes, "amax")
        shares = torch.nan_to_num(sizes / largest[chunks])
        return largest, (shares * self._most_level).round().to(torch.uint8)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (uint8) of 2, 4 or 8 bits into bytes, the first in the lowest bits, padded with zeros."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (torch.nn.functional.pad(codes, (0, -codes.numel() % (8 // bits))).view(-1, 8 // bits) << shifts).sum(
        1, dtype=torch.uint8
    )


def unpacked(encoded: Tensor, bits: int) -> Tensor:
    """Unpack the codes in bytes."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=encoded.device)
    return (encoded[:, None] >> shifts & (1 << bits) - 1).view(-1)
