"""What may be said in a conversation between workers.

A codec is a generator. It yields what it wants answered and never learns who answers: the same codec runs over an
all-reduce, through a server or in the simulator. The number and the kind of its turns may not depend on the data,
since all workers must say the same words in the same order.

    def low_rank(x, memory):
        p = orthogonalise((yield Mean(x @ memory.q)))
        memory.q = yield Mean(x.T @ p)
        return p @ memory.q.T
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from stretto.errors import TransportError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class AllReduceMean:
    """Ask for the weighted mean over all workers, which may be summed on the way.

    Each worker gives its *contribution*: its value times its share of the samples, so that the mean is the sum of
    the contributions, `mean = sum_i (n_i / sum_j n_j) x_i`. The tensor is given away: the answer may come in it.
    All workers give tensors of one shape and dtype. Cost: 2(N-1)/N times its bytes per worker on a ring.
    """

    tensor: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class AllGather:
    """Ask for the message of every worker, whole, in the order of the workers.

    Messages are flat tensors of one dtype whose lengths may differ. Cost: (N-1) messages per worker.
    """

    tensor: Tensor


CollectiveOp = AllReduceMean | AllGather
Answer: TypeAlias = "Tensor | Sequence[Tensor]"
CollectiveCoroutine: TypeAlias = "Generator[CollectiveOp, Answer, Tensor]"
"""Yields asks, is sent their answers (a tensor for Mean, a sequence for Every), returns the decoded result."""


class Messages(list["Tensor"]):
    """Everyone's message, as one object that several workers are given: what all make of it alike is made `once`."""

    def once(self, what: object, make: Callable[[], Tensor]) -> Tensor:
        """What was made of the messages under this name; nobody may change it."""
        if not hasattr(self, "_made"):
            self._made: dict[object, Tensor] = {}
        if what not in self._made:
            self._made[what] = make()
        return self._made[what]


class Encoding(Protocol):
    """What may be asked of a codec by those who do not choose it."""

    def init_state(self, like: Tensor, context: Any) -> Any:
        """A fresh memory for tensors like this one."""

    def average(self, x: Tensor, state: Any) -> CollectiveCoroutine:
        """The conversation that ends in the mean of everyone's `x`."""

    def encode(self, x: Tensor, state: Any) -> Tensor:
        """The message for x."""

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        """What a message says."""

    def exchange(self, message: Tensor, like: Tensor) -> CollectiveCoroutine:
        """The conversation about messages that are there already."""


def answer(asks: Sequence[CollectiveOp]) -> Answer:
    """What the asks of all workers, in their order, are answered: the reference for every wire.

    Raises TransportError when they do not ask the same thing.
    """
    tensors = [ask.tensor for ask in asks]
    if len({type(ask) for ask in asks}) > 1 or len({one.dtype for one in tensors}) > 1:
        raise TransportError(f"the workers ask different things: {', '.join(_shown(ask) for ask in asks)}")
    if not isinstance(asks[0], AllReduceMean):
        return [one.clone() for one in tensors]
    if len({one.shape for one in tensors}) > 1:
        raise TransportError(f"the workers' tensors differ in shape: {', '.join(_shown(ask) for ask in asks)}")
    total = tensors[0].clone()
    for one in tensors[1:]:
        total += one
    return total


def _shown(ask: CollectiveOp) -> str:
    return f"{type(ask).__name__} of {tuple(ask.tensor.shape)} {str(ask.tensor.dtype).removeprefix('torch.')}"
