"""Transport between hosts: authenticated and encrypted exchanges of pairs, of which all other operations are made.

A thread of each worker receives. It, and the thread that submits, send what the streams of the peers have due; the
streams are socket-free (`peer_stream.py`), and one lock guards them and the sending sockets.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from stretto.collective_ops import AllReduceMean, Answer, CollectiveOp, Exchange
from stretto.errors import BrokenTransportError, NothingCameError, TransportError, UnreachedError
from stretto.notices import say_once
from stretto.transport.device_groups import by_host
from stretto.transport.encrypted_sockets import LINGER_S, MemberSockets, ReservedPort
from stretto.transport.interface import CHANNELS, Handle, Message, Traffic, Transport, check_peer, nbytes
from stretto.transport.noise import AuthenticationError
from stretto.transport.peer_group import PeerGroup
from stretto.transport.peer_means import Mean
from stretto.transport.peer_stream import HELLO, Head, PairExchange, PeerStream, ended
from stretto.transport.relay_tunnels import RelayAccess
from stretto.transport.secure_connections import IncomingMessage, wire_bytes
from stretto.transport.worker_endpoint import Endpoint

MANY = 16
"""Messages that are received before another thread can submit."""
ALONE_BYTES = 1 << 20
"""Size in bytes from which a mean proceeds in a thread of its own while the caller computes."""


class EncryptedTransport(Transport):
    """One worker's end of a generation, which `connect` forms. A wait fails after `timeout_s` without a message.

    The first failure of a wait aborts the transport, and so notifies the other workers; all waits and later operations
    raise BrokenTransportError. A member that does not keep to the protocol is named in a TransportError.
    """

    def __init__(
        self,
        port: ReservedPort,
        generation: int,
        rank: int,
        members: Sequence[tuple[int, Endpoint]],
        timeout_s: float,
        relay: RelayAccess | None = None,
        closed: set[str] | None = None,
    ) -> None:
        super().__init__(rank, len(members))
        self.timeout_s = timeout_s
        self._numbers = [number for number, _ in members]
        self._names = [f"worker {number}" for number in self._numbers]
        self._streams = {
            one: PeerStream(self._names[rank], self._names[one], _room)
            for one in range(len(members)) if one != rank
        }  # fmt: skip
        self._sockets = MemberSockets(port, rank, [end for _, end in members], relay, generation, closed)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._error: TransportError | None = None
        self._is_closing = False
        self._greeted, self._gone = set[int](), set[int]()
        """Ranks of the members that have connected, and of the members that have ended the generation."""
        self._progress = 0
        """Number of received messages."""
        self._bytes_sent = self._bytes_received = 0
        self._everyone, self._gathers, self._broadcasts = (
            PeerGroup(self, range(len(members)), channel=kind * CHANNELS) for kind in (1, 2, 3)
        )
        """Channels for each kind of operation: workers in different ones wait until the coordinator ends them."""
        self._means = _Means(self._everyone)
        self._thread = threading.Thread(target=self._run, name="encrypted transport", daemon=True)
        self._thread.start()

    def connect(self, limit_s: float) -> None:
        """Wait until all members have connected, and accept no further connections.

        Raise UnreachedError if one of them has not connected after `limit_s`, or when the generation is aborted after
        half of that time; BrokenTransportError if it is aborted earlier.
        """
        began = time.monotonic()
        with self._changed:
            for rank in self._streams if self._error is None else ():
                self._send(rank, Head(HELLO).packed(), None)
            self._sockets.wake()
            self._changed.wait_for(lambda: self._error or len(self._greeted) == len(self._streams), limit_s)
            missing = [rank for rank in self._streams if rank not in self._greeted]
        if missing:
            who = f"{self._names[self.worker]} could not connect with {', '.join(self._names[one] for one in missing)}"
            why = f": {self._error}" if self._error is not None else f" within {limit_s:g} s"
            self._abort(BrokenTransportError(who + why))
            if time.monotonic() - began >= limit_s / 2:
                raise UnreachedError(who + why, [self._numbers[one] for one in missing])
        self._raise_error()

    def submit(self, op: CollectiveOp) -> Handle:
        """Start an operation. Tensors of devices pass through the memory of the host."""
        if op.tensor.device.type != "cpu":
            return by_host(self.submit, op)
        if isinstance(op, Exchange):
            check_peer(op, self.worker, self.workers)
            return _ExchangeHandle(self, self._exchange(op))
        if isinstance(op, AllReduceMean):
            return self._means.start(op.tensor)
        return self._everyone.submit(op)

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """Return the messages of all workers."""
        return self._gathers.all_gather_bytes(message)

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """Return the root's message."""
        return self._broadcasts.broadcast_bytes(message, root)

    def traffic(self) -> Traffic:
        """Return the bytes of all messages with their frames and encryption, computed from their lengths."""
        return Traffic(self._bytes_sent, self._bytes_received, counted=False)

    def connect_devices(self, device: torch.device, failure_timeout_s: float | None = None) -> None:
        """Do nothing: a group of devices would not be encrypted, so tensors pass through the memory of the hosts."""

    def failure(self, error: Exception, what: str, waited_s: float = 0.0) -> TransportError:
        """Return the error of a failed wait, and abort."""
        text = f"{self._names[self.worker]} waited {waited_s:.1f} s for {what}; another worker failed or is too late"
        failed = BrokenTransportError(f"{text}: {error}")
        self._abort(failed)
        return failed

    def abort(self) -> None:
        """Abort all operations, now and later. Callable from any thread. Idempotent."""
        self._abort(BrokenTransportError(f"{self._names[self.worker]} waited; the generation was aborted"))

    def close(self) -> None:
        """Send the last messages, unless the transport was aborted, and close the connections."""
        with self._changed:
            self._is_closing = True
        self._sockets.wake()
        self._means.close()
        if self._error is None and self._thread is not threading.current_thread():
            self._thread.join()

    # --- calls of handles ---------------------------------------------------------------------------------------------

    def wait(self, exchange: PairExchange) -> Tensor:
        """Wait for an exchange."""
        began = time.monotonic()
        heard = self._progress
        while not exchange.is_over.wait(self.timeout_s):
            if heard == self._progress:
                what = f"an exchange with {self._names[exchange.peer]}"
                error = self.failure(RuntimeError("no message has arrived"), what, time.monotonic() - began)
                raise NothingCameError(str(error))
            heard = self._progress
        if exchange.result is not None:
            return exchange.result
        failure = exchange.error
        assert failure is not None
        if isinstance(failure, BrokenTransportError):
            self._abort(failure)
        raise type(failure)(str(failure))

    def _exchange(self, op: Exchange) -> PairExchange:
        with self._lock:
            stream = self._streams[op.peer]
            if self._error is None and self._is_closing:
                stream.end(BrokenTransportError("the transport is closed"))
            exchange = stream.submit(op)
            self._flush(op.peer)
        return exchange

    def _raise_error(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error))

    # --- with the lock ------------------------------------------------------------------------------------------------

    def _flush(self, rank: int) -> None:
        """Send what the stream of a peer has due."""
        if self._error is None and not self._is_closing:
            for head, payload in self._streams[rank].due():
                self._send(rank, head, payload)

    def _send(self, rank: int, head: bytes, payload: Any) -> None:
        self._bytes_sent += wire_bytes(0 if payload is None else len(payload))
        self._sockets.send(rank, head, b"" if payload is None else payload)

    def _end(self, error: TransportError) -> None:
        """End all exchanges. The other workers are notified by the end of the connections."""
        self._error = self._error or error
        for stream in self._streams.values():
            stream.end(self._error)
        self._changed.notify_all()

    def _abort(self, error: TransportError) -> None:
        with self._lock:
            self._end(error)
        self._sockets.wake()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._error is None and not self._is_closing:
                self._proceed()
        except Exception as error:
            with self._lock:
                self._end(TransportError(f"{self._names[self.worker]} can't continue its exchanges: {error!r}"))
        self._sockets.close(LINGER_S if self._error is None else None, self._gone)
        with self._lock:
            for stream in self._streams.values():
                stream.end(BrokenTransportError("the transport is closed"))

    def _proceed(self) -> None:
        """Wait for the next events of the sockets, and act on them."""
        with self._lock:
            watch = self._sockets.watch()
        ready = watch.wait()
        with self._lock:
            self._receive(ready)  # before others are accepted, which may close a connection that has sent nothing
            self._sockets.proceed(ready)
        for address in self._sockets.refused():
            say_once(f"a connection from {address} was refused, since its key is not that of a member")
        for host in self._sockets.redirected():
            say_once(f"no port of {host} was reached from here: what is sent to its workers passes the relay")

    def _receive(self, ready: set[int]) -> None:
        """Take messages that have arrived; all of them before the end of a connection."""
        for rank, message in self._sockets.receive(ready, MANY):
            self._progress += 1
            self._bytes_received += wire_bytes(message.length)
            try:
                self._take(rank, message)
            except AuthenticationError:
                self._lose(rank)
            except TransportError as error:
                self._end(error)
                return
        for rank in self._sockets.ended():
            self._lose(rank)

    def _take(self, rank: int, message: IncomingMessage) -> None:
        head = Head.unpacked(message.head)
        if head.kind == HELLO:
            self._greet(rank)
        elif rank not in self._greeted:
            raise TransportError(f"{self._names[rank]} has sent a message that no worker sends")
        elif (stream := self._streams[rank]).error is None:
            payload = stream.room(head, message.length) if message.length else None
            if payload is not None:
                message.open_into(payload)
            stream.receive(head, payload)
            self._flush(rank)

    def _greet(self, rank: int) -> None:
        self._greeted.add(rank)
        if len(self._greeted) == len(self._streams):
            self._sockets.accept_no_more()
            self._changed.notify_all()

    def _lose(self, rank: int) -> None:
        self._gone.add(rank)
        self._streams[rank].end(ended(self._names[rank]))


@dataclass(slots=True)
class _ExchangeHandle:
    transport: EncryptedTransport
    exchange: PairExchange

    def wait(self) -> Tensor:
        return self.transport.wait(self.exchange)


class _Means:
    """Means of all workers, which a thread advances while the caller computes. It ends with `close`."""

    def __init__(self, group: PeerGroup) -> None:
        self._group = group
        self._turn = threading.Lock()
        self._orders: queue.SimpleQueue[Mean | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, tensor: Tensor) -> _SharedMeanHandle:
        """Start a mean, which is written into the tensor if it is contiguous."""
        mean = self._group.start_mean(tensor)
        if nbytes(tensor) >= ALONE_BYTES:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="means", daemon=True)
                self._thread.start()
            self._orders.put(mean)
        return _SharedMeanHandle(self, mean)

    def finish(self, mean: Mean) -> Tensor:
        """Complete a mean and those before it. Only one thread at a time advances them."""
        with self._turn:
            return mean.wait()

    def close(self) -> None:
        """End the thread after the means that were started."""
        self._orders.put(None)

    def _run(self) -> None:
        while (mean := self._orders.get()) is not None:
            with contextlib.suppress(TransportError):  # it is raised in the wait of the mean's handle
                self.finish(mean)
            del mean


@dataclass(slots=True)
class _SharedMeanHandle:
    means: _Means
    mean: Mean

    def wait(self) -> Answer:
        return self.means.finish(self.mean)


def _room() -> int:
    """Return the bytes that a tensor of another worker may have."""
    free: Callable[[], Any] = psutil.virtual_memory
    return int(free().available) // 2
