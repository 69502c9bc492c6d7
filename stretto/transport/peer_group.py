"""Transport among some workers of a transport, made of exchanges between each two of them.

Means are in `peer_means.py`. All else is sent whole to each other worker. The group has no connection of its own: it
ends with its transport.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stretto.collective_ops import AllReduceMean, CollectiveOp, Exchange
from stretto.errors import TransportError, explain
from stretto.transport.interface import (
    Collectives,
    Handle,
    Message,
    Traffic,
    as_bytes,
    check_peer,
    made,
    nbytes,
)
from stretto.transport.peer_means import Mean, PairsMean, start_ring


class PeerGroup:
    """One worker's end. `check` raises an error once the transport's ranks are those of other workers.

    Its exchanges are those of the transport, in the channels from `channel` on: they match in the order of calls. Its
    traffic, computed from the sizes, is also in that of the transport.
    """

    def __init__(
        self,
        transport: Collectives,
        ranks: Sequence[int],
        channel: int = 0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        workers, worker = transport.workers, transport.worker
        if worker not in ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(workers)):
            problem = f"worker {worker} can't make this group"
            expected = f"different ranks below {workers}, with {worker} among them"
            raise TransportError(explain(problem, got=list(ranks), expected=expected, to_type="group([0, 1])"))
        self._transport, self._ranks, self._channel, self._check = transport, list(ranks), channel, check
        self._sent = self._received = 0
        self._is_closed = False
        self._pending: deque[Mean] = deque()
        """Means in progress. They are completed in the order in which all workers submit them."""

    @property
    def worker(self) -> int:
        """Rank in the group."""
        return self._ranks.index(self._transport.worker)

    @property
    def workers(self) -> int:
        """Number of workers in the group."""
        return len(self._ranks)

    def submit(self, op: CollectiveOp) -> Handle:
        """Start an operation. A mean is returned as a new tensor."""
        if isinstance(op, Exchange):
            check_peer(op, self.worker, self.workers)
            return self.start(op.peer, op.tensor, op.channel)
        if isinstance(op, AllReduceMean):
            mean = PairsMean(self, op.tensor, in_place=False)
            self._pending.append(mean)
            return mean
        return _GatherHandle(op.tensor, self.start_all([op.tensor] * self.workers))

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """Return the messages of all workers."""
        mine = as_bytes(made(message))
        return [bytes(one.numpy()) for one in _GatherHandle(mine, self.start_all([mine] * self.workers)).wait()]

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """Return the root's message; the other workers send it nothing."""
        if self.worker != root:
            received: Any = self.start(root, as_bytes(b"")).wait()
            return bytes(received.numpy())
        message = made(message)
        for handle in self.start_all([as_bytes(message)] * self.workers):
            if handle is not None:
                handle.wait()
        return message

    def group(self, ranks: Sequence[int]) -> PeerGroup:
        """Return a transport among the workers of these ranks of the group."""
        return PeerGroup(self, ranks)

    def traffic(self) -> Traffic:
        """Return the bytes of the group's tensors and messages so far."""
        return Traffic(self._sent, self._received, counted=False)

    def close(self) -> None:
        """Refuse further operations."""
        self._is_closed = True

    def start_mean(self, tensor: Tensor) -> Mean:
        """Start a mean, which is written into the tensor; around a ring if it is long."""
        mean = start_ring(self, tensor, in_place=True)
        self._pending.append(mean)
        return mean

    def complete(self, mean: Mean) -> None:
        """Complete a mean, and all earlier means."""
        while not mean.is_over:
            self._pending.popleft().run()

    def start(self, rank: int, tensor: Tensor, channel: int = 0, into: Tensor | None = None) -> Handle:
        """Exchange a tensor with the worker of this rank, if possible `into` the memory of another."""
        if self._is_closed:
            raise TransportError("the group is closed")
        self._check()
        self._sent += nbytes(tensor)
        op = Exchange(self._ranks[rank], tensor, self._channel + channel, into)
        return _PairHandle(self, self._transport.submit(op))

    def start_all(
        self, tensors: Sequence[Tensor], channel: int = 0, into: Sequence[Tensor | None] | None = None
    ) -> list[Handle | None]:
        """Exchange with each other worker the tensor of its rank. The handle of this worker is None."""
        targets = into or [None] * len(tensors)
        handles: list[Handle | None] = [None] * len(tensors)
        for rank, (tensor, target) in enumerate(zip(tensors, targets, strict=True)):
            if rank != self.worker:
                handles[rank] = self.start(rank, tensor, channel, target)
        return handles

    def count_received(self, tensor: Tensor) -> None:
        """Count a received tensor."""
        self._received += nbytes(tensor)


@dataclass(slots=True)
class _PairHandle:
    group: PeerGroup
    handle: Handle

    def wait(self) -> Tensor:
        received: Any = self.handle.wait()
        self.group.count_received(received)
        tensor: Tensor = received
        return tensor


@dataclass(slots=True)
class _GatherHandle:
    mine: Tensor
    handles: list[Handle | None]

    def wait(self) -> list[Tensor]:
        received: list[Any] = [self.mine.clone() if one is None else one.wait() for one in self.handles]
        return received
