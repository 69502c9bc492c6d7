"""One worker's ZeroMQ connection to one service: requests and their replies, with a limit on every wait.

A service that is restarted is awaited up to the failure timeout. Requests without a reply are then sent again, in
order, with the same numbers; before them the client replays the state that a shard may have lost. Tensors of updates
and of their replies go through memory if the service is on the same host (`message_memory`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.utils.garbage  # its handler at exit has to be registered before ours, which runs first and still sends
from torch import Tensor
from zmq.utils.monitor import parse_monitor_message

from stretto.errors import BrokenTransportError, TransportError
from stretto.parameter_server import messages as m
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.client_types import Replaying, Sink, raise_refusals
from stretto.parameter_server.framing import LARGEST_FRAME, Assembly, Chunks, decode_header, encode, with_offsets
from stretto.parameter_server.message_memory import LentMemory, MemoryFile
from stretto.parameter_server.rpc_server import DEATH_NOTIFIER, name_of
from stretto.parameter_server.sessions import ClientSession
from stretto.security import SMALL_BYTES, WorkerKeys, use_keys
from stretto.transport.interface import Traffic
from stretto.transport.malloc import keep_freed_memory
from stretto.transport.tcp_info import tcp_arrived, tcp_bytes

RECEIVE_TIMEOUT_MS = 25
"""Time in ms that a receive waits before the connection's state and an abort are checked."""
RESEND_S = 0.5
"""Time in seconds after which the notice of a failure is sent again if a service has not replied."""
DISCONNECTED = "went away"
WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED
NEVER_MS = 10**8
"""Reconnect interval that disables ZeroMQ's automatic reconnection, so that messages over a new connection come after
those lost with the old one.

ZeroMQ's own value for it, -1, can block the termination of a context forever.
"""


class RpcChannel:
    """One worker's connection over ZeroMQ, under the `name` of its incarnation. `peer` is the service in error texts.

    With a failure timeout a lost service is awaited for that long; requests without a reply are sent again, in order.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        name: bytes,
        keys: WorkerKeys | None,
        peer: str,
        timeout_s: float,
        failure_timeout_s: float | None = None,
    ) -> None:
        self.peer, self.address = peer, address
        self._timeout_s, self._failure_timeout_s = timeout_s, failure_timeout_s
        self._name, self._keys, self._context = name, keys, context
        self._session: ClientSession[tuple[m.Request, Sequence[Tensor]]] = ClientSession()
        self._lost_at: float | None = None
        self._aborted = threading.Event()
        self._client: Replaying | None = None
        self._assembly = Assembly()
        self._memory = LentMemory()
        self._replies: dict[int, tuple[m.Body, list[Chunks]]] = {}
        self._sink: tuple[int, Sink] | None = None
        """Receiver of the chunks of the reply that is waited for, with its request id."""
        self._ended_traffic = self._earlier_traffic = (0, 0)
        self._descriptor: int | None = None
        self._progress: tuple[float, tuple[int, int] | None] = (0.0, None)
        """Time at which bytes last arrived at either end, and the numbers of bytes then."""
        self._problem = ""
        self._connect()

    def _connect(self) -> None:
        self._socket = _dealer(self._context, self._name, self._keys)
        watched = WATCHED
        if self._failure_timeout_s is not None:
            self._socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 0)
            watched |= zmq.EVENT_CLOSED
        self._monitor = self._socket.get_monitor_socket(watched)
        self._socket.connect(self.address)

    def attach(self, client: Replaying) -> None:
        """Let this client replay its state when the service is back."""
        self._client = client

    def send(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> int:
        """Send a request; return its id."""
        stored = tensors if self._failure_timeout_s is not None else ()
        request_id = self._session.number((body, stored), not isinstance(body, m.WITHOUT_REPLY))
        self._send(request_id, body, tensors)
        return request_id

    def _send(self, request_id: int, body: m.Request, tensors: Sequence[Tensor]) -> None:
        memory = self._memory.lend(request_id, body, tensors)
        small = isinstance(memory, MemoryFile) or sum(tensor.nbytes for tensor in tensors) < SMALL_BYTES
        try:
            for message in encode(request_id, body, tensors, self._session.answered_below, memory):
                self._socket.send_multipart(message, zmq.NOBLOCK, copy=small)
        except zmq.Again:  # not connected; requests that matter are sent again
            self._problem = self._problem or DISCONNECTED

    def wait(self, request_id: int, sink: Sink | None = None) -> tuple[m.Body, list[Chunks]]:
        """Return the reply to a request."""
        self._progress = (time.monotonic(), None)
        self._sink = (request_id, sink) if sink is not None else None
        while request_id not in self._replies:
            self._receive()
        self._sink = None
        body, tensors = self._replies.pop(request_id)
        if sink is not None:
            _pass_on(tensors, sink)
        elif self._memory.is_lent_to(request_id):
            tensors = [[chunk.clone() for chunk in chunks] for chunks in tensors]
        self._memory.is_read(request_id)
        raise_refusals(self.peer, body)
        return body, tensors

    def poll(self, request_id: int) -> bool:
        """Return True if the reply has arrived, without waiting."""
        while request_id not in self._replies and self._take(zmq.NOBLOCK):
            pass
        if request_id not in self._replies and self._failure_timeout_s is not None:
            self._process_events()
            self._reconnect()
        return request_id in self._replies

    def tend(self) -> None:
        """Connect again if the service was lost and is back. For how long it was lost counts when it is needed."""
        if self._failure_timeout_s is not None and not self._socket.closed:
            self._process_events()
            self._connect_again()

    def is_pending(self, request_id: int) -> bool:
        """Return True if a request has no reply yet."""
        return self._session.is_pending(request_id)

    def discard(self, request_id: int) -> None:
        """Stop waiting for the reply to a request."""
        self._session.discard(request_id)
        if self._replies.pop(request_id, None) is not None:
            self._memory.is_read(request_id)

    def send_oneway(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message whose reply is not waited for."""
        self._send(0, body, tensors)

    def abort(self) -> None:
        """Abort waiting calls, from any thread."""
        self._aborted.set()

    def reset(self) -> None:
        """Drop all requests and replies, and clear the abort."""
        self._aborted.clear()
        for request_id in list(self._replies):
            self.discard(request_id)
        self._session.reset()
        self._sink = None

    def traffic(self) -> Traffic:
        """Return the bytes sent and received: on the connection, as the kernel counts them, and through memory."""
        if not self._socket.closed:
            self._process_events()
        traffic = tcp_bytes(self._descriptor) if self._descriptor is not None else None
        if traffic is not None:
            self._ended_traffic = traffic
        counted, memory = self._sum(self._earlier_traffic, self._ended_traffic), self._memory.traffic
        return Traffic(*self._sum(counted, memory), counted=memory == (0, 0))

    def close(self) -> None:
        """Send `Leave` and close. Idempotent.

        A service that may be restarted is sent `Finish` first: a worker that has exited cannot repeat its end.
        """
        if self._socket.closed:
            return
        self.traffic()
        if self._failure_timeout_s is not None and not self._aborted.is_set():
            with contextlib.suppress(TransportError):
                self.wait(self.send(m.Finish()))
        if not self._problem:
            self._send(0, m.Leave(), ())
        self._disconnect(1000)

    def _disconnect(self, linger: int) -> None:
        self._memory.reset()
        self._descriptor = None
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger)

    def _receive(self) -> None:
        """Receive the next message; messages that arrived before a problem are processed before it is raised."""
        if self._aborted.is_set():
            raise BrokenTransportError(f"the exchange at {self.peer} was broken off")
        if self._take():
            return
        self._process_events()
        self._reconnect()
        if self._client is not None:
            self._client.tend(self)
        if self._problem:
            raise TransportError(f"{self.peer} at {self.address} {self._problem}")
        now_s, arrived = time.monotonic(), tcp_arrived(self._descriptor) if self._descriptor is not None else None
        if arrived != self._progress[1]:
            self._progress = now_s, arrived
        if now_s - self._progress[0] > self._timeout_s:
            raise TransportError(f"{self.peer} at {self.address} did not answer within {self._timeout_s:g} s")

    def _reconnect(self) -> None:
        """Reconnect to a service that was lost and is being restarted."""
        if self._failure_timeout_s is None:
            return
        now_s = time.monotonic()
        if self._lost_at is not None and now_s - self._lost_at > self._failure_timeout_s:
            self._problem = f"{DISCONNECTED}, and did not come back within {self._failure_timeout_s:g} s"
        if self._problem == DISCONNECTED:
            self._lost_at = self._lost_at or now_s
            self._connect_again()

    def _connect_again(self) -> None:
        """Begin a new connection if the last one is lost, with the requests without a reply."""
        if self._problem != DISCONNECTED:
            return
        self._earlier_traffic = self._sum(self._earlier_traffic, self._ended_traffic)
        self._ended_traffic, self._problem = (0, 0), ""
        self._disconnect(0)
        self._assembly = Assembly()
        self._connect()
        if self._client is not None:
            self._client.replay(self)
        for request_id, (body, tensors) in self._session.unanswered():
            self._send(request_id, body, tensors)

    @staticmethod
    def _sum(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        return a[0] + b[0], a[1] + b[1]

    def _take(self, flags: int = 0) -> bool:
        """Receive a message; return False if none came within the receive timeout, or immediately with NOBLOCK."""
        try:
            first, *chunks = self._socket.recv_multipart(flags, copy=False)
        except zmq.Again:
            return False
        self._lost_at = None
        if len(first):
            self._memory.arrives(self._assembly.begin(first))
        is_whole = self._assembly.add(chunks, self._memory.find)
        if self._sink is not None and self._sink[0] == self._assembly.request_id:
            for index, offset, chunk in self._assembly.drain():
                self._sink[1](index, offset, chunk)
        if is_whole:
            header, tensors = self._assembly.take()
            if self._session.answer(header.request_id):
                self._replies[header.request_id] = header.body, tensors
            else:
                self._memory.is_read(header.request_id)
        return True

    def _process_events(self) -> None:
        """Process the events of the connection's monitor."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_CONNECTED:
                self._descriptor = int(event["value"])
            elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._lost_at = None  # the service runs, even if it has no message to send
            elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._problem = "refused this worker's key"
            else:
                self._descriptor = None
                self._problem = self._problem or DISCONNECTED


def connect_client(
    worker: int,
    workers: int,
    addresses: Sequence[str],
    keys: WorkerKeys | None,
    timeout_s: float,
    incarnation: int = 0,
    failure_timeout_s: float | None = None,
    joins: bool = False,
) -> ParameterServerClient:
    """Return one worker's client of a parameter server. `addresses` are the dispatcher's and the shards'.

    A new or restarted worker `joins` the running training. With a failure timeout lost services are awaited, and the
    run continues from the last snapshot.
    """
    context = new_context()
    name = name_of(worker, incarnation)
    channels = connect_channels(context, addresses, name, keys, timeout_s, failure_timeout_s)
    client = ParameterServerClient(worker, workers, channels[0], channels[1:], elastic=failure_timeout_s is not None)
    client.on_close(context.term)
    if joins:
        client.join()
    return client


def new_context() -> zmq.Context[Any]:
    """Return a context for the channels of one client."""
    keep_freed_memory()
    context = zmq.Context()
    context.set(zmq.IO_THREADS, 1)
    return context


def connect_channels(
    context: zmq.Context[Any],
    addresses: Sequence[str],
    name: bytes,
    keys: WorkerKeys | None,
    timeout_s: float,
    failure_timeout_s: float | None,
) -> list[RpcChannel]:
    """Return an incarnation's channels to the dispatcher and the shards."""
    return [
        RpcChannel(context, address, name, keys, peer, timeout_s, failure_timeout_s)
        for address, peer in zip(addresses, _peer_names(addresses), strict=True)
    ]


def _peer_names(addresses: Sequence[str]) -> list[str]:
    return ["the coordinator", *(f"server {shard}" for shard in range(len(addresses) - 1))]


class DeathNotifier:
    """Reports ended incarnations to all services. Used by one thread; every wait has a limit."""

    def __init__(self, addresses: Sequence[str], keys: WorkerKeys | None) -> None:
        self._context = zmq.Context()
        self._sockets = [_dealer(self._context, DEATH_NOTIFIER, keys) for _ in addresses]
        for sock, address in zip(self._sockets, addresses, strict=True):
            sock.connect(address)
        self._last_notice = 0
        self._ended: dict[int, int] = {}

    def notify_ended(self, worker: int, incarnation: int, limit_s: float = 5.0) -> bool:
        """Notify all services, first the shards, which know the worker's applied work; return True if all replied."""
        self._ended[worker] = max(incarnation, self._ended.get(worker, 0))
        limit = time.monotonic() + limit_s
        replies = self._notify(self._sockets[1:], m.IncarnationEnded(worker, incarnation), limit)
        confirmed = self._notify(
            self._sockets[:1], m.incarnation_ended(worker, incarnation, replies, len(self._sockets) - 1), limit
        )
        return len(replies) + len(confirmed) == len(self._sockets)

    def note_restarted(self, worker: int) -> None:
        """Note that the worker is restarted."""
        self._ended.pop(worker, None)

    def notify_again(self, limit_s: float = 5.0) -> bool:
        """Notify a restarted service of all failed workers again."""
        confirmations = [
            self.notify_ended(worker, incarnation, limit_s) for worker, incarnation in sorted(self._ended.items())
        ]
        return all(confirmations)

    def close(self) -> None:
        """Close the sockets."""
        self._context.destroy(linger=0)

    def _notify(self, sockets: Sequence[Any], notice: m.IncarnationEnded, limit: float) -> list[m.CountedWork]:
        self._last_notice += 1
        for sock in sockets:
            sock.send_multipart(next(encode(self._last_notice, notice)))
        return [work for sock in sockets if (work := self._await_reply(sock, notice, limit)) is not None]

    def _await_reply(self, sock: Any, notice: m.IncarnationEnded, limit: float) -> m.CountedWork | None:
        """Return the reply. Send the notice again if none comes soon: the service may have been restarted."""
        while (left_s := limit - time.monotonic()) > 0:
            if not sock.poll(min(left_s, RESEND_S) * 1000):
                sock.send_multipart(next(encode(self._last_notice, notice)))
                continue
            header = decode_header(sock.recv_multipart()[0])
            if header.request_id == self._last_notice and isinstance(header.body, m.CountedWork):
                return header.body
        return None


def _pass_on(tensors: list[Chunks], sink: Sink) -> None:
    """Pass a reply that arrived before it was waited for to a sink."""
    for index, chunks in enumerate(tensors):
        for offset, chunk in with_offsets(chunks):
            sink(index, offset, chunk)


def _dealer(context: zmq.Context[Any], name: bytes, keys: WorkerKeys | None) -> Any:
    dealer = context.socket(zmq.DEALER)
    for option, value in {
        zmq.SNDHWM: 0,
        zmq.RCVHWM: 0,
        zmq.MAXMSGSIZE: LARGEST_FRAME,
        zmq.RCVTIMEO: RECEIVE_TIMEOUT_MS,
        zmq.RECONNECT_IVL: 20,
        zmq.RECONNECT_IVL_MAX: 1000,
    }.items():
        dealer.setsockopt(option, value)
    dealer.copy_threshold = SMALL_BYTES
    use_keys(dealer, name, keys)
    return dealer
