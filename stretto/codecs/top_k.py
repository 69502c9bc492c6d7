"""Top-k sparsification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from stretto import kernels
from stretto.codecs.sparsifier import Sparsifier, share_of, without_zeros
from stretto.spec import Range

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class top_k(Sparsifier):
    """Send the k = ceil(ratio * n) numbers of largest magnitude, exactly, with their indices.

    Selects from all n numbers of a range, or with `chunk` k = ceil(ratio * chunk) of every `chunk` numbers. Of equal
    numbers the first are taken; zeros are not sent. A contraction: ||a - C(a)||^2 <= (1 - k/n) ||a||^2. Use it inside
    `error_feedback`, which keeps the other numbers as a residual.

    Cost: k (4 bytes + about log2(n/k) + 1.5 bits) for float32: 1.25% of the bytes for ratio = 0.01.
    """

    ratio: Annotated[float, Range(above=0, most=1)]
    chunk: Annotated[int, Range(least=1)] | None = None

    papers = ("Stich et al. 2018 (1809.07599)",)

    def select(self, x: Tensor, residual: Tensor | None, state: Any) -> tuple[Tensor, Tensor]:
        kernel, n = kernels.on(x), x.numel()
        if self.chunk is None:
            return without_zeros(*kernel.take_largest(x, residual, share_of(self.ratio, n)))
        return without_zeros(*kernel.take_largest_per_chunk(x, residual, self.chunk, share_of(self.ratio, self.chunk)))

    def max_values(self, n: int) -> int:
        return share_of(self.ratio, n) if self.chunk is None else per_chunk(n, self.chunk, self.ratio)

    def contraction(self, n: int) -> float:
        """Return the delta of `||a - C(a)||^2 <= (1 - delta) ||a||^2`: the smallest share that a chunk sends."""
        chunk = self.chunk or n
        return min(1.0, share_of(self.ratio, chunk) / min(n, chunk)) if n else 1.0


def per_chunk(n: int, chunk: int, ratio: float) -> int:
    """Return how many of n numbers are sent if a share of every chunk is."""
    k = share_of(ratio, chunk)
    return n // chunk * k + min(k, n % chunk)
