"""Transport between threads of one process: for tests, and as the reference implementation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from stretto.collective_ops import AllReduceMean, Answer, CollectiveOp, Exchange, answer, swapped
from stretto.errors import TransportError
from stretto.transport.interface import Message, PairKey, PairNumbers, Traffic, Transport, check_peer, made, nbytes

Key: TypeAlias = int | PairKey
"""Number of an operation of all workers, or key of an exchange."""


class _Table:
    """Contributions by operation. An operation is complete when every worker that takes part has contributed."""

    def __init__(self, workers: int, timeout_s: float) -> None:
        self.workers = workers
        self.timeout_s = timeout_s
        self.gone: set[int] = set()
        self._changed = threading.Condition()
        self._laid: dict[Key, dict[int, Any]] = {}
        self._taken: dict[Key, int] = {}
        self._answers: dict[Key, Any] = {}

    def lay(self, round_: Key, worker: int, thing: object) -> None:
        with self._changed:
            self._laid.setdefault(round_, {})[worker] = thing
            self._changed.notify_all()

    def take(self, round_: Key, combine: Callable[[list[Any]], Any]) -> Any:
        """Wait until the operation is complete, and return its result; the last worker to do so removes it."""
        with self._changed:
            whole = self._changed.wait_for(lambda: self._whole(round_) or self._broken(round_), self.timeout_s)
            if not whole or not self._whole(round_):
                raise TransportError(self._missing(round_))
            if round_ not in self._answers:
                laid = self._laid[round_]
                self._answers[round_] = combine([laid[worker] for worker in self._members(round_)])
            return self._leave(round_)

    def _members(self, round_: Key) -> Sequence[int]:
        return range(self.workers) if isinstance(round_, int) else round_[:2]

    def _leave(self, round_: Key) -> Any:
        self._taken[round_] = self._taken.get(round_, 0) + 1
        if self._taken[round_] < len(self._members(round_)):
            return self._answers[round_]
        del self._laid[round_], self._taken[round_]
        return self._answers.pop(round_)

    def leave_for_good(self, worker: int) -> None:
        with self._changed:
            self.gone.add(worker)
            self._changed.notify_all()

    def _awaited(self, round_: Key) -> set[int]:
        return set(self._members(round_)) - set(self._laid.get(round_, {}))

    def _whole(self, round_: Key) -> bool:
        return not self._awaited(round_)

    def _broken(self, round_: Key) -> bool:
        return bool(self.gone & self._awaited(round_))

    def _missing(self, round_: Key) -> str:
        missing = self._awaited(round_)
        why = "left" if missing & self.gone else f"did not contribute within {self.timeout_s:g} s"
        operation = f"exchange {round_}" if isinstance(round_, int) else f"exchange {round_[3]} of a pair"
        return f"worker {', '.join(map(str, sorted(missing)))} {why} ({operation})"


@dataclass(slots=True)
class _Handle:
    transport: InMemoryTransport
    round_: Key

    def wait(self) -> Answer:
        table = self.transport.table
        if not isinstance(self.round_, int):
            received: Tensor = table.take(self.round_, swapped)[self.round_.index(self.transport.worker)]
            return received
        found: Answer = table.take(self.round_, answer)
        return found.clone() if isinstance(found, Tensor) else [one.clone() for one in found]


class InMemoryTransport(Transport):
    """One worker's end of an in-memory transport. Traffic is computed as that of a ring."""

    def __init__(self, worker: int, table: _Table) -> None:
        super().__init__(worker, table.workers)
        self.table = table
        self._round = 0
        self._pair_numbers = PairNumbers()
        self._bytes_sent = 0

    def submit(self, op: CollectiveOp) -> _Handle:
        """Contribute to an operation."""
        if isinstance(op, Exchange):
            check_peer(op, self.worker, self.workers)
            key = self._pair_numbers.next_key(op, self.worker)
            return _Handle(self, self._lay(op, nbytes(op.tensor), key))
        factor = 2 * (self.workers - 1) / self.workers if isinstance(op, AllReduceMean) else self.workers - 1
        return _Handle(self, self._lay(op, factor * nbytes(op.tensor)))

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """Return the messages of all workers."""
        message = made(message)
        round_ = self._lay(message, (self.workers - 1) * len(message))
        gathered: list[bytes] = self.table.take(round_, list)
        return gathered

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """Return the root's message at every worker."""
        message = made(message) if self.worker == root else b""
        round_ = self._lay(message, (self.workers - 1) * len(message))
        told: bytes = self.table.take(round_, lambda messages: messages[root])
        return told

    def traffic(self) -> Traffic:
        """Return the bytes so far; a ring receives as much as it sends."""
        return Traffic(self._bytes_sent, self._bytes_sent, counted=True)

    def close(self) -> None:
        """Announce that this worker contributes no more."""
        self.table.leave_for_good(self.worker)

    def _lay(self, thing: object, sent: float, exchange: Key | None = None) -> Key:
        self._round += exchange is None
        round_ = self._round if exchange is None else exchange
        self._bytes_sent += round(sent)
        self.table.lay(round_, self.worker, thing)
        return round_


def wires(workers: int, timeout_s: float = 60.0) -> list[InMemoryTransport]:
    """Return the ends of one transport for this number of workers, each to be used by its own thread."""
    table = _Table(workers, timeout_s)
    return [InMemoryTransport(worker, table) for worker in range(workers)]
