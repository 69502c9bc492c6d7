"""Transport between threads of one process: for tests, and as the reference implementation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stretto.collective_ops import AllReduceMean, Answer, CollectiveOp, answer
from stretto.errors import TransportError
from stretto.transport.interface import Message, Traffic, Transport, made, nbytes


class _Table:
    """Contributions by operation. An operation is complete when every worker has contributed."""

    def __init__(self, workers: int, timeout_s: float) -> None:
        self.workers = workers
        self.timeout_s = timeout_s
        self.gone: set[int] = set()
        self._changed = threading.Condition()
        self._laid: dict[int, dict[int, Any]] = {}
        self._taken: dict[int, int] = {}
        self._answers: dict[int, Any] = {}

    def lay(self, round_: int, worker: int, thing: object) -> None:
        with self._changed:
            self._laid.setdefault(round_, {})[worker] = thing
            self._changed.notify_all()

    def take(self, round_: int, combine: Callable[[list[Any]], Any]) -> Any:
        """Wait until the operation is complete, and return its result; the last worker to do so removes it."""
        with self._changed:
            whole = self._changed.wait_for(lambda: self._whole(round_) or self._broken(round_), self.timeout_s)
            if not whole or not self._whole(round_):
                raise TransportError(self._missing(round_))
            if round_ not in self._answers:
                laid = self._laid[round_]
                self._answers[round_] = combine([laid[worker] for worker in range(self.workers)])
            return self._leave(round_)

    def _leave(self, round_: int) -> Any:
        self._taken[round_] = self._taken.get(round_, 0) + 1
        if self._taken[round_] < self.workers:
            return self._answers[round_]
        del self._laid[round_], self._taken[round_]
        return self._answers.pop(round_)

    def leave_for_good(self, worker: int) -> None:
        with self._changed:
            self.gone.add(worker)
            self._changed.notify_all()

    def _whole(self, round_: int) -> bool:
        return len(self._laid.get(round_, {})) == self.workers

    def _broken(self, round_: int) -> bool:
        return bool(self.gone - set(self._laid.get(round_, {})))

    def _missing(self, round_: int) -> str:
        missing = sorted(set(range(self.workers)) - set(self._laid.get(round_, {})))
        why = "left" if set(missing) & self.gone else f"did not contribute within {self.timeout_s:g} s"
        return f"worker {', '.join(map(str, missing))} {why} (exchange {round_})"


@dataclass(slots=True)
class _Handle:
    transport: InMemoryTransport
    round_: int

    def wait(self) -> Answer:
        found: Answer = self.transport.table.take(self.round_, answer)
        return found.clone() if isinstance(found, Tensor) else [one.clone() for one in found]


class InMemoryTransport(Transport):
    """One worker's end of an in-memory transport. Traffic is computed as that of a ring."""

    def __init__(self, worker: int, table: _Table) -> None:
        super().__init__(worker, table.workers)
        self.table = table
        self._round = 0
        self._bytes_sent = 0

    def submit(self, op: CollectiveOp) -> _Handle:
        """Contribute to a collective operation."""
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

    def _lay(self, thing: object, sent: float) -> int:
        self._round += 1
        self._bytes_sent += round(sent)
        self.table.lay(self._round, self.worker, thing)
        return self._round


def wires(workers: int, timeout_s: float = 60.0) -> list[InMemoryTransport]:
    """Return the ends of one transport for this number of workers, each to be used by its own thread."""
    table = _Table(workers, timeout_s)
    return [InMemoryTransport(worker, table) for worker in range(workers)]
