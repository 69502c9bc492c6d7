"""Transport among some workers of a transport, made of exchanges between each two of them.

A mean is a reduce-scatter and an all-gather: of N workers, each adds its own N-th of the numbers of all, in the order
of ranks, and gives the sum to the others. So a worker sends 2(N-1)/N of the bytes of its tensor, as in a ring, in two
steps, and the sums have the same bits at all workers:

    worker 0                                 worker 1
    sends part 1       <---------------->    sends part 0
    sum 0 = own + worker 1's part 0          sum 1 = worker 0's part 1 + own
    sends sum 0        <---------------->    sends sum 1

Parts are cut into pieces: while one piece is added, the next ones are received, and sums of earlier ones sent. All else
is sent whole to each other worker. The group has no connection of its own: it ends with its transport.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stretto.collective_ops import AllReduceMean, CollectiveOp, Exchange
from stretto.errors import TransportError, explain
from stretto.transport.interface import (
    CHANNELS,
    Collectives,
    Handle,
    Message,
    Traffic,
    as_bytes,
    check_peer,
    made,
    nbytes,
)

PIECE_BYTES = 1 << 20
"""Bytes of a piece of a mean that two workers exchange at a time."""
AHEAD = 4
"""Number of pieces whose exchanges begin before the first of them has ended."""
SUMS = CHANNELS // 2
"""Difference of the channels in which a group exchanges its own tensors, and the sums."""


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
        self._pending: deque[MeanHandle] = deque()
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
            return self.start_mean(op.tensor)
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

    def start_mean(self, tensor: Tensor, in_place: bool = False) -> MeanHandle:
        """Start a mean, `in_place` if it is to be written into the tensor."""
        mean = MeanHandle(self, tensor, in_place)
        self._pending.append(mean)
        return mean

    def complete(self, mean: MeanHandle) -> None:
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


class MeanHandle:
    """Mean in progress. `run` completes it, in one thread."""

    def __init__(self, group: PeerGroup, tensor: Tensor, in_place: bool) -> None:
        self._group, self._shape = group, tensor.shape
        flat = tensor.detach().reshape(-1)
        self._mean = flat if in_place else torch.empty_like(flat)
        self._parts = _pieces(flat, group.workers)
        self._targets = _pieces(self._mean, group.workers)
        self._error: TransportError | None = None
        self.is_over = False
        self._begun: deque[list[Handle | None]] = deque(group.start_all(piece) for piece in self._parts[:AHEAD])

    def wait(self) -> Tensor:
        """Return the mean."""
        self._group.complete(self)
        if self._error is not None:
            raise self._error
        return self._mean.view(self._shape)

    def run(self) -> None:
        """Complete the mean, or keep the error."""
        try:
            self._run()
        except TransportError as error:
            self._error = error
        self._begun.clear()
        self.is_over = True

    def _run(self) -> None:
        sums = list[list[Handle | None]]()
        for number, targets in enumerate(self._targets):
            if number + AHEAD < len(self._parts):
                self._begun.append(self._group.start_all(self._parts[number + AHEAD], SUMS))
            self._add(number, targets)
            own = targets[self._group.worker]
            sums.append(self._group.start_all([own] * self._group.workers, SUMS, targets))
        for handles, targets in zip(sums, self._targets, strict=True):
            for handle, target in zip(handles, targets, strict=True):
                if handle is not None:
                    _take(handle, target)

    def _add(self, number: int, targets: Sequence[Tensor]) -> None:
        worker = self._group.worker
        handles, own = self._begun.popleft(), self._parts[number][worker]
        received: list[Any] = [own if handle is None else handle.wait() for handle in handles]
        _sum(received, worker, targets[worker])


def _pieces(flat: Tensor, workers: int) -> list[list[Tensor]]:
    """Return, for each piece, those of all workers' parts of the tensor."""
    parts = torch.tensor_split(flat, workers)
    numbers = max(1, PIECE_BYTES // flat.element_size())
    count = -(-parts[0].numel() // numbers) or 1
    return [[part[at * numbers : (at + 1) * numbers] for part in parts] for at in range(count)]


def _take(handle: Handle, target: Tensor) -> None:
    received: Any = handle.wait()
    _check_length(received, target)
    if received is not target:
        target.copy_(received)


def _check_length(one: Tensor, like: Tensor) -> None:
    if one.numel() != like.numel():
        raise TransportError("the workers submit means of tensors that differ in shape")


def _sum(tensors: Sequence[Tensor], own: int, target: Tensor) -> None:
    """Write the sum in this order to the target, which may be the memory of the tensor at place `own`.

    Half precision is added in float32, and rounded once.
    """
    for one in tensors:
        _check_length(one, target)
    is_half = target.dtype in (torch.float16, torch.bfloat16)
    total = tensors[0].float() if is_half else tensors[0]
    for place, one in enumerate(tensors[1:], 1):
        total = torch.add(total, one) if is_half or place < own else torch.add(total, one, out=target)
    if total is not target:
        target.copy_(total)
