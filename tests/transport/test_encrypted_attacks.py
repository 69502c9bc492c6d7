"""Attacks on encrypted transports: by strangers that reach a port, by former members, and by members that lie."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from stretto.collective_ops import AllReduceMean, Exchange
from stretto.errors import BrokenTransportError, TransportError
from stretto.transport.encrypted import EncryptedTransport
from stretto.transport.encrypted_sockets import HANDSHAKE_MS, Endpoint, KeyPair, ReservedPort
from stretto.transport.peer_stream import (
    EAGER_BYTES,
    HELLO,
    MAX_POSTS,
    PIECE,
    PIECE_BYTES,
    POST,
    RECEIVED,
    SMALL_BYTES,
    WIRE_CHANNELS,
    Head,
    PeerStream,
)
from tests.encrypted_ends import LIMIT_S, encrypted, joined, new_keys

GENERATION = 1
Frames = Sequence[bytes]


def port(keys: KeyPair | None = None) -> ReservedPort:
    return ReservedPort("127.0.0.1", keys or new_keys())


def mean_works(ends: Sequence[Any], numbers: int = 300_000) -> bool:
    with ThreadPoolExecutor(len(ends)) as pool:
        means = pool.map(lambda end: end.submit(AllReduceMean(torch.ones(numbers))).wait(), ends)
        return all(bool((mean == len(ends)).all()) for mean in means)


@contextlib.contextmanager
def pushing(keys: KeyPair, end: Endpoint) -> Iterator[Any]:
    """Yield a socket that sends to an endpoint with these keys, as a member's does."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as made:
        made.linger = 0
        made.curve_publickey, made.curve_secretkey, made.curve_serverkey = keys.public, keys.secret, end.public
        made.reconnect_ivl = 5
        made.connect(end.url)
        yield made


class Forming:
    """Two workers, of which the second connects when it is called."""

    def __init__(
        self, generation: int = GENERATION, first: KeyPair | None = None, second: KeyPair | None = None
    ) -> None:
        self.ports = [port(first), port(second)]
        self.ends = [(number, one.endpoint) for number, one in enumerate(self.ports)]
        self.generation, self._pool = generation, ThreadPoolExecutor(2)
        self._formed: list[Future[EncryptedTransport]] = [self._pool.submit(self._connect, 0)]

    @property
    def open_port(self) -> Endpoint:
        return self.ends[0][1]

    def _connect(self, rank: int) -> EncryptedTransport:
        transport = EncryptedTransport(self.ports[rank], self.generation, rank, self.ends, LIMIT_S)
        transport.connect(LIMIT_S)
        return transport

    def complete(self) -> list[EncryptedTransport]:
        self._formed.append(self._pool.submit(self._connect, 1))
        formed = [one.result() for one in self._formed]
        self._pool.shutdown()
        return formed


def connected(end: Endpoint) -> socket.socket:
    """Return a plain connection to a port that will be open."""
    limit = time.monotonic() + LIMIT_S
    while True:
        try:
            return socket.create_connection((end.host, end.port), LIMIT_S)
        except ConnectionRefusedError:
            assert time.monotonic() < limit
            time.sleep(0.005)


def close(ends: Sequence[EncryptedTransport]) -> None:
    for end in ends:
        end.abort()
        end.close()


# --- strangers --------------------------------------------------------------------------------------------------------


def refusal(socket_: Any, first: bytes) -> int:
    """Return the event with which a handshake ends."""
    events = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED
    monitor = socket_.get_monitor_socket(events)
    socket_.send(first)
    try:
        assert monitor.poll(LIMIT_S * 1000)
        return int(recv_monitor_message(monitor)["event"])
    finally:
        socket_.disable_monitor()
        monitor.close(0)


def test_a_stranger_with_another_key_is_refused_and_the_members_connect(capsys: pytest.CaptureFixture[str]) -> None:
    forming = Forming()
    with pushing(new_keys(), forming.open_port) as stranger:
        assert refusal(stranger, Head(HELLO, GENERATION).packed()) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    ends = forming.complete()
    assert mean_works(ends)
    assert "a connection from 127.0.0.1 was refused" in capsys.readouterr().err
    close(ends)


def test_a_former_member_is_refused() -> None:
    keys = [new_keys() for _ in range(3)]
    former = joined([port(one) for one in keys])
    close(former)
    forming = Forming(2, keys[0], keys[1])
    with pushing(keys[2], forming.open_port) as left:
        assert refusal(left, Head(HELLO, 2).packed()) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    ends = forming.complete()
    assert mean_works(ends)
    close(ends)


def test_messages_of_another_generation_are_dropped() -> None:
    with lying([[Head(POST, 7, 0, 0, 1, 0, 4).packed(), bytes(16)], [Head(HELLO, 7).packed()]]) as victim:
        waiting = victim.submit(Exchange(1, torch.ones(4)))
        assert not waiting.exchange.is_over.wait(0.3)
        victim.abort()
        with pytest.raises(BrokenTransportError):
            waiting.wait()


@pytest.mark.parametrize(
    "sent", [b"", os.urandom(5000), b"GET / HTTP/1.0\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03\x00"]
)
def test_connections_that_send_nothing_or_garbage_are_closed_and_the_members_connect(sent: bytes) -> None:
    forming = Forming()
    strangers = [connected(forming.open_port) for _ in range(50)]
    for one in strangers:
        with contextlib.suppress(OSError):
            one.sendall(sent)
    ends = forming.complete()
    assert mean_works(ends)
    for one in strangers:
        one.settimeout(LIMIT_S + HANDSHAKE_MS / 1000)
        with one, contextlib.suppress(ConnectionError):
            while one.recv(1 << 16):
                pass
    assert mean_works(ends)
    close(ends)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux filters the packets of one socket")
def test_idle_connections_reach_no_worker_that_has_formed_a_generation() -> None:
    count = 1100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * count)), hard))
    ports = [port() for _ in range(2)]
    ends = joined(ports)
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        for number in range(count):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            assert one.connect_ex(("127.0.0.1", ports[number % 2].endpoint.port)) != 0
        assert mean_works(ends)
        assert mean_works(ends)
        assert len(os.listdir("/proc/self/fd")) <= before + count
    close(ends)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Relay:
    """Relay to a port that records what passes through it."""

    def __init__(self, target: Endpoint) -> None:
        self.recorded = bytearray()
        self._target, self._listener = target, socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1], target.public)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            here, _ = self._listener.accept()
            there = connected(self._target)
            with here, there:
                back = threading.Thread(target=self._forward, args=(there, here), daemon=True)
                back.start()
                self._forward(here, there)
                there.shutdown(socket.SHUT_RDWR)
                back.join()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                self.recorded += piece
                target.sendall(piece)

    def close(self) -> None:
        self._listener.close()
        self._thread.join(LIMIT_S)


def test_nothing_of_a_tensor_is_readable_between_two_workers_and_traffic_is_that_of_the_wire() -> None:
    ports = [port() for _ in range(2)]
    relays = [Relay(one.endpoint) for one in ports]

    def connect(rank: int) -> EncryptedTransport:
        ends = [(one, (ports if one == rank else relays)[one].endpoint) for one in range(2)]
        transport = EncryptedTransport(ports[rank], GENERATION, rank, ends, LIMIT_S)
        transport.connect(LIMIT_S)
        return transport

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(connect, range(2)))
        secret = b"nobody reads this"
        tensor = torch.frombuffer(bytearray(secret * 100_000), dtype=torch.uint8)
        for piece in (tensor[: len(secret)], tensor):
            handles = [end.submit(Exchange(1 - end.worker, piece)) for end in ends]
            assert all(torch.equal(handle.wait(), piece) for handle in handles)
    recorded = [bytes(relay.recorded) for relay in relays]
    assert all(len(one) > tensor.numel() for one in recorded)
    assert not any(secret in one for one in recorded)
    for end, one in zip(ends, reversed(recorded), strict=True):
        assert end.traffic().bytes_sent == pytest.approx(len(one), rel=0.01)
    close(ends)
    for relay in relays:
        relay.close()


# --- members that lie -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def lying(messages: Sequence[Frames]) -> Iterator[EncryptedTransport]:
    """Yield worker 0, whose only peer, worker 1, is a member that sends these messages after its greeting."""
    liar, ports = new_keys(), [port(), port()]
    ends = [(0, ports[0].endpoint), (1, Endpoint("127.0.0.1", ports[1].endpoint.port, liar.public))]
    ports[1].close()
    victim = EncryptedTransport(ports[0], GENERATION, 0, ends, LIMIT_S)
    with pushing(liar, ports[0].endpoint) as made:
        made.send(Head(HELLO, GENERATION).packed())
        victim.connect(LIMIT_S)
        for frames in messages:
            made.send_multipart(frames)
        yield victim
    close([victim])


def post(number: int = 1, size: int = 4, **changed: int) -> bytes:
    return Head(POST, GENERATION, number=number, size=size)._replace(**changed).packed()


LIES: dict[str, list[Frames]] = {
    "no head": [[b"?"]],
    "an empty message": [[b""]],
    "three frames": [[post(), bytes(16), b""]],
    "an unknown kind": [[Head(99, GENERATION).packed()]],
    "an unknown dtype": [[post(dtype=200), bytes(16)]],
    "an unknown channel": [[post(channel=WIRE_CHANNELS), bytes(16)]],
    "fewer bytes than announced": [[post(), bytes(12)]],
    "more bytes than announced": [[post(), bytes(SMALL_BYTES)]],
    "a large tensor with its post": [[post(size=SMALL_BYTES), bytes(4 * SMALL_BYTES)]],
    "an exchange twice": [[post(size=10**6)]] * 2,
    "an exchange too far ahead": [[post(2), bytes(16)]],
    "bytes that were not announced": [[Head(PIECE, GENERATION, number=1).packed(), bytes(16)]],
    "bytes from elsewhere": [[post(size=10**6)], [Head(PIECE, GENERATION, number=1, size=64).packed(), bytes(16)]],
    "more than a piece": [[post(size=10**6)], [Head(PIECE, GENERATION, number=1).packed(), bytes(PIECE_BYTES + 4)]],
    "more bytes than its tensor": [[post()], [Head(PIECE, GENERATION, number=1).packed(), bytes(20)]],
    "a receipt of bytes that were not sent": [[Head(RECEIVED, GENERATION, received=1 << 40).packed()]],
    "a tensor larger than the memory": [[post(size=1 << 60)]],
    "an overflowing tensor": [[post(size=(1 << 64) - 1)]],
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_member_is_named_and_ends_no_process(lie: str) -> None:
    with lying(LIES[lie]) as victim:
        handle = victim.submit(Exchange(1, torch.ones(4)))
        for message in ("worker 1", "expected|can't be read|no worker sends"):
            with pytest.raises(TransportError, match=message) as caught:
                handle.wait()
        assert not isinstance(caught.value, BrokenTransportError)


def test_a_frame_above_the_limit_ends_the_connection() -> None:
    with (
        lying([[post(size=1 << 30), bytes(64 << 20)]]) as victim,
        pytest.raises(BrokenTransportError, match="worker 1 has failed"),
    ):
        victim.submit(Exchange(1, torch.ones(4))).wait()


def accepted(messages: Iterator[tuple[Head, bytes | None]]) -> list[int]:
    """Return the bytes of each message that a stream has stored before it refuses one."""
    stream, stored = PeerStream("worker 0", "worker 1", GENERATION, lambda: 1 << 40), list[int]()

    def receive() -> None:
        for head, payload in messages:
            stream.receive(head, payload)
            stored.append(len(payload or b""))

    with pytest.raises(TransportError, match="worker 1 does not keep to the protocol"):
        receive()
    return stored


def posts(size: int, payload: bytes | None) -> Iterator[tuple[Head, bytes | None]]:
    for number in range(1, MAX_POSTS + 2):
        yield Head(POST, GENERATION, number=number, size=size), payload


@pytest.mark.parametrize(("size", "payload"), [(SMALL_BYTES // 4, bytes(SMALL_BYTES)), (10**6, None)])
def test_a_member_fills_no_more_memory_than_the_limits(size: int, payload: bytes | None) -> None:
    stored = accepted(posts(size, payload))
    assert sum(stored) <= EAGER_BYTES
    assert len(stored) <= MAX_POSTS


@pytest.mark.parametrize("late", [0, 1])
def test_honest_workers_keep_to_the_limits_however_far_one_is_ahead(late: int) -> None:
    ends = encrypted(2)
    sizes = [100, 60_000, 15_000, 400_000] * 60

    def begun(rank: int) -> list[Any]:
        tensors = [torch.full((size,), float(size)) for size in sizes]
        return [ends[rank].submit(Exchange(1 - rank, tensor)) for tensor in tensors]

    handles = {1 - late: begun(1 - late)}
    handles[late] = begun(late)
    for rank in (0, 1):
        for size, handle in zip(sizes, handles[rank], strict=True):
            assert torch.equal(handle.wait(), torch.full((size,), float(size)))
    close(ends)
