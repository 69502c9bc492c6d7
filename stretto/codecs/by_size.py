"""A choice among codecs: large parameters in one encoding, small ones in another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from stretto.codecs.base import SINGLE_WORKER, Block, Codec, CodecContext, refuse_not_finite
from stretto.codecs.exact import exact
from stretto.collective_ops import CollectiveCoroutine
from stretto.errors import RecipeError, explain
from stretto.lazy_torch import torch
from stretto.spec import Range
from stretto.state import State

if TYPE_CHECKING:
    from torch import Tensor


class Placed(Codec):
    """Base of the codecs that look at the parameters' places and shapes: what they say depends on these."""

    def bytes_of(self, x: Tensor, context: CodecContext = SINGLE_WORKER) -> int:
        """The bytes that a worker says about a range with these parameters."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class by_size(Placed):
    """Parameters of at least `least` numbers go through `large`, all others through `small`.

    Biases and norms are few numbers of great weight: sent exactly they cost next to nothing. Each class is one flat
    tensor with one conversation, the large ones first. More classes are nested:
    `by_size(low_rank(2), by_size(quantise(8), least=256), least=65536)`. Where nothing is known of the parameters, the
    whole range counts as one. Cost: that of both, and one copy of the numbers there and back.
    """

    large: Codec
    small: Codec = exact()
    least: Annotated[int, Range(least=1)] = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        for codec in (self.large, self.small):
            if codec.needs_theta:
                raise RecipeError(
                    explain(
                        f"{codec} looks at how the parameters of the whole range move, not of a part of it",
                        got=str(self),
                        expected="codecs that look only at what is exchanged",
                        to_type=f"{codec}, or by_size(top_k(0.01))",
                    )
                )

    @property
    def fixed_size(self) -> bool:
        return self.large.fixed_size and self.small.fixed_size

    @property
    def keeps_residual(self) -> bool:
        return self.large.keeps_residual or self.small.keeps_residual

    @property
    def conserves(self) -> bool:
        """Whether neither of the two loses anything on purpose."""
        return conserves(self.large) and conserves(self.small)

    def sources(self) -> tuple[str, ...]:
        return self.large.sources() + self.small.sources()

    def init_state(self, like: Tensor, context: CodecContext = SINGLE_WORKER) -> list[PartState]:
        return [PartState(codec, runs, like, context) for codec, runs in self._classes(like, context)]

    def average(self, x: Tensor, state: Any, residual: Tensor | None = None) -> CollectiveCoroutine:
        refuse_not_finite(x, self)
        parts: list[PartState] = state
        results, debts = [], []
        for part in parts:
            debt = None if residual is None else part.gather(residual)
            results.append((yield from part.codec.average(part.gather(x), part.state, debt)))
            debts.append(debt)
        for part, result, debt in zip(parts, results, debts, strict=True):
            part.scatter(result, x)
            if residual is not None and debt is not None:
                part.scatter(debt, residual)
        return x

    def residual(self, state: Any) -> Tensor | None:
        parts: list[PartState] = state
        kept = [(part, residual) for part in parts if (residual := part.codec.residual(part.state)) is not None]
        if not kept:
            return None
        whole = kept[0][1].new_zeros(kept[0][0].whole)
        for part, residual in kept:
            part.scatter(residual, whole)
        return whole

    def add_residual(self, state: Any, residual: Tensor) -> None:
        parts: list[PartState] = state
        for part in parts:
            part.codec.add_residual(part.state, part.gather(residual))

    def bytes_of(self, x: Tensor, context: CodecContext = SINGLE_WORKER) -> int:
        parts = self.init_state(x, context)
        return sum(bytes_in(part.codec, part.gather(x), part.context) for part in parts)

    def _classes(self, like: Tensor, context: CodecContext) -> list[tuple[Codec, list[Block]]]:
        """The codecs with the parameters that go through them, without those that have none."""
        blocks = context.blocks or [Block("", 0, like.numel(), (like.numel(),))]
        large = [block for block in blocks if block.stop - block.start >= self.least]
        small = [block for block in blocks if block.stop - block.start < self.least]
        return [(codec, its) for codec, its in ((self.large, large), (self.small, small)) if its]


class PartState(State):
    """The parameters of one class as one flat tensor: their places in the range, and the state of their codec."""

    transient = ("codec", "whole", "runs", "context")

    def __init__(self, codec: Codec, blocks: Sequence[Block], like: Tensor, context: CodecContext) -> None:
        self.codec, self.whole = codec, like.numel()
        self.runs = _merged(blocks)
        self.context = replace(context, blocks=_moved_up(blocks) if context.blocks else (), theta=None)
        self.state = codec.init_state(self.gather(like), self.context)

    def gather(self, flat: Tensor) -> Tensor:
        """Its numbers: of one run a view, otherwise a copy."""
        pieces = [flat[run.start : run.stop] for run in self.runs]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def scatter(self, numbers: Tensor, flat: Tensor) -> None:
        """Put its numbers back."""
        for run, piece in zip(self.runs, torch.split(numbers, [len(run) for run in self.runs]), strict=True):
            flat[run.start : run.stop] = piece


def conserves(codec: Codec) -> bool:
    """Whether nothing is lost on purpose: whatever is not carried is owed."""
    return bool(getattr(codec, "conserves", not codec.keeps_residual))


def bytes_in(codec: Codec, x: Tensor, context: CodecContext) -> int:
    """What a codec declares for a range with known parameters."""
    return codec.bytes_of(x, context) if isinstance(codec, Placed) else codec.bytes_of(x)


def _merged(blocks: Sequence[Block]) -> list[range]:
    """The runs of numbers that the blocks cover."""
    runs: list[range] = []
    for block in blocks:
        if runs and runs[-1].stop == block.start:
            runs[-1] = range(runs[-1].start, block.stop)
        else:
            runs.append(range(block.start, block.stop))
    return runs


def _moved_up(blocks: Sequence[Block]) -> list[Block]:
    """The blocks as they lie when there is nothing between them."""
    moved, at = [], 0
    for block in blocks:
        length = block.stop - block.start
        moved.append(replace(block, start=at, stop=at + length))
        at += length
    return moved
