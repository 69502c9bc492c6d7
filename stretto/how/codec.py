"""What a codec is: an encoding as a conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, cast

from stretto.axis import Answer
from stretto.words import Conversation, Every, Mean

if TYPE_CHECKING:
    from torch import Tensor


class Codec(Answer):
    """Base of the answers to *how*: in what encoding is a flat tensor exchanged?

    A codec is frozen; what it remembers between rounds (residuals, bases) lives in a memory of the caller's.
    """

    axis = "how"
    example: ClassVar[str] = "exact()"
    elementwise: ClassVar[bool] = False
    """Whether each number is encoded by itself, and small whole numbers exactly: then counts may travel along."""

    def memory(self, like: Tensor) -> Any:
        """A fresh memory for tensors like this one; None for codecs that remember nothing."""
        return None

    def converse(self, x: Tensor, memory: Any) -> Conversation:
        """The conversation that ends in the mean of everyone's `x`, as far as the encoding lets it through.

        `x` is this worker's contribution (see Mean) and is given away.
        """
        raise NotImplementedError

    def bytes_of(self, x: Tensor) -> int:
        """The bytes of all that a worker says about `x`, before the wire multiplies them."""
        raise NotImplementedError


class SingleRound(Codec):
    """A codec of one message a worker, written as a pair: the conversation follows, and a server needs only the pair.

    `linear` says that the sum of encodings decodes to the sum: then they may be summed on the way.
    """

    linear: ClassVar[bool]

    def encode(self, x: Tensor, memory: Any) -> Tensor:
        """The message for x, a flat tensor."""
        raise NotImplementedError

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        """What a message says, as a tensor of the shape and dtype of `like`, which may be written over."""
        raise NotImplementedError

    def converse(self, x: Tensor, memory: Any) -> Conversation:
        message = self.encode(x, memory)
        if self.linear:
            return self.decode(cast("Tensor", (yield Mean(message))), x)
        first, *others = [self.decode(one, x) for one in (yield Every(message))]
        return sum(others, start=first.clone())
