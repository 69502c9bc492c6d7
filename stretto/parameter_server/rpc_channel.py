"""One worker's connection to one socket of a server: parcels out, their replies in, no wait without limit."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.utils.garbage  # its handler at exit has to be registered before ours, which runs first and still sends
from torch import Tensor
from zmq.utils.monitor import parse_monitor_message

from stretto.errors import BrokenTransportError, TransportError
from stretto.parameter_server import messages as m
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.client_types import Sink, refuse_refusals
from stretto.parameter_server.framing import LARGEST_FRAME, Assembly, Chunks, decode_head, encode, placed
from stretto.parameter_server.rpc_server import DEATH_NOTIFIER, name_of
from stretto.security import SMALL_BYTES, WorkerKeys
from stretto.transport.malloc import keep_freed_memory
from stretto.transport.tcp_info import tcp_arrived, tcp_bytes

LISTEN_MS = 25
"""How long a message is waited for before it is asked what has become of the connection, and of the exchange."""
AGAIN_S = 0.5
"""How long the news of a death wait for an answer before they are told again."""
WENT_AWAY = "went away"
WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED
NEVER_MS = 10**8
"""ZeroMQ does not connect again by itself: what is said over a new connection comes after what the last one lost.

Its own word for never, -1, can hold up the end of a context for ever.
"""


class RpcChannel:
    """A connection of one worker over ZeroMQ. `called` is who is at the other end, for what a person reads.

    With a failure timeout a service that went away is waited for so long: what had no reply is asked again, in order.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        worker: int,
        keys: WorkerKeys | None,
        called: str,
        timeout_s: float,
        life: int = 0,
        failure_timeout_s: float | None = None,
    ) -> None:
        self.called, self.address = called, address
        self._timeout_s, self._patience_s = timeout_s, failure_timeout_s
        self._name, self._keys, self._context = name_of(worker, life), keys, context
        self._asked: dict[int, tuple[m.Request, Sequence[Tensor]]] = {}
        """What waits for a reply, in order."""
        self._lost_at: float | None = None
        self._aborted = threading.Event()
        self.again: Callable[[], None] = lambda: None
        """Called when a service has come back, before what had no reply is asked again."""
        self._assembly = Assembly()
        self._numbers = 0
        self._replies: dict[int, tuple[m.Body, list[Chunks]]] = {}
        self._sink: tuple[int, Sink] | None = None
        """Where the pieces of the reply that is waited for go."""
        self._ended_traffic = self._earlier_traffic = (0, 0)
        self._descriptor: int | None = None
        self._moved: tuple[float, tuple[int, int] | None] = (0.0, None)
        """When something was last seen to arrive, here or there, and how much had until then."""
        self._problem = ""
        self._connect()

    def _connect(self) -> None:
        self._socket = _dealer(self._context, self._name, self._keys)
        watched = WATCHED
        if self._patience_s is not None:
            self._socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 0)
            watched |= zmq.EVENT_CLOSED
        self._monitor = self._socket.get_monitor_socket(watched)
        self._socket.connect(self.address)

    def send(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> int:
        """Send a parcel; returns its number."""
        self._numbers += 1
        if not isinstance(body, m.SILENT):
            self._asked[self._numbers] = body, tensors if self._patience_s is not None else ()
        self._send(self._numbers, body, tensors)
        return self._numbers

    def _send(self, number: int, body: m.Request, tensors: Sequence[Tensor]) -> None:
        small = sum(one.nbytes for one in tensors) < SMALL_BYTES
        try:
            for message in encode(number, body, tensors):
                self._socket.send_multipart(message, zmq.NOBLOCK, copy=small)
        except zmq.Again:  # nobody is there; what matters is said again
            self._problem = self._problem or WENT_AWAY

    def wait(self, number: int, sink: Sink | None = None) -> tuple[m.Body, list[Chunks]]:
        """The reply to a parcel."""
        self._moved = (time.monotonic(), None)
        self._sink = (number, sink) if sink is not None else None
        while number not in self._replies:
            self._receive()
        self._sink = None
        body, tensors = self._replies.pop(number)
        refuse_refusals(self.called, body)
        if sink is not None:
            _pour(tensors, sink)
        return body, tensors

    def is_there(self, number: int) -> bool:
        """Whether the reply has come; never waits."""
        while number not in self._replies and self._take(zmq.NOBLOCK):
            pass
        if number not in self._replies and self._patience_s is not None:
            self._heed()
            self._find_again()
        return number in self._replies

    def awaits(self, number: int) -> bool:
        """Whether a parcel has had no reply yet."""
        return number in self._asked

    def drop(self, number: int) -> None:
        """Nobody waits for the reply to this parcel any more."""
        self._asked.pop(number, None)
        self._replies.pop(number, None)

    def mutter(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> None:
        """Send a parcel whose reply nobody waits for."""
        self._send(0, body, tensors)

    def abort(self) -> None:
        """Break off what is waited for; from any thread."""
        self._aborted.set()

    def forget(self) -> None:
        """Nothing that was asked is waited for any more, and what comes now is."""
        self._aborted.clear()
        self._asked.clear()
        self._replies.clear()
        self._sink = None

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received, as the kernel counts them."""
        if not self._socket.closed:
            self._heed()
        now = tcp_bytes(self._descriptor) if self._descriptor is not None else None
        if now is not None:
            self._ended_traffic = now
        return self._sum(self._earlier_traffic, self._ended_traffic)

    def close(self) -> None:
        """Say good-bye, and let go. Idempotent.

        A service that may be started again has to know of it: who is not there any more can't say it again.
        """
        if self._socket.closed:
            return
        self.traffic()
        if self._patience_s is not None and not self._aborted.is_set():
            with contextlib.suppress(TransportError):
                self.wait(self.send(m.Finish()))
        if not self._problem:
            self._send(0, m.Leave(), ())
        self._hang_up(1000)

    def _hang_up(self, linger: int) -> None:
        self._descriptor = None
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger)

    def _receive(self) -> None:
        """Take what comes next; before a problem is told, what came before it is taken."""
        if self._aborted.is_set():
            raise BrokenTransportError(f"the exchange at {self.called} was broken off")
        if self._take():
            return
        self._heed()
        self._find_again()
        if self._problem:
            raise TransportError(f"{self.called} at {self.address} {self._problem}")
        now, arrived = time.monotonic(), tcp_arrived(self._descriptor) if self._descriptor is not None else None
        if arrived != self._moved[1]:
            self._moved = now, arrived
        if now - self._moved[0] > self._timeout_s:
            raise TransportError(f"{self.called} at {self.address} did not answer within {self._timeout_s:g} s")

    def _find_again(self) -> None:
        """Take up the connection to a service that went away and is to come back."""
        if self._patience_s is None:
            return
        now = time.monotonic()
        if self._lost_at is not None and now - self._lost_at > self._patience_s:
            self._problem = f"{WENT_AWAY}, and did not come back within {self._patience_s:g} s"
        if self._problem != WENT_AWAY:
            return
        self._lost_at = self._lost_at or now
        self._earlier_traffic = self._sum(self._earlier_traffic, self._ended_traffic)
        self._ended_traffic, self._problem = (0, 0), ""
        self._hang_up(0)
        self._assembly = Assembly()
        self._connect()
        self.again()
        for number, (body, tensors) in self._asked.items():
            self._send(number, body, tensors)

    @staticmethod
    def _sum(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
        return one[0] + other[0], one[1] + other[1]

    def _take(self, flags: int = 0) -> bool:
        """Take in a message; False when none came for a while, or at once with NOBLOCK."""
        try:
            first, *chunks = self._socket.recv_multipart(flags, copy=False)
        except zmq.Again:
            return False
        self._lost_at = None
        if len(first):
            self._assembly.begin(first)
        is_whole = self._assembly.add(chunks)
        if self._sink is not None and self._sink[0] == self._assembly.number:
            for index, at, piece in self._assembly.drain():
                self._sink[1](index, at, piece)
        if is_whole:
            head, tensors = self._assembly.take()
            if self._asked.pop(head.number, None) is not None:
                self._replies[head.number] = head.body, tensors
        return True

    def _heed(self) -> None:
        """Learn what has become of the connection."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_CONNECTED:
                self._descriptor = int(event["value"])
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._lost_at = None  # somebody serves, if there is nothing to say yet
            elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._problem = "refused this worker's key"
            else:
                self._descriptor = None
                self._problem = self._problem or WENT_AWAY


def dial(
    worker: int,
    workers: int,
    addresses: Sequence[str],
    keys: WorkerKeys | None,
    timeout_s: float,
    life: int = 0,
    failure_timeout_s: float | None = None,
) -> ParameterServerClient:
    """One worker's end of a parameter server. `addresses` are the coordinator's and the shards'.

    A `life` above 0 is that of a process which was started again: it joins a run that is under way. With a failure
    timeout a service that went away is waited for, and the run goes on from the last cut.
    """
    keep_freed_memory()
    context = zmq.Context()
    context.set(zmq.IO_THREADS, 1)
    links = [
        RpcChannel(context, address, worker, keys, name, timeout_s, life, failure_timeout_s)
        for address, name in zip(addresses, _called(addresses), strict=True)
    ]
    wire = ParameterServerClient(worker, workers, links[0], links[1:], elastic=failure_timeout_s is not None)
    for link in links:
        link.again = functools.partial(wire.say_again, link)
    wire.when_closed(context.term)
    if life:
        wire.join()
    return wire


def _called(addresses: Sequence[str]) -> list[str]:
    return ["the coordinator", *(f"server {shard}" for shard in range(len(addresses) - 1))]


class DeathNotifier:
    """Tells the services of a parameter server that a worker is dead. For one thread; every wait has a limit."""

    def __init__(self, addresses: Sequence[str], keys: WorkerKeys | None) -> None:
        self._context = zmq.Context()
        self._sockets = [_dealer(self._context, DEATH_NOTIFIER, keys) for _ in addresses]
        for one, address in zip(self._sockets, addresses, strict=True):
            one.connect(address)
        self._number = 0
        self._dead: dict[int, int] = {}

    def gone(self, worker: int, life: int, limit_s: float = 5.0) -> bool:
        """Tell all services; whether all have heard. First the shards, for they know what the worker's work came to."""
        self._dead[worker] = max(life, self._dead.get(worker, 0))
        limit = time.monotonic() + limit_s
        found = self._tell(self._sockets[1:], m.Gone(worker, life), limit)
        told = self._tell(self._sockets[:1], m.told_of(worker, life, found, len(self._sockets) - 1), limit)
        return len(found) + len(told) == len(self._sockets)

    def back(self, worker: int) -> None:
        """The worker is started again: it is not dead any more."""
        self._dead.pop(worker, None)

    def again(self, limit_s: float = 5.0) -> bool:
        """Tell once more of all who are dead, for a service that was started again and has forgotten."""
        heard = [self.gone(worker, life, limit_s) for worker, life in sorted(self._dead.items())]
        return all(heard)

    def close(self) -> None:
        """Let go."""
        self._context.destroy(linger=0)

    def _tell(self, sockets: Sequence[Any], gone: m.Gone, limit: float) -> list[m.Left]:
        self._number += 1
        for one in sockets:
            one.send_multipart(next(encode(self._number, gone)))
        return [left for one in sockets if (left := self._heard(one, gone, limit)) is not None]

    def _heard(self, one: Any, gone: m.Gone, limit: float) -> m.Left | None:
        """The answer. What is not answered soon is said again: who has heard it may be dead, and another serve."""
        while (left_s := limit - time.monotonic()) > 0:
            if not one.poll(min(left_s, AGAIN_S) * 1000):
                one.send_multipart(next(encode(self._number, gone)))
                continue
            head = decode_head(one.recv_multipart()[0])
            if head.number == self._number and isinstance(head.body, m.Left):
                return head.body
        return None


def _pour(tensors: list[Chunks], sink: Sink) -> None:
    """Give a reply that has come before it was waited for to a sink."""
    for index, pieces in enumerate(tensors):
        for at, piece in placed(pieces):
            sink(index, at, piece)


def _dealer(context: zmq.Context[Any], name: bytes, keys: WorkerKeys | None) -> Any:
    dealer = context.socket(zmq.DEALER)
    for option, value in {
        zmq.IDENTITY: name,
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
