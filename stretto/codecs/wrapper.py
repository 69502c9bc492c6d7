"""Base of codecs that wrap another one and delegate to it by default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stretto.codecs.base import SINGLE_WORKER, Codec, CodecContext
from stretto.collective_ops import CollectiveCoroutine

if TYPE_CHECKING:
    from torch import Tensor


class WrappingCodec(Codec):
    """Base of codecs that change another one, which a subclass returns as `inner`."""

    @property
    def inner(self) -> Codec:
        """The wrapped codec."""
        raise NotImplementedError

    @property
    def pair(self) -> bool:
        return self.inner.pair

    @property
    def linear(self) -> bool:
        return self.inner.linear

    @property
    def encodes_parts_alike(self) -> bool:
        return self.inner.encodes_parts_alike

    @property
    def fixed_size(self) -> bool:
        return self.inner.fixed_size

    @property
    def needs_theta(self) -> bool:
        return self.inner.needs_theta

    @property
    def keeps_residual(self) -> bool:
        return self.inner.keeps_residual

    def init_state(self, like: Tensor, context: CodecContext = SINGLE_WORKER) -> Any:
        return self.inner.init_state(like, context)

    def residual(self, state: Any) -> Tensor | None:
        return self.inner.residual(state)

    def add_residual(self, state: Any, residual: Tensor) -> None:
        self.inner.add_residual(state, residual)

    def average(self, x: Tensor, state: Any, residual: Tensor | None = None) -> CollectiveCoroutine:
        return self.inner.average(x, state, residual)

    def bytes_of(self, x: Tensor) -> int:
        return self.inner.bytes_of(x)

    def values_sent(self, message: Tensor, like: Tensor) -> int:
        return self.inner.values_sent(message, like)

    def encode(self, x: Tensor, state: Any) -> Tensor:
        return self.inner.encode(x, state)

    def encode_with_residual(self, x: Tensor, residual: Tensor, state: Any) -> Tensor:
        return self.inner.encode_with_residual(x, residual, state)

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        return self.inner.decode(message, like)

    def add_to(self, total: Tensor, message: Tensor) -> None:
        self.inner.add_to(total, message)

    def exchange(self, message: Tensor, like: Tensor) -> CollectiveCoroutine:
        return self.inner.exchange(message, like)
