"""Fixed-magnitude sparsification by a threshold (Strom)."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

from stretto import kernels
from stretto.codecs.base import SINGLE_WORKER, CodecContext
from stretto.codecs.sparsifier import Sparsifier, aligned
from stretto.errors import RecipeError, explain
from stretto.lazy_torch import torch
from stretto.spec import Range
from stretto.state import State

if TYPE_CHECKING:
    from torch import Tensor

FACTOR = 2 ** (1 / 20)
SMALLEST, LARGEST = 2.0**-100, 2.0**100
CLIP_EVERY = 5


class ThresholdState(State):
    """State of `threshold`: this worker's tau, and the number of rounds."""

    def __init__(self, tau: float) -> None:
        self.tau = tau
        self.round = 0


@dataclass(frozen=True, repr=False)
class threshold(Sparsifier):
    """Send +-tau where |a| >= tau: indices and a sign bit each, for use inside `error_feedback`.

    r += x;  where |r_i| >= tau: sent_i = sign(r_i) tau;  r -= sent  (Strom 2015)

    `adaptive` (Deeplearning4j): tau is multiplied by 2^(1/20) after a round in which more than `most` of the numbers
    were sent and divided by it after one with less than `least`, so it doubles or halves in 20 rounds; each worker has
    its own, which its messages carry. `clip`: every 5th round the residual is clipped to +-clip * tau after sending;
    the excess is dropped on purpose. Indices are sent as a bitmap if that is shorter.

    Cost: about log2(n/k) + 2.5 bits for each of the k sent, and 4 bytes; at most 2 bits a number; 0 where none is sent.
    """

    tau: Annotated[float, Range(least=1e-30, most=1e30)]
    adaptive: bool = False
    least: Annotated[float, Range(least=0, most=1)] = 1e-4
    most: Annotated[float, Range(least=0, most=1)] = 1e-2
    clip: Annotated[float, Range(least=1)] | None = None

    papers = ("Strom 2015",)
    exact_split = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.most:
            raise RecipeError(
                explain(
                    "threshold can't keep the share of sent entries between these two",
                    got=f"least={self.least:g}, most={self.most:g}",
                    expected="least at most as large as most",
                    to_type=f"threshold({self.tau:g}, adaptive=True, least={self.most:g}, most={self.least:g})",
                )
            )

    @property
    def encodes_parts_alike(self) -> bool:
        return not self.adaptive

    @property
    def conserves(self) -> bool:
        """True if decoded numbers and residual sum to the input."""
        return self.clip is None

    def init_state(self, like: Tensor, context: CodecContext = SINGLE_WORKER) -> ThresholdState:
        return ThresholdState(self.tau)

    def select(self, x: Tensor, residual: Tensor | None, state: ThresholdState) -> tuple[Tensor, Tensor]:
        tau = x.new_tensor(float(torch.tensor(state.tau, dtype=torch.float32, device="cpu")))
        indices, negative = kernels.on(x).take_threshold(x, residual, float(tau))
        state.round += 1
        if self.clip is not None and residual is not None and state.round % CLIP_EVERY == 0:
            residual.clamp_(-self.clip * state.tau, self.clip * state.tau)
        if self.adaptive and x.numel():
            state.tau = self._next(state.tau, indices.numel() / x.numel())
        return indices, torch.where(negative.bool(), -tau, tau)

    def _next(self, tau: float, share: float) -> float:
        factor = FACTOR if share > self.most else 1 / FACTOR if share < self.least else 1.0
        return min(max(tau * factor, SMALLEST), LARGEST)

    def encode_values(self, values: Tensor, indices: Tensor, state: ThresholdState) -> Tensor:
        return torch.cat([values[:1].abs().float().view(torch.uint8), _bits().pack_bits((values < 0).to(torch.uint8))])

    def decode_values(self, encoded: Tensor, indices: Tensor, like: Tensor) -> Tensor:
        self.check_length(encoded, self.value_bytes(like.numel(), like))
        tau = aligned(encoded[:4], torch.float32).to(like.dtype)
        return torch.where(_bits().unpack_bits(encoded[4:])[: like.numel()].bool(), -tau, tau)

    def value_bytes(self, count: int, like: Tensor) -> int:
        return 4 + (count + 7) // 8 if count else 0

    def value_dtype(self, like: Tensor) -> torch.dtype:
        return torch.uint8

    def max_index_bytes(self, count: int, n: int) -> int:
        return 1 + (n + 7) // 8 if n else 0


def _bits() -> ModuleType:
    """Return the module that packs signs on any device, imported on first use."""
    from stretto.kernels.reference import index_coding

    return index_coding
