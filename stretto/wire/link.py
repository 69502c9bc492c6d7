"""One worker's connection to one socket of a server: parcels out, their replies in, a limit on every wait."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.utils.garbage  # its handler at exit has to be registered before ours, which runs first and still sends
from torch import Tensor
from zmq.utils.monitor import parse_monitor_message

from stretto.errors import WireError
from stretto.server import messages as m
from stretto.server.memory import keep_freed_memory
from stretto.server.parcels import LARGEST_FRAME, Assembly, Pieces, encode, placed
from stretto.server.service import SMALL_BYTES, WorkerKeys, name_of
from stretto.wire.server import ServerWire, Sink
from stretto.wire.tcp import tcp_bytes

LISTEN_MS = 200
"""How long a message is waited for before it is asked what has become of the connection."""
WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class SocketLink:
    """A connection of one worker over ZeroMQ. `called` is who is at the other end, for what a person reads."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        worker: int,
        keys: WorkerKeys | None,
        called: str,
        timeout_s: float,
    ) -> None:
        self.called, self.address = called, address
        self._timeout_s = timeout_s
        self._assembly = Assembly()
        self._numbers = 0
        self._replies: dict[int, tuple[m.Body, list[Pieces]]] = {}
        self._sink: tuple[int, Sink] | None = None
        """Where the pieces of the reply that is waited for go."""
        self._ended_traffic = (0, 0)
        self._descriptor: int | None = None
        self._problem = ""
        self._socket = _dealer(context, worker, keys)
        self._monitor = self._socket.get_monitor_socket(WATCHED)
        self._socket.connect(address)

    def send(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> int:
        """Send a parcel; returns its number."""
        self._numbers += 1
        small = sum(one.nbytes for one in tensors) < SMALL_BYTES
        for message in encode(self._numbers, body, tensors):
            self._socket.send_multipart(message, copy=small)
        return self._numbers

    def wait(self, number: int, sink: Sink | None = None) -> tuple[m.Body, list[Pieces]]:
        """The reply to a parcel."""
        limit = time.monotonic() + self._timeout_s
        self._sink = (number, sink) if sink is not None else None
        while number not in self._replies:
            self._receive(limit)
        self._sink = None
        body, tensors = self._replies.pop(number)
        if isinstance(body, m.Refused):
            raise WireError(f"{self.called} refused: {body.text}")
        if sink is not None:
            _pour(tensors, sink)
        return body, tensors

    def is_there(self, number: int) -> bool:
        """Whether the reply has come; never waits."""
        while number not in self._replies and self._take(zmq.NOBLOCK):
            pass
        return number in self._replies

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received, as the kernel counts them."""
        if not self._socket.closed:
            self._heed()
        now = tcp_bytes(self._descriptor) if self._descriptor is not None else None
        if now is not None:
            self._ended_traffic = now
        return self._ended_traffic

    def close(self) -> None:
        """Say good-bye, and let go. Idempotent."""
        if self._socket.closed:
            return
        self.traffic()
        if not self._problem:
            self._socket.send_multipart(list(next(iter(encode(0, m.Leave())))))
        self._descriptor = None
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=1000)

    def _receive(self, limit: float) -> None:
        """Take what comes next; before a problem is told, what came before it is taken."""
        if self._take():
            return
        self._heed()
        if self._problem:
            raise WireError(f"{self.called} at {self.address} {self._problem}")
        if time.monotonic() > limit:
            raise WireError(f"{self.called} at {self.address} did not answer within {self._timeout_s:g} s")

    def _take(self, flags: int = 0) -> bool:
        """Take in a message; False when none came for a while, or at once with NOBLOCK."""
        try:
            first, *chunks = self._socket.recv_multipart(flags, copy=False)
        except zmq.Again:
            return False
        if len(first):
            self._assembly.begin(first)
        is_whole = self._assembly.add(chunks)
        if self._sink is not None and self._sink[0] == self._assembly.number:
            for index, at, piece in self._assembly.drain():
                self._sink[1](index, at, piece)
        if is_whole:
            head, tensors = self._assembly.take()
            self._replies[head.number] = head.body, tensors
        return True

    def _heed(self) -> None:
        """Learn what has become of the connection."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_CONNECTED:
                self._descriptor = int(event["value"])
            elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._problem = "refused this worker's key"
            else:
                self._descriptor = None
                self._problem = self._problem or "went away"


def dial(worker: int, workers: int, addresses: Sequence[str], keys: WorkerKeys | None, timeout_s: float) -> ServerWire:
    """One worker's end of a parameter server. `addresses` are the coordinator's and the shards'."""
    keep_freed_memory()
    context = zmq.Context()
    context.set(zmq.IO_THREADS, 1)
    names = ["the coordinator", *(f"server {shard}" for shard in range(len(addresses) - 1))]
    links = [
        SocketLink(context, address, worker, keys, name, timeout_s)
        for address, name in zip(addresses, names, strict=True)
    ]
    wire = ServerWire(worker, workers, links[0], links[1:])
    wire.when_closed(context.term)
    return wire


def _pour(tensors: list[Pieces], sink: Sink) -> None:
    """Give a reply that has come before it was waited for to a sink."""
    for index, pieces in enumerate(tensors):
        for at, piece in placed(pieces):
            sink(index, at, piece)


def _dealer(context: zmq.Context[Any], worker: int, keys: WorkerKeys | None) -> Any:
    dealer = context.socket(zmq.DEALER)
    for option, value in {
        zmq.IDENTITY: name_of(worker),
        zmq.SNDHWM: 0,
        zmq.RCVHWM: 0,
        zmq.MAXMSGSIZE: LARGEST_FRAME,
        zmq.RCVTIMEO: LISTEN_MS,
        zmq.RECONNECT_IVL: 20,
        zmq.RECONNECT_IVL_MAX: 1000,
    }.items():
        dealer.setsockopt(option, value)
    dealer.copy_threshold = SMALL_BYTES
    if keys is not None:
        dealer.curve_serverkey = keys.servers
        dealer.curve_publickey, dealer.curve_secretkey = keys.public, keys.secret
    return dealer
