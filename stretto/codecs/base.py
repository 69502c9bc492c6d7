"""What a codec is: an encoding as a conversation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, cast

from stretto.collective_ops import AllGather, AllReduceMean, CollectiveCoroutine, Messages
from stretto.collective_ops import Answer as Answered
from stretto.errors import NotFiniteError
from stretto.spec import Answer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Block:
    """One parameter's place in a flat range: numbers `start` to `stop`, in this shape."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class CodecContext:
    """Where a codec works. What is not known is left out; a codec that needs it says so."""

    worker: int = 0
    workers: int = 1
    seed: int = 0
    blocks: Sequence[Block] = ()
    """The parameters in the flat range; what lies between them is padding and stays zero."""
    theta: Tensor | None = None
    """The parameters of this range as they are now, if what is exchanged is about them."""
    clock: Callable[[], float] | None = None
    notice: Callable[[str], None] | None = None
    """Tells the user something that he should know."""


SINGLE_WORKER = CodecContext()


class Codec(Answer):
    """Base of the answers to *how*: in what encoding is a flat tensor exchanged?

    A codec is frozen; what it remembers between rounds (residuals, bases, counters) lives in a memory of the caller's.
    Contributions with NaN or infinity are refused with NotFiniteError, before any memory has changed.
    """

    axis = "how"
    example: ClassVar[str] = "exact()"

    @property
    def elementwise(self) -> bool:
        """Whether each number is encoded by itself, and small whole numbers exactly: then counts may travel along."""
        return False

    @property
    def fixed_size(self) -> bool:
        """Whether `bytes_of` is what is said, and not only the most that may be."""
        return True

    @property
    def linear(self) -> bool:
        """Whether the sum of encodings decodes to the sum: then they may be summed on the way."""
        return False

    @property
    def needs_theta(self) -> bool:
        """Whether it looks at the parameters' own moves (`Scene.theta`)."""
        return False

    @property
    def keeps_residual(self) -> bool:
        """Whether it adds up by itself what it did not send."""
        return False

    @property
    def pair(self) -> bool:
        """Whether it is a pair of `encode` and `decode`, one message a worker."""
        return False

    @property
    def reply(self) -> Codec | None:
        """The codec in which a server replies on arrival; None for exact numbers."""
        return None

    def components(self) -> Iterator[Codec]:
        """Itself and all codecs that it is made of."""
        yield self
        for field in fields(self):  # type: ignore[arg-type]
            part = getattr(self, field.name)
            if isinstance(part, Codec):
                yield from part.components()

    def init_state(self, like: Tensor, context: CodecContext = SINGLE_WORKER) -> Any:
        """A fresh memory for tensors like this one; None for codecs that remember nothing."""
        return None

    def average(self, x: Tensor, state: Any, residual: Tensor | None = None) -> CollectiveCoroutine:
        """The conversation that ends in the mean of everyone's `x`, as far as the encoding lets it through.

        `x` is this worker's contribution (see Mean) and is given away. With `owed`, x is added to it, the sum is what
        is encoded, and what the conversation carries of it is taken away: `owed += x - carried`.
        """
        raise NotImplementedError

    def bytes_of(self, x: Tensor) -> int:
        """The bytes of all that a worker says about `x`, before the wire multiplies them; at most, unless `fixed`."""
        raise NotImplementedError

    def residual(self, state: Any) -> Tensor | None:
        """What is still owed, if the codec keeps that."""
        return None

    def add_residual(self, state: Any, residual: Tensor) -> None:
        """Owe this as well, which another worker has left: e <- e + owed. A codec that keeps nothing lets it go."""
        mine = self.residual(state)
        if mine is not None:
            mine.add_(residual)

    def values_sent(self, message: Tensor, like: Tensor) -> int:
        """How many numbers of `like` a message speaks of."""
        return like.numel()

    # --- pairs ------------------------------------------------------------------------------------------------

    def encode(self, x: Tensor, state: Any) -> Tensor:
        """The message for x, a flat tensor that is given away. Only of a pair, as what follows."""
        raise NotImplementedError

    def encode_with_residual(self, x: Tensor, residual: Tensor, state: Any) -> Tensor:
        """The message for `owed + x`; `owed` becomes what the message leaves out. `x` is given away.

        Where a message says exactly some of the numbers, nothing is lost: carried + owed is the input to the bit.
        """
        refuse_not_finite(x, self)
        residual.add_(x)
        message = self.encode(x.copy_(residual), state)
        residual.sub_(self.decode(message, residual.new_empty(residual.shape)))
        return message

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        """What a message says, as a tensor of the shape and dtype of `like`, which may be written over."""
        raise NotImplementedError

    def add_to(self, total: Tensor, message: Tensor) -> None:
        """Add what a message says to `total`; the sums of a pair are made with it."""
        total.add_(self.decode(message, total.new_empty(total.shape)))

    def exchange(self, message: Tensor, like: Tensor) -> CollectiveCoroutine:
        """The conversation about messages that are there already: ends in the sum of what all say."""
        raise NotImplementedError


class SingleRound(Codec):
    """A codec of one message a worker, written as a pair: the conversation follows, and a server needs only the pair.

    The messages of a codec that is not `linear` are flat tensors of bytes; an empty one says nothing.
    """

    @property
    def pair(self) -> bool:
        return True

    def average(self, x: Tensor, state: Any, residual: Tensor | None = None) -> CollectiveCoroutine:
        message = self.encode(x, state) if residual is None else self.encode_with_residual(x, residual, state)
        return (yield from self.exchange(message, x))

    def exchange(self, message: Tensor, like: Tensor) -> CollectiveCoroutine:
        if self.linear:
            return self.decode(cast("Tensor", (yield AllReduceMean(message))), like)
        messages = yield AllGather(message)
        if isinstance(messages, Messages):
            return like.copy_(messages.once(self, lambda: self._sum(messages, like.new_empty(like.shape))))
        return self._sum(messages, like)

    def _sum(self, messages: Answered, total: Tensor) -> Tensor:
        total.zero_()
        for one in messages:
            if one.numel():
                self.add_to(total, one)
        return total


def refuse_not_finite(x: Tensor, codec: object) -> None:
    """Raise NotFiniteError if there is NaN or infinity in what a worker would send."""
    if not math.isfinite(x.sum()) and not bool(x.isfinite().all()):
        raise NotFiniteError(f"NaN or infinity can't be sent in the encoding {codec}")
