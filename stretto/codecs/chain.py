"""Composition of a sparsifier with an encoding of the selected values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from stretto.codecs.base import SINGLE_WORKER, Codec, CodecContext
from stretto.codecs.exact import exact
from stretto.codecs.sparsifier import Sparsifier, aligned
from stretto.errors import RecipeError, TransportError, explain
from stretto.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


class ChainState(NamedTuple):
    """States of both codecs."""

    selector: Any
    encoding: Any


@dataclass(frozen=True, repr=False)
class chain(Sparsifier):
    """Send the numbers that `selector` selects, with their values encoded by `encoding`.

    Inside `error_feedback` the residual contains what either codec leaves out. After `random_k`, an all-reduce adds the
    values of a linear encoding (`cast`). GD-SEC with quantised values (QSGD-SEC) is
    `chain(difference_threshold(xi), quantise(8))`. Cost: the indices of the first and the values of the second.
    """

    selector: Codec
    encoding: Codec

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.selector, Sparsifier) or isinstance(self.selector, chain):
            raise self._refused(f"{self.selector} selects none", "chain(top_k(0.01), ...)")
        if self.selector.keeps_residual or not self.selector.values_exact:
            raise self._refused(f"{self.selector} encodes their values itself", str(self.selector))
        if not self.encoding.pair or self._unfit(self.encoding):
            raise self._refused(f"{self.encoding} can't encode them", f"chain({self.selector}, quantise(8))")

    def _unfit(self, codec: Codec) -> bool:
        return isinstance(codec, Sparsifier) or codec.keeps_residual or codec.needs_theta or codec.reply is not None

    def _refused(self, why: str, to_type: str) -> RecipeError:
        return RecipeError(
            explain(
                f"chain encodes the numbers that a codec selects, and {why}",
                got=str(self),
                expected="a sparsifier, then a pair of encode and decode without a residual",
                to_type=to_type,
            )
        )

    @property
    def _first(self) -> Sparsifier:
        assert isinstance(self.selector, Sparsifier)
        return self.selector

    @property
    def linear(self) -> bool:
        return self.selector.linear and self.encoding.linear

    @property
    def encodes_parts_alike(self) -> bool:
        return self.selector.encodes_parts_alike and self.encoding.encodes_parts_alike

    @property
    def needs_theta(self) -> bool:
        return self.selector.needs_theta

    @property
    def values_exact(self) -> bool:
        return isinstance(self.encoding, exact)

    @property
    def exact_split(self) -> bool:
        return self.values_exact and self._first.exact_split

    @property
    def overshoots(self) -> bool:
        return self._first.overshoots

    @property
    def conserves(self) -> bool:
        """True if nothing is dropped on purpose."""
        return bool(getattr(self.selector, "conserves", True))

    def sources(self) -> tuple[str, ...]:
        return (*self.selector.sources(), *self.encoding.sources())

    def init_state(self, like: Tensor, context: CodecContext = SINGLE_WORKER) -> ChainState:
        return ChainState(self.selector.init_state(like, context), self.encoding.init_state(like, context))

    def select(self, x: Tensor, residual: Tensor | None, state: ChainState) -> tuple[Tensor, Tensor]:
        return self._first.select(x, residual, state.selector)

    def max_values(self, n: int) -> int:
        return self._first.max_values(n)

    def encode_indices(self, indices: Tensor, like: Tensor, state: ChainState) -> Tensor:
        return self._first.encode_indices(indices, like, state.selector)

    def decode_indices(self, message: Tensor, like: Tensor) -> tuple[Tensor, int]:
        return self._first.decode_indices(message, like)

    def max_index_bytes(self, count: int, n: int) -> int:
        return self._first.max_index_bytes(count, n)

    def encode_values(self, values: Tensor, indices: Tensor, state: ChainState) -> Tensor:
        return self.encoding.encode(values, state.encoding)

    def decode_values(self, encoded: Tensor, indices: Tensor, like: Tensor) -> Tensor:
        if self.encoding.fixed_size:
            self.check_length(encoded, self.encoding.bytes_of(like))
        try:
            return self.encoding.decode(aligned(encoded, self.value_dtype(like)), like)
        except (ValueError, RuntimeError) as error:
            raise TransportError(f"a message of another worker is not in the encoding {self}: {error}") from error

    def value_bytes(self, count: int, like: Tensor) -> int:
        return self.encoding.bytes_of(torch.empty(count, dtype=like.dtype, device="meta"))

    def value_dtype(self, like: Tensor) -> torch.dtype:
        if not self.encoding.linear:
            return torch.uint8
        nothing = like.new_empty(0)
        return self.encoding.encode(nothing, self.encoding.init_state(nothing)).dtype
