"""A worker's side of the script's barriers: asks the coordinator for the missing workers, or reads a store.

A worker repeats its question until no worker is missing, so every wait ends: with the reply, or with a TransportError
that names the missing workers after the time limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq

from stretto.errors import TransportError, explain
from stretto.membership.barriers import EVERYBODY, NOBODY, Arrive, Missing, Position
from stretto.process_config import WorkerConfig
from stretto.security import WorkerKeys, use_keys, worker_keys

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

FIRST_S, LONGEST_S = 0.005, 0.1
"""Time in seconds between two questions, at first and at most."""
ANSWER_S = 1.0
"""Time in seconds after which a question without a reply is repeated."""

_ENCODER = msgspec.msgpack.Encoder()
_MISSING = msgspec.msgpack.Decoder(Missing)


class Barrier(Protocol):
    """Interface of barriers."""

    def begin(self, place: Callable[[], int]) -> None:
        """Note that training begins; `place` returns the number of collective operations that this worker has begun."""
        ...

    def announce(self, position: Position) -> None:
        """Report a position without waiting."""
        ...

    def wait(self, position: Position, of: int, mend: Callable[[], None]) -> bool:
        """Wait at a position for worker `of`, or EVERYBODY; call `mend` between two questions.

        Return True if this worker is to act in place of worker `of`, which failed before it had. Raises TransportError
        if workers are still missing after the time limit.
        """
        ...

    def give(self, position: Position, of: int, value: bytes, mend: Callable[[], None]) -> bytes:
        """Return the value of worker `of` at this position, where each worker gives its own.

        That is the one of the first worker in its place if it failed before. Raises TransportError as `wait`.
        """
        ...


class CoordinatorBarrier:
    """Barriers at the coordinator. The first one connects."""

    def __init__(self, worker: int, incarnation: int, address: str, keys: WorkerKeys | None, limit_s: float) -> None:
        self._worker, self._incarnation, self._address = worker, incarnation, address
        self._keys, self._limit_s = keys, limit_s
        self._dealer: Any = None

    def begin(self, place: Callable[[], int]) -> None:
        """Do nothing: heartbeats report the place."""

    def announce(self, position: Position) -> None:
        """Report a position; return once the coordinator has replied."""
        self._ask_until(Arrive(position, NOBODY), lambda: None)

    def wait(self, position: Position, of: int, mend: Callable[[], None]) -> bool:
        """Ask the coordinator, and wait."""
        return self._ask_until(Arrive(position, of), mend).workers != []

    def give(self, position: Position, of: int, value: bytes, mend: Callable[[], None]) -> bytes:
        """Ask the coordinator for the value, and give this worker's own where no other worker will."""
        found = self._ask_until(Arrive(position, of), mend).value if of != self._worker else None
        while found is None:
            found = self._ask_until(Arrive(position, NOBODY, value), mend).value
        return found

    def _ask_until(self, message: Arrive, mend: Callable[[], None]) -> Missing:
        limit, pause_s = time.monotonic() + self._limit_s, FIRST_S
        missing: list[int] | None = None
        while time.monotonic() < limit:
            reply = self._ask(message)
            missing = reply.workers if reply is not None else missing
            if reply is not None and reply.workers in ([], [self._worker]):
                return reply
            mend()
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LONGEST_S)
        raise late(self._worker, missing, self._limit_s)

    def _ask(self, message: Arrive) -> Missing | None:
        """Return the reply; None without one in time."""
        dealer = self._connected()
        try:
            dealer.send(_ENCODER.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # the coordinator is being started again
            return None
        reply = None
        while dealer.poll(0 if reply is not None else int(ANSWER_S * 1000)):  # the last one is the newest
            reply = dealer.recv() or reply
        return _MISSING.decode(reply) if reply is not None else None

    def _connected(self) -> Any:
        if self._dealer is None:
            dealer: Any = zmq.Context.instance().socket(zmq.DEALER)
            self._dealer = dealer
            name = b"barrier %d.%d" % (self._worker, self._incarnation)
            for option, value in {zmq.LINGER: 0, zmq.RECONNECT_IVL: 20}.items():
                dealer.setsockopt(option, value)
            use_keys(dealer, name, self._keys)
            dealer.connect(self._address if "://" in self._address else f"tcp://{self._address}")
        return self._dealer


class StoreBarrier:
    """Barriers in the rendezvous store of workers without a coordinator, as under torchrun."""

    def __init__(self, worker: int, workers: int, store: Callable[[], Store], limit_s: float) -> None:
        self._worker, self._workers, self._make = worker, workers, store
        self._limit_s = limit_s
        self._store: Store | None = None

    def begin(self, place: Callable[[], int]) -> None:
        """Do nothing: there are no heartbeats."""

    def announce(self, position: Position) -> None:
        """Report a position."""
        self._connected().set(_key(position, self._worker), "1")

    def wait(self, position: Position, of: int, mend: Callable[[], None]) -> bool:
        """Report a position and wait. No worker can be replaced here, so `mend` is not called."""
        self.announce(position)
        awaited = [worker for worker in range(self._workers) if worker != self._worker and of in (worker, EVERYBODY)]
        limit = time.monotonic() + self._limit_s
        for awaited_worker in awaited:
            self._wait_for(position, awaited_worker, limit)
        return False

    def give(self, position: Position, of: int, value: bytes, mend: Callable[[], None]) -> bytes:
        """Return the value that worker `of` has stored."""
        if of == self._worker:
            self._connected().set(_key(position, of), value.hex())
        self._wait_for(position, of, time.monotonic() + self._limit_s)
        return bytes.fromhex(self._connected().get(_key(position, of)).decode())

    def _wait_for(self, position: Position, worker: int, limit: float) -> None:
        left_s = max(limit - time.monotonic(), 0.001)
        try:
            self._connected().wait([_key(position, worker)], timedelta(seconds=left_s))
        except RuntimeError:
            raise late(self._worker, [worker], self._limit_s) from None

    def _connected(self) -> Store:
        if self._store is None:
            self._store = self._make()
        return self._store


def _key(position: Position, worker: int) -> str:
    return f"barrier/{position.section}/{position.place}/{position.label}/{position.index}/{worker}"


def late(worker: int, missing: list[int] | None, limit_s: float) -> TransportError:
    """Return the error of a worker that has waited too long at a barrier."""
    awaited = f"worker {', '.join(map(str, missing))}" if missing else "the coordinator, which did not answer"
    problem = f"worker {worker} waited {limit_s:g} s at a barrier (stretto.barrier, main_first or save) for {awaited}"
    expected = "a call that all workers come to: one inside `if stretto.is_main():` stops here"
    return TransportError(
        explain(
            problem, got="no sign that it reached the barrier", expected=expected, to_type=f"--timeout {limit_s * 2:g}"
        )
    )


def barrier_of(config: WorkerConfig) -> Barrier | None:
    """Return the barrier of a worker that a launcher has started; None for a single worker, and for ranks but 0."""
    limit_s = config.options.timeout_s
    if config.rank or config.world_size == 1 < config.ranks:
        return None
    if config.coordinator is not None:
        keys = worker_keys(config.keys)
        return CoordinatorBarrier(config.worker, config.incarnation, config.coordinator, keys, limit_s)
    if config.world_size == 1:
        return None

    def store() -> Store:
        from stretto.transport.env_rendezvous import open_store

        return open_store(config, limit_s)

    return StoreBarrier(config.worker, config.world_size, store, limit_s)
