"""Random sparsification with the same indices at all workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, cast

from stretto.codecs.base import SINGLE_WORKER, CodecContext
from stretto.codecs.sparsifier import Sparsifier, share_of
from stretto.lazy_torch import torch
from stretto.spec import Range
from stretto.state import State

if TYPE_CHECKING:
    from torch import Tensor

HEAD = 8
"""Bytes of the round's number at the start of a message."""


class RoundCounter(State):
    """Number of rounds so far, equal at all workers."""

    replicated = ("round",)

    def __init__(self) -> None:
        self.round = 0


@dataclass(frozen=True, repr=False)
class random_k(Sparsifier):
    """Send k = ceil(ratio * n) numbers at indices that all workers draw from `seed` and the round's number.

    No indices are sent, and an all-reduce adds the values, which gives the exact mean of the chosen entries.
    ||a - C(a)||^2 = (1 - k/n) ||a||^2 in expectation. `unbiased`: values are multiplied by n / k, so that the
    expectation of the decoded message is a; not inside `error_feedback`, where it diverges.

    Cost: 4k bytes for float32 (and to a server 8 bytes for the round's number).
    """

    ratio: Annotated[float, Range(above=0, most=1)]
    seed: int = 0
    unbiased: bool = False

    papers = ("Stich et al. 2018 (1809.07599)",)
    linear = True

    @property
    def exact_split(self) -> bool:
        return not self.unbiased

    @property
    def overshoots(self) -> bool:
        return self.unbiased

    def init_state(self, like: Tensor, context: CodecContext = SINGLE_WORKER) -> RoundCounter:
        return RoundCounter()

    def select(self, x: Tensor, residual: Tensor | None, state: RoundCounter) -> tuple[Tensor, Tensor]:
        a = x if residual is None else residual.add_(x)
        indices = self._drawn(state.round, x)
        state.round += 1
        values = a[indices]
        if self.unbiased:
            values *= x.numel() / max(indices.numel(), 1)
        if residual is not None:
            residual[indices] -= values
        return indices, values

    def max_values(self, n: int) -> int:
        return share_of(self.ratio, n)

    def encode_indices(self, indices: Tensor, like: Tensor, state: RoundCounter) -> Tensor:
        return torch.tensor([state.round - 1], device=like.device).view(torch.uint8)

    def decode_indices(self, message: Tensor, like: Tensor) -> tuple[Tensor, int]:
        if message.numel() == 0:
            return message.new_empty(0, dtype=torch.int32), 0
        self.check_length(message[:HEAD], HEAD)
        return self._drawn(int(message[:HEAD].clone().view(torch.int64)), like), HEAD

    def max_index_bytes(self, count: int, n: int) -> int:
        return HEAD if count else 0

    def contraction(self, n: int) -> float | None:
        """Return the delta of `E ||a - C(a)||^2 <= (1 - delta) ||a||^2`."""
        return None if self.unbiased else share_of(self.ratio, n) / max(n, 1)

    def _drawn(self, round_: int, like: Tensor) -> Tensor:
        return drawn(like.numel(), share_of(self.ratio, like.numel()), mixed(self.seed, round_)).to(like.device)


def drawn(n: int, k: int, seed: int) -> Tensor:
    """Return k of n indices, ascending, int32, with every subset equally likely."""
    source = torch.Generator().manual_seed(seed)
    if 4 * k >= n:
        chosen = torch.randperm(n, generator=source, device="cpu")[:k]
    else:
        candidates = _distinct(torch.randint(n, (k + k // 4,), generator=source, device="cpu"))
        while candidates.numel() < k:
            candidates = _distinct(torch.cat([candidates, torch.randint(n, (k,), generator=source, device="cpu")]))
        chosen = candidates[torch.randperm(candidates.numel(), generator=source, device="cpu")[:k]]
    return chosen.sort().values.int()


def _distinct(indices: Tensor) -> Tensor:
    return cast("Tensor", torch.unique(indices))


def mixed(*numbers: int) -> int:
    """Return a 63-bit hash of the numbers (splitmix64)."""
    word, z = (1 << 64) - 1, 0
    for number in numbers:
        z = (z ^ number) + 0x9E3779B97F4A7C15 & word
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & word
        z = (z ^ z >> 27) * 0x94D049BB133111EB & word
        z ^= z >> 31
    return z >> 1
