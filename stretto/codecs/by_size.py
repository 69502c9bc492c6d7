"""Choice between two codecs by the size of parameters."""

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
    """Base of codecs whose messages depend on the places and shapes of the parameters."""

    def bytes_of(self, x: Tensor, context: CodecContext = SINGLE_WORKER) -> int:
        """Return the bytes that one worker sends for a range with these parameters."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class by_size(Placed):
    """Parameters of at least `least` numbers go through `large`, all others through `small`.

    Biases and norms are few numbers of great weight, and cost little when sent exactly. Each class is one flat tensor
    with its own coroutine, large parameters first. More classes are nested:
    `by_size(low_rank(2), by_size(quantise(8), least=256), least=65536)`. If no parameters are known, the whole range
    counts as one. Cost: that of both codecs, and two copies of the numbers.
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
                        f"{codec} compares with the moves of all parameters of a range, not of a part",
                        got=str(self),
                        expected="codecs that read only the exchanged tensor",
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
        """True if neither codec drops anything on purpose."""
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
        residuals = [(part, residual) for part in parts if (residual := part.codec.residual(part.state)) is not None]
        if not residuals:
            return None
        total = residuals[0][1].new_zeros(residuals[0][0].length)
        for part, residual in residuals:
            part.scatter(residual, total)
        return total

    def add_residual(self, state: Any, residual: Tensor) -> None:
        parts: list[PartState] = state
        for part in parts:
            part.codec.add_residual(part.state, part.gather(residual))

    def bytes_of(self, x: Tensor, context: CodecContext = SINGLE_WORKER) -> int:
        parts = self.init_state(x, context)
        return sum(bytes_in(part.codec, part.gather(x), part.context) for part in parts)

    def _classes(self, like: Tensor, context: CodecContext) -> list[tuple[Codec, list[Block]]]:
        """Return each codec with its parameters; a codec without parameters is left out."""
        blocks = context.blocks or [Block("", 0, like.numel(), (like.numel(),))]
        large = [block for block in blocks if block.stop - block.start >= self.least]
        small = [block for block in blocks if block.stop - block.start < self.least]
        return [(codec, parameters) for codec, parameters in ((self.large, large), (self.small, small)) if parameters]


class PartState(State):
    """The parameters of one class as one flat tensor: their places in the range, and the state of their codec."""

    transient = ("codec", "length", "runs", "context")

    def __init__(self, codec: Codec, blocks: Sequence[Block], like: Tensor, context: CodecContext) -> None:
        self.codec, self.length = codec, like.numel()
        self.runs = _merged(blocks)
        self.context = replace(context, blocks=_moved_up(blocks) if context.blocks else (), theta=None)
        self.state = codec.init_state(self.gather(like), self.context)

    def gather(self, flat: Tensor) -> Tensor:
        """Return the numbers of this class: a view if they are one run, else a copy."""
        slices = [flat[run.start : run.stop] for run in self.runs]
        return slices[0] if len(slices) == 1 else torch.cat(slices)

    def scatter(self, numbers: Tensor, flat: Tensor) -> None:
        """Write the numbers of this class back."""
        for run, values in zip(self.runs, torch.split(numbers, [len(run) for run in self.runs]), strict=True):
            flat[run.start : run.stop] = values


def conserves(codec: Codec) -> bool:
    """Return True if a codec drops nothing on purpose: decoded + residual is the input."""
    return bool(getattr(codec, "conserves", not codec.keeps_residual))


def bytes_in(codec: Codec, x: Tensor, context: CodecContext) -> int:
    """Return the bytes that a codec declares for a range with known parameters."""
    return codec.bytes_of(x, context) if isinstance(codec, Placed) else codec.bytes_of(x)


def _merged(blocks: Sequence[Block]) -> list[range]:
    """Return the runs of numbers that the blocks cover."""
    runs: list[range] = []
    for block in blocks:
        if runs and runs[-1].stop == block.start:
            runs[-1] = range(runs[-1].start, block.stop)
        else:
            runs.append(range(block.start, block.stop))
    return runs


def _moved_up(blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks moved next to each other."""
    moved, start = [], 0
    for block in blocks:
        length = block.stop - block.start
        moved.append(replace(block, start=start, stop=start + length))
        start += length
    return moved
