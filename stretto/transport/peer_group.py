"""Transport among some workers of a transport, made of exchanges between each two of them.

A mean is a reduce-scatter and an all-gather: of N workers, each adds its own N-th of the numbers of all, in the order
of ranks, and gives the sum to the others. So a worker sends 2(N-1)/N of the bytes of its tensor, as in a ring, in two
steps, and the sums have the same bits at all workers:

    worker 0                                 worker 1
    sends part 1       <---------------->    sends part 0
    sum 0 = own + worker 1's part 0          sum 1 = worker 0's part 1 + own
    sends sum 0        <---------------->    sends sum 1

All else is sent whole to each other worker. The group has no connection of its own: it ends with its transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.collective_ops import AllReduceMean, Answer, CollectiveOp, Exchange
from stretto.errors import TransportError, explain
from stretto.transport.interface import Collectives, Handle, Message, Traffic, as_bytes, check_peer, made, nbytes


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
            return _MeanHandle(self, op.tensor, parts := _parts(op.tensor, self.workers), self.start_all(parts))
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

    def start(self, rank: int, tensor: Tensor, channel: int = 0) -> Handle:
        """Exchange a tensor with the worker of this rank."""
        if self._is_closed:
            raise TransportError("the group is closed")
        self._check()
        self._sent += nbytes(tensor)
        return _PairHandle(self, self._transport.submit(Exchange(self._ranks[rank], tensor, self._channel + channel)))

    def start_all(self, tensors: Sequence[Tensor]) -> list[Handle | None]:
        """Exchange with each other worker the tensor of its rank. The handle of this worker is None."""
        return [None if rank == self.worker else self.start(rank, one) for rank, one in enumerate(tensors)]

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


@dataclass(slots=True)
class _MeanHandle:
    group: PeerGroup
    tensor: Tensor
    parts: Sequence[Tensor]
    handles: list[Handle | None]

    def wait(self) -> Answer:
        mine = self.parts[self.group.worker]
        total = _sum(_GatherHandle(mine, self.handles).wait())
        sums = _GatherHandle(total, self.group.start_all([total] * self.group.workers)).wait()
        if [one.numel() for one in sums] != [one.numel() for one in self.parts]:
            raise TransportError("the workers submit means of tensors that differ in shape")
        return torch.cat(sums).view(self.tensor.shape)


def _parts(tensor: Tensor, workers: int) -> Sequence[Tensor]:
    return torch.tensor_split(tensor.detach().reshape(-1), workers)


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum in this order; half precision is added in float32, and rounded once."""
    if len({one.numel() for one in tensors}) > 1:
        raise TransportError("the workers submit means of tensors that differ in shape")
    dtype = tensors[0].dtype
    total = tensors[0].float() if dtype in (torch.float16, torch.bfloat16) else tensors[0].clone()
    for one in tensors[1:]:
        total += one
    return total.to(dtype)
