"""A codec around another: all that it does not change is the other's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stretto.codecs.base import ALONE, Codec, CodecContext
from stretto.collective_ops import CollectiveCoroutine

if TYPE_CHECKING:
    from torch import Tensor


class Around(Codec):
    """Base of the codecs that change another one; a subclass says which (`inner`)."""

    @property
    def inner(self) -> Codec:
        """The codec that is changed."""
        raise NotImplementedError

    @property
    def pair(self) -> bool:
        return self.inner.pair

    @property
    def linear(self) -> bool:
        return self.inner.linear

    @property
    def fixed(self) -> bool:
        return self.inner.fixed

    @property
    def needs_theta(self) -> bool:
        return self.inner.needs_theta

    @property
    def keeps_residual(self) -> bool:
        return self.inner.keeps_residual

    def memory(self, like: Tensor, scene: CodecContext = ALONE) -> Any:
        return self.inner.memory(like, scene)

    def residual(self, memory: Any) -> Tensor | None:
        return self.inner.residual(memory)

    def take_on(self, memory: Any, owed: Tensor) -> None:
        self.inner.take_on(memory, owed)

    def converse(self, x: Tensor, memory: Any, owed: Tensor | None = None) -> CollectiveCoroutine:
        return self.inner.converse(x, memory, owed)

    def bytes_of(self, x: Tensor) -> int:
        return self.inner.bytes_of(x)

    def entries(self, message: Tensor, like: Tensor) -> int:
        return self.inner.entries(message, like)

    def encode(self, x: Tensor, memory: Any) -> Tensor:
        return self.inner.encode(x, memory)

    def encode_owed(self, x: Tensor, owed: Tensor, memory: Any) -> Tensor:
        return self.inner.encode_owed(x, owed, memory)

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        return self.inner.decode(message, like)

    def add_to(self, total: Tensor, message: Tensor) -> None:
        self.inner.add_to(total, message)

    def exchange(self, message: Tensor, like: Tensor) -> CollectiveCoroutine:
        return self.inner.exchange(message, like)
