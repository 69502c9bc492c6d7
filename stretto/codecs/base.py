"""Base classes of codecs: an encoding is a coroutine of collective operations, or a pair of `encode` and `decode`."""

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
    """Place of one parameter in a flat range: numbers `start` to `stop`, in this shape."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class CodecContext:
    """Surroundings of a codec. Unknown ones keep their defaults; a codec that needs them raises RecipeError."""

    worker: int = 0
    workers: int = 1
    seed: int = 0
    blocks: Sequence[Block] = ()
    """Parameters in the flat range; numbers between them are padding and stay zero."""
    theta: Tensor | None = None
    """Present values of the parameters of this range, if gradients or changes of them are exchanged."""
    clock: Callable[[], float] | None = None
    notice: Callable[[str], None] | None = None
    """Shows a notice to the user."""


SINGLE_WORKER = CodecContext()


class Codec(Answer):
    """Base of the answers to *how*: in what encoding is a flat tensor exchanged?

    A codec is frozen; its state between rounds (residuals, bases, counters) is created by `init_state` and kept by the
    caller (see stretto.state). Contributions with NaN or infinity raise NotFiniteError before any state has changed.
    """

    axis = "how"
    example: ClassVar[str] = "exact()"

    @property
    def elementwise(self) -> bool:
        """True if each number is encoded alone, and small whole numbers exactly, so that counts can be appended."""
        return False

    @property
    def encodes_parts_alike(self) -> bool:
        """True if parts of a tensor that are encoded apart decode to the same numbers as the whole tensor."""
        return self.elementwise

    @property
    def fixed_size(self) -> bool:
        """True if exactly `bytes_of` bytes are sent; False if that is a maximum."""
        return True

    @property
    def linear(self) -> bool:
        """True if the sum of encodings decodes to the sum, so that an all-reduce can add them."""
        return False

    @property
    def needs_theta(self) -> bool:
        """True if it reads the parameters (`CodecContext.theta`)."""
        return False

    @property
    def needs_matrices(self) -> bool:
        """True if it encodes whole matrices, which no process has where each holds a part of every parameter."""
        return False

    @property
    def keeps_residual(self) -> bool:
        """True if its state holds a residual."""
        return False

    @property
    def pair(self) -> bool:
        """True if it is a pair of `encode` and `decode`, with one message per worker."""
        return False

    @property
    def reply(self) -> Codec | None:
        """Codec of a server's replies on arrival; None for exact numbers."""
        return None

    def components(self) -> Iterator[Codec]:
        """Yield the codec and all codecs that it is composed of."""
        yield self
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, Codec):
                yield from value.components()

    def init_state(self, like: Tensor, context: CodecContext = SINGLE_WORKER) -> Any:
        """Return a new state for tensors like this one; None for a codec without state."""
        return None

    def average(self, x: Tensor, state: Any, residual: Tensor | None = None) -> CollectiveCoroutine:
        """Return the coroutine that computes the mean of all workers' `x`, as closely as the encoding permits.

        `x` is this worker's contribution (see AllReduceMean) and may be overwritten. With a `residual`, the sum of both
        is encoded, and the residual becomes the part that was not decoded: `residual += x - decoded`.
        """
        raise NotImplementedError

    def bytes_of(self, x: Tensor) -> int:
        """Return the bytes that one worker encodes `x` in; a maximum unless `fixed_size`."""
        raise NotImplementedError

    def residual(self, state: Any) -> Tensor | None:
        """Return the residual in a state; None if the codec keeps none."""
        return None

    def add_residual(self, state: Any, residual: Tensor) -> None:
        """Add the residual that another worker has left: e <- e + residual. A codec without residual drops it."""
        own_residual = self.residual(state)
        if own_residual is not None:
            own_residual.add_(residual)

    def values_sent(self, message: Tensor, like: Tensor) -> int:
        """Return how many numbers of `like` a message contains."""
        return like.numel()

    # --- pairs ------------------------------------------------------------------------------------------------

    def encode(self, x: Tensor, state: Any) -> Tensor:
        """Return the message for x, a flat tensor that may be overwritten. Pairs only, as the methods below."""
        raise NotImplementedError

    def encode_with_residual(self, x: Tensor, residual: Tensor, state: Any) -> Tensor:
        """Return the message for `residual + x`, and set `residual` to the part it leaves out. `x` may be overwritten.

        If a message carries some of the numbers exactly, nothing is lost: decoded + residual is the input to the bit.
        """
        refuse_not_finite(x, self)
        residual.add_(x)
        message = self.encode(x.copy_(residual), state)
        residual.sub_(self.decode(message, residual.new_empty(residual.shape)))
        return message

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        """Return a message as a tensor of the shape and dtype of `like`, which may be overwritten."""
        raise NotImplementedError

    def add_to(self, total: Tensor, message: Tensor) -> None:
        """Add a decoded message to `total`; the sums of a pair are computed with it."""
        total.add_(self.decode(message, total.new_empty(total.shape)))

    def exchange(self, message: Tensor, like: Tensor) -> CollectiveCoroutine:
        """Return the coroutine that sends an encoded message and computes the sum of all workers' decoded messages."""
        raise NotImplementedError


class SingleRound(Codec):
    """Codec with one message per worker, written as a pair, from which the coroutine follows; a server uses the pair.

    The messages of a codec that is not `linear` are flat tensors of bytes; an empty one stands for zeros.
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
        for message in messages:
            if message.numel():
                self.add_to(total, message)
        return total


def refuse_not_finite(x: Tensor, codec: object) -> None:
    """Raise NotFiniteError if a worker would send NaN or infinity."""
    if not math.isfinite(x.sum()) and not bool(x.isfinite().all()):
        raise NotFiniteError(f"NaN or infinity can't be sent in the encoding {codec}")
