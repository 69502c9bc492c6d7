"""Error feedback around another codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from stretto.codecs.base import SINGLE_WORKER, Codec, CodecContext, refuse_not_finite
from stretto.codecs.sparsifier import Sparsifier
from stretto.codecs.wrapper import WrappingCodec
from stretto.collective_ops import CollectiveCoroutine
from stretto.errors import RecipeError, explain
from stretto.lazy_torch import torch
from stretto.spec import Range
from stretto.state import State

if TYPE_CHECKING:
    from torch import Tensor


class ResidualState(State):
    """State of `error_feedback`: the residual, and the state of the codec inside."""

    def __init__(self, like: Tensor, inner: Any) -> None:
        self.residual = torch.zeros_like(like)
        self.inner = inner


@dataclass(frozen=True, repr=False)
class error_feedback(WrappingCodec):
    """Add the part that was not sent to the next input: a = decay * e + x;  send C(a);  e = a - C(a).

    With decay = 1 nothing is lost: over any number of rounds, decoded numbers and residual sum to the inputs, exactly
    for sparsifiers, up to rounding for quantizers. A `decay` below 1 shrinks the residual in each round (SparseLoCo:
    0.95). For every contraction C, the asymptotic rate of convergence is that of exact exchanges.

    Cost: that of the codec. Memory: one tensor of the input's size. Codecs with their own residual are refused.
    """

    codec: Codec
    decay: Annotated[float, Range(above=0, most=1)] = 1.0

    papers = ("Seide et al. 2014", "Karimireddy et al. 2019 (1901.09847)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.codec.keeps_residual:
            raise _refused(self.codec, "which keeps its own residual", str(self.codec))
        if isinstance(self.codec, Sparsifier) and self.codec.overshoots:
            why = "which sends more than its input, so that the residual would grow"
            raise _refused(self.codec, why, "error_feedback(random_k(0.01))")

    @property
    def inner(self) -> Codec:
        return self.codec

    @property
    def keeps_residual(self) -> bool:
        return True

    @property
    def conserves(self) -> bool:
        """True if nothing is dropped on purpose."""
        return self.decay == 1 and getattr(self.codec, "conserves", True)

    def sources(self) -> tuple[str, ...]:
        return (*self.papers, *self.codec.sources())

    def init_state(self, like: Tensor, context: CodecContext = SINGLE_WORKER) -> ResidualState:
        return ResidualState(like, self.codec.init_state(like, context))

    def residual(self, state: ResidualState) -> Tensor:
        return state.residual

    def add_residual(self, state: ResidualState, residual: Tensor) -> None:
        state.residual.add_(residual)

    def average(self, x: Tensor, state: ResidualState, residual: Tensor | None = None) -> CollectiveCoroutine:
        self._fade(x, state)
        return (yield from self.codec.average(x, state.inner, residual=state.residual))

    def encode(self, x: Tensor, state: ResidualState) -> Tensor:
        self._fade(x, state)
        return self.codec.encode_with_residual(x, state.residual, state.inner)

    def _fade(self, x: Tensor, state: ResidualState) -> None:
        if self.decay != 1:
            refuse_not_finite(x, self)
            state.residual.mul_(self.decay)


def _refused(codec: Codec, why: str, to_type: str) -> RecipeError:
    return RecipeError(
        explain(
            f"error_feedback can't be around {codec}, {why}",
            got=f"error_feedback({codec})",
            expected="a lossy codec without a residual of its own",
            to_type=to_type,
        )
    )
