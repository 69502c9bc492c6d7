"""Transport interface: operations on tensors, and on bytes, among the workers; and a worker's membership."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from stretto.collective_ops import Answer, CollectiveOp, Exchange
from stretto.errors import TransportError, explain
from stretto.membership.loop_positions import LoopPosition

Found = TypeVar("Found")
CHANNELS = 16
"""Number of channels of exchanges between two workers: 8 for callers, and for each of them one for sums of groups."""
Message: TypeAlias = bytes | Callable[[], bytes]
"""Bytes, or a function that returns them; of a broadcast it is called at the root only."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that this worker has sent and received: `counted` on its sockets, or else computed from the sizes."""

    bytes_sent: int
    bytes_received: int
    counted: bool

    def __add__(self, other: Traffic) -> Traffic:
        """Return the sum, which is counted if both are."""
        sent, received = self.bytes_sent + other.bytes_sent, self.bytes_received + other.bytes_received
        return Traffic(sent, received, self.counted and other.counted)


class Handle(Protocol):
    """Operation in progress."""

    def wait(self) -> Answer:
        """Wait for the result. Raise TransportError if a worker failed or did not contribute in time."""
        ...


class Collectives(Protocol):
    """Operations among workers, which all make the same calls in the same order, except for exchanges of pairs.

    Every wait has the time limit that the transport was created with; a failure raises TransportError.
    """

    @property
    def worker(self) -> int:
        """Rank of this worker among the present workers."""
        ...

    @property
    def workers(self) -> int:
        """Number of present workers."""
        ...

    def submit(self, op: CollectiveOp) -> Handle:
        """Start an operation. Its tensor must not be used until the handle's `wait` has returned."""
        ...

    def group(self, ranks: Sequence[int]) -> Collectives:
        """Return a transport among the workers of these ranks, in this order, which all make it.

        It ends when this transport is aborted or closed. A `PeerGroup` suits every transport that has `Exchange`.
        """
        ...

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """Return the messages of all workers, in the order of ranks. A repeated operation calls a function again."""
        ...

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """Return the message of the root at every worker; the messages of other workers are ignored.

        If workers may fail and the root has failed, another worker becomes the root and provides the message.
        """
        ...

    def traffic(self) -> Traffic:
        """Return the bytes so far."""
        ...

    def close(self) -> None:
        """Close the connections to other workers. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Change:
    """Change of membership. Workers are given by their permanent numbers."""

    generation: int
    members: tuple[int, ...]
    gone: tuple[int, ...]
    came: tuple[int, ...]
    global_step: int
    """Largest global step that any member has been assigned."""
    rounds: int
    """Largest number of rounds that any member has committed."""
    save: bool = False
    incarnations: tuple[int, ...] = ()
    """Incarnations of the workers in `gone`."""
    behind: bool = False
    """True if other workers have committed the attempt that this worker is in."""
    share_limits: Mapping[int, int] = field(default_factory=dict)
    """Largest share of each member that has run out of memory."""


@dataclass(frozen=True, slots=True)
class JoinPosition:
    """Position of a run over a server when a worker joined it."""

    epoch_number: int
    order: bytes
    """Order of that epoch."""
    clock_zeros: dict[bytes, float]
    """Zeros of the run's clock, by the id of a machine's boot."""
    parameter_set: int
    facts: bytes
    """Division of the model among the ranks of a worker, or, of whole workers, the names of the parameters at the
    server, and all other tensors of the model. Empty if nothing was stored."""


class Loop(Protocol):
    """A worker's training loop, as its transport sees it. Heartbeats call `operations_begun` from another thread.

    The bodies here are those of a loop that has not begun.
    """

    def place(self) -> LoopPosition | None:
        """Return the script's position in its loop: all workers in one operation must be in the same epoch."""
        return None

    def counts(self) -> tuple[int, int]:
        """Return the number of assigned global steps, and of committed rounds."""
        return 0, 0

    def operations_begun(self) -> int:
        """Return a number that grows with each collective operation, or batch, that the worker begins."""
        return -1

    def clock_zero(self) -> tuple[bytes, float]:
        """Return the id of this boot and the zero of the run's clock on it, for joining workers."""
        return b"", 0.0

    def on_generation(self, change: Change) -> None:
        """Follow a changed membership, before anything is exchanged among the new members."""
        return


class NoLoop(Loop):
    """A loop that has not begun."""


class Transport(Collectives):
    """Operations among the workers of a run, and this worker's membership.

    As defined here the membership is fixed: nothing joins, leaves or is repeated.
    """

    repeats_attempts = False
    """True if workers may fail: the others repeat an attempt, whose inputs and results have to be kept."""
    arrives = False
    """True if this worker joined a run that had begun, and so takes no part in its initial agreements."""
    begins_again = False
    """True if the run may have checkpoints, though no member of the generation has state: earlier members failed."""
    siblings: Collectives | None = None
    """The ranks of this worker's replica; None if it has one rank."""
    join_position: JoinPosition | None = None
    """Position of a run over a server when this worker joined it; None for a worker that started with it."""
    _loop: Loop = NoLoop()

    def __init__(self, worker: int, workers: int) -> None:
        self._worker, self._workers = worker, workers

    @property
    def worker(self) -> int:
        """Rank of this worker among the present workers."""
        return self._worker

    @property
    def workers(self) -> int:
        """Number of present workers."""
        return self._workers

    @property
    def number(self) -> int:
        """Permanent number of this worker."""
        return self.worker

    @property
    def members(self) -> tuple[int, ...]:
        """Permanent numbers of the present workers."""
        return tuple(range(self.workers))

    @property
    def share_limits(self) -> Mapping[int, int]:
        """Largest share of each present worker that has run out of memory."""
        return {}

    @property
    def has_others(self) -> bool:
        """True if other workers are present or may join."""
        return self.workers > 1 or self.repeats_attempts

    @property
    def can_leave(self) -> bool:
        """True if the others can continue without this worker."""
        return False

    @property
    def begun(self) -> int | None:
        """Number of operations that this worker has begun, equal at all workers between two; None if not counted."""
        return None

    @property
    def server(self) -> Any:
        """The parameter-server client, for requests of this worker alone; None without a server."""
        return None

    def attempt(
        self, act: Callable[[], Found], again: Callable[[], Found] | None = None, in_pairs: bool = False
    ) -> Found:
        """Run operations that belong together. If they break, `again` (or `act`) runs among the remaining members.

        `in_pairs` is True, at all workers, if any worker may submit an Exchange in it.
        """
        return act()

    def broadcast_by_ranks(self, make: Callable[[], bytes]) -> bytes:
        """Return the first worker's message at every worker, which its ranks make together; all ranks call this."""
        return self.broadcast_bytes(make)

    def group(self, ranks: Sequence[int]) -> Collectives:
        """Return a transport among the workers of these ranks."""
        found: Collectives = import_module("stretto.transport.peer_group").PeerGroup(self, ranks)
        return found

    # --- membership -----------------------------------------------------------------------------------------------

    def attach(self, loop: Loop) -> None:
        """Follow the position of this training loop, and notify it of changes."""
        self._loop = loop

    def operations_begun(self) -> int:
        """Return the number of operations that the loop has begun, for heartbeats; -1 before the first loop."""
        return self._loop.operations_begun()

    def doing(self, text: str, global_step: int) -> None:
        """Publish what this worker does, and its global step."""

    def checkpoint_took(self, seconds: float) -> None:
        """Publish the cost of the last checkpoint at the worker that wrote it; 0 elsewhere; infinity if none can be."""

    def receive_state(self, frozen: Callable[[], bytes]) -> bytes:
        """Return the state of the run at a worker that arrives, from the first member that has it.

        `frozen` gives the checksum of what this worker need not receive if it has the same.
        """
        return b""

    def caught_up(self) -> None:
        """Note that this worker has reached the others, with which it begins a section."""
        self.arrives = self.begins_again = False
        self.join_position = None

    def is_to_rest(self) -> bool:
        """Return True if a pause is requested, and this worker is as far as the others."""
        return False

    def rest(self, frozen: Callable[[], bytes], state: Callable[[bool], bytes]) -> Change | None:
        """Pause until all workers do; give the `state` to workers that join. Return the change of membership.

        `state` is given True if these have what `frozen` is the checksum of.
        Returns None if this worker must first complete a later step.
        """
        return None

    def mend(self) -> None:
        """Take part in forming the next generation, for which other workers may wait outside of operations."""

    def waiting(self) -> AbstractContextManager[object]:
        """Return the context of each wait for another rank of this replica, outside of operations among workers."""
        return nullcontext()

    def request_leave(self) -> None:
        """Request to leave gracefully at the next pause. May be called from a signal handler."""

    def abandon(self, stays_out: bool = False) -> None:
        """Let the others continue after the script has failed here, if they would wait for this worker.

        `stays_out` is True for a worker that takes no part in the run.
        """


PairKey: TypeAlias = tuple[int, int, int, int]
"""An exchange: the ranks of its two workers in order, its channel and its number."""


class PairNumbers:
    """Numbers of one worker's exchanges, counted from 1 for each peer and channel, and so equal at both workers."""

    def __init__(self) -> None:
        self._numbers: Counter[tuple[int, int]] = Counter()

    def next(self, op: Exchange) -> int:
        """Return the number of an exchange that begins."""
        self._numbers[op.peer, op.channel] += 1
        return self._numbers[op.peer, op.channel]

    def next_key(self, op: Exchange, worker: int) -> PairKey:
        """Return the key of an exchange that begins at this worker, which is equal at its peer."""
        first, second = sorted((worker, op.peer))
        return first, second, op.channel, self.next(op)


def check_peer(op: Exchange, worker: int, workers: int) -> None:
    """Raise TransportError unless the peer of an exchange is another worker."""
    if op.peer == worker or not 0 <= op.peer < workers:
        others = [rank for rank in range(workers) if rank != worker]
        problem = f"worker {worker} can exchange tensors with another worker only"
        got, to_type = f"rank {op.peer} among {workers} workers", "Exchange(peer, tensor) with one of these ranks"
        expected = f"one of the ranks {', '.join(map(str, others))}" if others else "at least 2 workers"
        raise TransportError(explain(problem, got=got, expected=expected, to_type=to_type if others else "-n 2"))


def made(message: Message) -> bytes:
    """Return the bytes of a message."""
    return message if isinstance(message, bytes) else message()


def nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's numbers."""
    return tensor.numel() * tensor.element_size()


def as_bytes(message: bytes) -> Tensor:
    """Return a flat tensor with a copy of the bytes."""
    return (
        torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if message
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
