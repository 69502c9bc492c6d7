"""Operations among workers, and coroutines of them.

A codec is a generator that yields operations and is sent their results. It does not know the transport: the same codec
runs over an all-reduce, through a server or in the simulator. Number and kind of its operations must not depend on the
data, since all workers must submit the same operations in the same order.

    def low_rank(x, state):
        p = orthogonalise((yield AllReduceMean(x @ state.q)))
        state.q = yield AllReduceMean(x.T @ p)
        return p @ state.q.T
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
    """Weighted mean over all workers, as an all-reduce.

    Each worker passes its *contribution*: its value times its share of the samples, so that the mean is the sum of
    the contributions, `mean = sum_i (n_i / sum_j n_j) x_i`. The tensor may be overwritten by the result. All workers
    pass tensors of one shape and dtype. Cost: 2(N-1)/N times its bytes per worker on a ring.
    """

    tensor: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class AllGather:
    """Messages of all workers, in the order of ranks.

    Messages are flat tensors of one dtype whose lengths may differ. Cost: (N-1) messages per worker.
    """

    tensor: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Exchange:
    """Tensors of two workers: each receives the other's. Workers that are not in a pair submit nothing.

    The worker of rank `peer` submits an Exchange with this worker. Both pass flat tensors of one dtype, whose lengths
    may differ. Exchanges with several peers may be in flight concurrently; those of one pair match in the order in
    which they are submitted, in each `channel` (0 to 7) separately. A transport may receive the peer's tensor in the
    memory of `into`, which has its length; it returns `into` then. Cost: the tensor, and a frame with its length.
    """

    peer: int
    tensor: Tensor
    channel: int = 0
    into: Tensor | None = None


CollectiveOp = AllReduceMean | AllGather | Exchange
Answer: TypeAlias = "Tensor | Sequence[Tensor]"
CollectiveCoroutine: TypeAlias = "Generator[CollectiveOp, Answer, Tensor]"
"""Yields operations, is sent their results (for AllGather a sequence, otherwise a tensor), returns a tensor."""


class Messages(list["Tensor"]):
    """Messages of all workers as one object shared by several workers, with a cache of tensors computed from them."""

    def once(self, what: object, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor cached under a key, computed at the first call. It must not be modified."""
        if not hasattr(self, "_made"):
            self._made: dict[object, Tensor] = {}
        if what not in self._made:
            self._made[what] = make()
        return self._made[what]


class Encoding(Protocol):
    """Interface of codecs for code that does not choose them."""

    def init_state(self, like: Tensor, context: Any) -> Any:
        """Return a new state for tensors like this one."""

    def average(self, x: Tensor, state: Any) -> CollectiveCoroutine:
        """Return the coroutine that computes the mean of all workers' `x`."""

    def encode(self, x: Tensor, state: Any) -> Tensor:
        """Return the message for x."""

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        """Return the decoded message."""

    def exchange(self, message: Tensor, like: Tensor) -> CollectiveCoroutine:
        """Return the coroutine that computes the sum of encoded messages."""


def answer(asks: Sequence[CollectiveOp]) -> Answer:
    """Return the result of the operations of all workers, in the order of ranks: the reference for transports.

    Raise TransportError if the workers submit different operations.
    """
    tensors = [ask.tensor for ask in asks]
    if len({type(ask) for ask in asks}) > 1 or len({one.dtype for one in tensors}) > 1:
        raise TransportError(f"the workers submit different operations: {', '.join(_shown(ask) for ask in asks)}")
    if not isinstance(asks[0], AllReduceMean):
        return [one.clone() for one in tensors]
    if len({one.shape for one in tensors}) > 1:
        raise TransportError(f"the workers' tensors differ in shape: {', '.join(_shown(ask) for ask in asks)}")
    total = tensors[0].clone()
    for one in tensors[1:]:
        total += one
    return total


def swapped(asks: Sequence[Exchange]) -> list[Tensor]:
    """Return the results of an exchange at its two workers. Raise TransportError if their tensors differ in dtype."""
    first, second = (ask.tensor for ask in asks)
    if first.dtype != second.dtype:
        raise TransportError(f"the workers' tensors differ in dtype: {', '.join(_shown(ask) for ask in asks)}")
    return [second.clone(), first.clone()]


def _shown(ask: CollectiveOp) -> str:
    return f"{type(ask).__name__} of {tuple(ask.tensor.shape)} {str(ask.tensor.dtype).removeprefix('torch.')}"
