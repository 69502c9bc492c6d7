"""Means among the workers of a group, made of exchanges between each two of them.

A mean is a reduce-scatter and an all-gather of N parts: each part is added in one order only, and its sum given to all
workers, so that the sums have the same bits at all of them. A worker sends 2(N-1)/N of the bytes of its tensor. Short
tensors take two steps between all pairs; each worker adds its own part of all, in the order of ranks:

    worker 0                                 worker 1
    sends part 1       <---------------->    sends part 0
    sum 0 = own + worker 1's part 0          sum 1 = worker 0's part 1 + own
    sends sum 0        <---------------->    sends sum 1

Longer ones of three or more workers may go around a ring: a part is added by one worker after another, and then its
sum passed on. That takes 2(N-1) steps, but each link carries one stream of bytes at a time, and none waits for another.
Over gloo, whose exchanges begin with a frame in each direction, it is no faster.

    part 0:   worker 0 -> worker 1 adds -> worker 2 adds -> worker 0 -> worker 1
    part 1:   worker 1 -> worker 2 adds -> worker 0 adds -> worker 1 -> worker 2

Parts are cut into pieces: while one piece is added, the next ones are received, and sums of earlier ones sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.errors import TransportError
from stretto.transport.interface import CHANNELS, Handle

PIECE_BYTES = 1 << 20
"""Largest number of bytes of a piece that two workers exchange at a time."""
RING_PIECES, RING_PIECE_BYTES = 4, 8 << 20
"""Least number of pieces of a part that goes around a ring, unless they are shorter than others; their largest size.

Each costs two workers some 0.1 ms of Python, so a long tensor has longer ones.
"""
RING_BYTES = 1 << 16
"""Smallest number of bytes of a worker's part that goes around a ring."""
AHEAD = 4
"""Number of pieces whose exchanges begin before the first of them has ended."""
SUMS = CHANNELS // 2
"""Difference of the channels in which a group exchanges its own tensors, and the sums."""


class Exchanges(Protocol):
    """Group that exchanges tensors of two of its workers."""

    @property
    def worker(self) -> int:
        """Rank in the group."""
        ...

    @property
    def workers(self) -> int:
        """Number of workers in the group."""
        ...

    def start(self, rank: int, tensor: Tensor, channel: int = 0, into: Tensor | None = None) -> Handle:
        """Exchange a tensor with the worker of this rank, if possible `into` the memory of another."""
        ...

    def start_all(
        self, tensors: Sequence[Tensor], channel: int = 0, into: Sequence[Tensor | None] | None = None
    ) -> list[Handle | None]:
        """Exchange with each other worker the tensor of its rank. The handle of this worker is None."""
        ...

    def complete(self, mean: Mean) -> None:
        """Complete a mean, and all earlier means."""
        ...


class Mean(ABC):
    """Mean in progress, `in_place` if it is to be written into the tensor. `run` completes it, in one thread."""

    def __init__(self, group: Exchanges, tensor: Tensor, in_place: bool) -> None:
        self._group, self._shape = group, tensor.shape
        self._flat = tensor.detach().reshape(-1)
        self._mean = self._flat if in_place else torch.empty_like(self._flat)
        self._error: TransportError | None = None
        self.is_over = False

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
        self._drop()
        self.is_over = True

    @abstractmethod
    def _run(self) -> None:
        """Complete the mean."""

    @abstractmethod
    def _drop(self) -> None:
        """Drop the handles of exchanges that have not ended."""


def start_ring(group: Exchanges, tensor: Tensor, in_place: bool) -> Mean:
    """Start a mean around a ring if the tensor is long, otherwise in two steps between pairs.

    Half precision takes two steps: around a ring it would be rounded at each worker.
    """
    is_long = group.workers > 2 and tensor.nbytes >= group.workers * RING_BYTES
    if is_long and tensor.dtype in (torch.float32, torch.float64):
        return RingMean(group, tensor, in_place)
    return PairsMean(group, tensor, in_place)


class PairsMean(Mean):
    """Mean in two steps between all pairs of workers."""

    def __init__(self, group: Exchanges, tensor: Tensor, in_place: bool) -> None:
        super().__init__(group, tensor, in_place)
        self._parts, self._targets = (
            [list(column) for column in zip(*_pieces(one, group.workers, PIECE_BYTES), strict=True)]
            for one in (self._flat, self._mean)
        )
        self._begun: deque[list[Handle | None]] = deque(group.start_all(piece) for piece in self._parts[:AHEAD])

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

    def _drop(self) -> None:
        self._begun.clear()


class RingMean(Mean):
    """Mean around the ring of workers: at step s, worker i receives part i - s, and sends it on at the next step."""

    def __init__(self, group: Exchanges, tensor: Tensor, in_place: bool) -> None:
        super().__init__(group, tensor, in_place)
        part = self._flat.nbytes // group.workers
        size = min(max(part // RING_PIECES, PIECE_BYTES), RING_PIECE_BYTES)
        self._parts, self._targets = (_pieces(one, group.workers, size) for one in (self._flat, self._mean))
        self._empty = self._flat.new_empty(0)
        self._sent = [self._send(piece, 0) for piece in self._part(0)[:AHEAD]]
        self._coming = [self._receive(None, 0) for _ in self._part(1)[:AHEAD]]

    def _run(self) -> None:
        self._sent += [self._send(piece) for piece in self._part(0)[AHEAD:]]
        self._coming += [self._receive() for _ in self._part(1)[AHEAD:]]
        last = 2 * self._group.workers - 2
        for step in range(1, last + 1):
            handles, self._coming = self._coming, self._receive_all(step + 1) if step < last else []
            for number, handle in enumerate(handles):
                piece = self._take(step, number, handle)
                if step < last:
                    self._sent.append(self._send(piece))
        for handle in self._sent:
            answer: Any = handle.wait()
            _check_length(answer, self._empty)

    def _part(self, step: int) -> list[Tensor]:
        """Return the pieces of this worker's tensor that belong to the part of a step."""
        return self._parts[(self._group.worker - step) % self._group.workers]

    def _target(self, step: int) -> list[Tensor]:
        return self._targets[(self._group.worker - step) % self._group.workers]

    def _send(self, piece: Tensor, channel: int = SUMS) -> Handle:
        return self._group.start((self._group.worker + 1) % self._group.workers, piece, channel)

    def _receive(self, into: Tensor | None = None, channel: int = SUMS) -> Handle:
        return self._group.start((self._group.worker - 1) % self._group.workers, self._empty, channel, into)

    def _receive_all(self, step: int) -> list[Handle]:
        is_sum = step >= self._group.workers
        return [self._receive(target if is_sum else None) for target in self._target(step)]

    def _take(self, step: int, number: int, handle: Handle) -> Tensor:
        """Add this worker's piece to a received one, or store a received sum; return the result."""
        target = self._target(step)[number]
        if step >= self._group.workers:
            _take(handle, target)
            return target
        received: Any = handle.wait()
        _check_length(received, target)
        is_complete = step == self._group.workers - 1
        return torch.add(received, self._part(step)[number], out=target if is_complete else received)

    def _drop(self) -> None:
        self._sent, self._coming = [], []


def _pieces(flat: Tensor, workers: int, piece_bytes: int) -> list[list[Tensor]]:
    """Return the pieces of each worker's part of the tensor, as many of each."""
    parts = torch.tensor_split(flat, workers)
    numbers = max(1, piece_bytes // flat.element_size())
    count = -(-parts[0].numel() // numbers) or 1
    return [[part[at * numbers : (at + 1) * numbers] for at in range(count)] for part in parts]


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
