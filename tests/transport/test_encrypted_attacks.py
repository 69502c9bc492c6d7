"""Attacks on encrypted transports: by strangers that reach a port, by former members, and by members that lie."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from zmq.utils import z85

from stretto.collective_ops import AllReduceMean, Exchange
from stretto.errors import BrokenTransportError, TransportError
from stretto.notices import say_once
from stretto.transport import secure_connections
from stretto.transport.encrypted import EncryptedTransport
from stretto.transport.encrypted_sockets import BACKLOG, STRANGERS, KeyPair, MemberSockets, ReservedPort
from stretto.transport.noise import HANDSHAKE_BYTES, Handshake
from stretto.transport.peer_stream import (
    EAGER_BYTES,
    HEAD_BYTES,
    HELLO,
    MAX_POSTS,
    PIECE,
    POST,
    RECEIVED,
    SMALL_BYTES,
    WIRE_CHANNELS,
    Head,
    PeerStream,
)
from stretto.transport.secure_connections import (
    HANDSHAKE_S,
    LENGTH,
    MAGIC,
    OVERHEAD_BYTES,
    PREFACE,
    sealed,
)
from stretto.transport.worker_endpoint import Endpoint
from tests.encrypted_ends import LIMIT_S, Sending, encrypted, joined, new_keys
from tests.relays import received

GENERATION = 1
Frames = Sequence[bytes]


def port(keys: KeyPair | None = None) -> ReservedPort:
    return ReservedPort("127.0.0.1", keys or new_keys())


def mean_works(ends: Sequence[Any], numbers: int = 300_000) -> bool:
    with ThreadPoolExecutor(len(ends)) as pool:
        means = pool.map(lambda end: end.submit(AllReduceMean(torch.ones(numbers))).wait(), ends)
        return all(bool((mean == len(ends)).all()) for mean in means)


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


def admitted(keys: KeyPair, end: Endpoint, rank: int = 1, generation: int = GENERATION) -> bool:
    """Return True if a port admits these keys as those of a rank."""
    connected(end).close()
    stranger = Sending(keys, end, rank, generation)
    with stranger.socket:
        return stranger.is_admitted()


@pytest.mark.parametrize("rank", [1, 0, 7])
def test_a_stranger_with_another_key_is_refused_and_the_members_connect(
    rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    say_once.cache_clear()
    forming = Forming()
    assert not admitted(new_keys(), forming.open_port, rank)
    ends = forming.complete()
    assert mean_works(ends)
    assert "a connection from 127.0.0.1 was refused" in capsys.readouterr().err
    close(ends)


def test_a_former_member_is_refused() -> None:
    keys = [new_keys() for _ in range(3)]
    former = joined([port(one) for one in keys])
    close(former)
    forming = Forming(2, keys[0], keys[1])
    assert not admitted(keys[2], forming.open_port, generation=2)
    assert not admitted(keys[1], forming.open_port, generation=1), "of an earlier generation"
    ends = forming.complete()
    assert mean_works(ends)
    close(ends)


def first_message(keys: KeyPair, end: Endpoint, rank: int) -> bytes:
    """Return what a member of this rank sends to an endpoint first, which a stranger may record."""
    preface = PREFACE.pack(MAGIC, GENERATION, rank)
    return preface + Handshake(True, z85.decode(keys.secret), z85.decode(end.public), preface).write()


def test_a_recorded_handshake_keeps_no_member_out_however_often_it_is_repeated() -> None:
    """A stranger that reads the network repeats the first message of a member before the member connects."""
    keys = new_keys()
    forming = Forming(second=keys)
    first = first_message(keys, forming.open_port, 1)
    original = connected(forming.open_port)
    original.sendall(first)
    assert received(original, HANDSHAKE_BYTES), "it is a member's, so far as is known"
    repeated = [connected(forming.open_port) for _ in range(3 * STRANGERS)]
    for one in repeated:
        with contextlib.suppress(ConnectionError):
            one.sendall(first)
    with contextlib.suppress(OSError):
        original.sendall(bytes(OVERHEAD_BYTES))
    ends = forming.complete()
    assert mean_works(ends)
    for one in (original, *repeated):
        with one, contextlib.suppress(ConnectionError):
            assert one.recv(1) == b"", "no reply to a repeated message"
    close(ends)


def test_recorded_handshakes_that_have_not_arrived_before_hold_no_port_closed(waiting_worker: Waiting) -> None:
    """A flood closes connections of a member unread, and a stranger records the first messages of all its attempts."""
    transport, end, keys = waiting_worker
    arriving = transport._sockets._arriving
    with contextlib.ExitStack() as stack:

        def proceed_beside(opened: Iterator[socket.socket]) -> None:
            for one in opened:
                stack.enter_context(one)
            for _ in range(2):
                transport._proceed()
                assert len(arriving) <= STRANGERS + 1

        for _ in range(3):
            proceed_beside(Sending(keys, end, 1).socket for _ in range(STRANGERS))
        assert len(transport._sockets._seen) > STRANGERS + 1
        member = Sending(keys, end, 1)
        proceed_beside(iter([member.socket]))
        assert member.is_admitted()
        for _ in range(3):
            proceed_beside(connected(end) for _ in range(STRANGERS))
        assert [one.rank for one in arriving].count(1) < STRANGERS
        member.send(Head(HELLO).packed())
        transport._proceed()
        assert 1 in transport._sockets._receivers


def test_members_connect_at_their_first_attempt_while_a_stranger_repeats_recorded_handshakes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secure_connections, "HANDSHAKE_S", LIMIT_S)
    attempts, connect = list[int](), MemberSockets._call

    def counted(self: MemberSockets, rank: int, preface: bytes) -> Handshake:
        attempts.append(rank)
        return connect(self, rank, preface)

    monkeypatch.setattr(MemberSockets, "_call", counted)
    keys = [new_keys() for _ in range(2)]
    forming = Forming(first=keys[0], second=keys[1])
    links = [*enumerate(end for _, end in reversed(forming.ends))]
    recorded = [(end, first_message(keys[rank], end, rank)) for rank, end in links * 2 * STRANGERS]
    is_over, has_repeated = threading.Event(), threading.Event()

    def repeat(kept: contextlib.ExitStack) -> None:
        for end, first in recorded:
            with contextlib.suppress(OSError):
                one = socket.create_connection((end.host, end.port), LIMIT_S, ("127.0.0.2", 0))
                kept.enter_context(one).sendall(first)

    def flood() -> None:
        with contextlib.ExitStack() as stack:
            repeat(stack)
            has_repeated.set()
            while not is_over.is_set():
                with contextlib.ExitStack() as further:
                    repeat(further)

    attacker = threading.Thread(target=flood)
    attacker.start()
    try:
        assert has_repeated.wait(LIMIT_S)
        ends = forming.complete()
        assert mean_works(ends)
    finally:
        is_over.set()
        attacker.join()
    assert sorted(attempts) == [0, 1]
    close(ends)


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
        one.settimeout(LIMIT_S + HANDSHAKE_S)
        with one, contextlib.suppress(ConnectionError):
            while one.recv(1 << 16):
                pass
    assert mean_works(ends)
    close(ends)


@pytest.fixture
def waiting_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[EncryptedTransport, Endpoint, KeyPair]]:
    """Yield worker 0, whose `_proceed` the test calls, its address, and the keys of worker 1, which it waits for."""
    keys, own = new_keys(), port()
    ends = [(0, own.endpoint), (1, Endpoint("127.0.0.1", 9, keys.public))]
    with monkeypatch.context() as patches:
        patches.setattr(EncryptedTransport, "_run", lambda self: None)
        transport = EncryptedTransport(own, GENERATION, 0, ends, LIMIT_S)
    transport._thread.join()
    yield transport, own.endpoint, keys
    transport._sockets.close(None)


Waiting = tuple[EncryptedTransport, Endpoint, KeyPair]


def test_a_handshake_that_no_message_follows_is_closed(
    waiting_worker: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secure_connections, "CONFIRM_S", 0.1)
    transport, end, keys = waiting_worker
    silent = Sending(keys, end, 1)
    with silent.socket:
        arriving, limit = transport._sockets._arriving, time.monotonic() + LIMIT_S
        while not (arriving and arriving[0].rank == 1):
            transport._proceed()
            assert time.monotonic() < limit
        assert silent.is_admitted()
        while arriving:
            transport._proceed()
            assert time.monotonic() < limit
        with contextlib.suppress(ConnectionError):
            assert not received(silent.socket, 1), "closed"


def test_a_flood_closes_no_members_connection_whose_handshake_has_arrived(waiting_worker: Waiting) -> None:
    transport, end, keys = waiting_worker
    with contextlib.ExitStack() as stack:
        member = Sending(keys, end, 1)
        stack.enter_context(member.socket)
        for count in (BACKLOG - 1, BACKLOG):
            for _ in range(count):
                stack.enter_context(connected(end))
            transport._proceed()
        assert member.is_admitted()


def test_a_flood_from_one_address_closes_no_connection_from_another(waiting_worker: Waiting) -> None:
    transport, end, keys = waiting_worker
    with contextlib.ExitStack() as stack:
        member = Sending(keys, end, 1, is_silent=True)
        stack.enter_context(member.socket)
        for count in (STRANGERS - 1, STRANGERS, STRANGERS):
            for _ in range(count):
                stranger = socket.create_connection((end.host, end.port), LIMIT_S, ("127.0.0.2", 0))
                stack.enter_context(stranger)
            transport._proceed()
        member.begin()
        transport._proceed()
        assert member.is_admitted()


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
def greeted() -> Iterator[tuple[EncryptedTransport, Sending]]:
    """Yield worker 0, and the connection of its only peer, worker 1, a member that has sent its greeting."""
    liar, ports = new_keys(), [port(), port()]
    ends = [(0, ports[0].endpoint), (1, Endpoint("127.0.0.1", ports[1].endpoint.port, liar.public))]
    ports[1].close()
    victim = EncryptedTransport(ports[0], GENERATION, 0, ends, LIMIT_S)
    made = Sending(liar, ports[0].endpoint, 1)
    with made.socket:
        assert made.is_admitted()
        made.send(Head(HELLO).packed())
        victim.connect(LIMIT_S)
        yield victim, made
    close([victim])


@contextlib.contextmanager
def lying(messages: Sequence[Frames]) -> Iterator[EncryptedTransport]:
    """Yield worker 0, whose only peer sends these messages after its greeting."""
    with greeted() as (victim, made):
        with contextlib.suppress(ConnectionError):
            for frames in messages:
                made.send(*frames)
        yield victim


def post(number: int = 1, size: int = 4, **changed: int) -> bytes:
    return Head(POST, number=number, size=size)._replace(**changed).packed()


LIES: dict[str, list[Frames]] = {
    "an unknown kind": [[Head(99).packed()]],
    "an unknown kind with bytes": [[Head(99).packed(), bytes(16)]],
    "a head of noughts and ones": [[bytes([255] * HEAD_BYTES), bytes(16)]],
    "an unknown dtype": [[post(dtype=200), bytes(16)]],
    "an unknown channel": [[post(channel=WIRE_CHANNELS), bytes(16)]],
    "fewer bytes than announced": [[post(), bytes(12)]],
    "more bytes than announced": [[post(), bytes(SMALL_BYTES)]],
    "a large tensor with its post": [[post(size=SMALL_BYTES), bytes(4 * SMALL_BYTES)]],
    "an exchange twice": [[post(size=10**6)]] * 2,
    "an exchange too far ahead": [[post(2), bytes(16)]],
    "bytes that were not announced": [[Head(PIECE, number=1).packed(), bytes(16)]],
    "bytes from elsewhere": [[post(size=10**6)], [Head(PIECE, number=1, size=64).packed(), bytes(16)]],
    "more bytes than its tensor": [[post()], [Head(PIECE, number=1).packed(), bytes(20)]],
    "a receipt of bytes that were not sent": [[Head(RECEIVED, received=1 << 40).packed()]],
    "a tensor larger than the memory": [[post(size=1 << 60)]],
    "an overflowing tensor": [[post(size=(1 << 64) - 1)]],
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_member_is_named_and_ends_no_process(lie: str) -> None:
    with lying(LIES[lie]) as victim:
        handle = victim.submit(Exchange(1, torch.ones(4)))
        for message in ("worker 1", "expected"):
            with pytest.raises(TransportError, match=message) as caught:
                handle.wait()
        assert not isinstance(caught.value, BrokenTransportError)


@pytest.mark.parametrize("payload", [b"", bytes(16), bytes(300_000)])
@pytest.mark.parametrize("place", [0, LENGTH.size - 1, LENGTH.size, OVERHEAD_BYTES - 1, -1])
def test_an_altered_message_ends_the_connection(payload: bytes, place: int) -> None:
    with greeted() as (victim, made):
        assert made.cipher is not None
        message = bytearray(sealed(made.cipher, post(size=len(payload) // 4), payload))
        message[place] ^= 1
        made.socket.sendall(message)
        with pytest.raises(BrokenTransportError, match="worker 1 has failed"):
            victim.submit(Exchange(1, torch.ones(len(payload) // 4))).wait()


def test_a_message_above_the_limit_ends_the_connection() -> None:
    with (
        lying([[post(size=1 << 30), bytes(64 << 20)]]) as victim,
        pytest.raises(BrokenTransportError, match="worker 1 has failed"),
    ):
        victim.submit(Exchange(1, torch.ones(4))).wait()


def test_a_connection_that_ends_within_a_message_ends_its_exchanges() -> None:
    with greeted() as (victim, made):
        assert made.cipher is not None
        made.socket.sendall(sealed(made.cipher, post(), bytes(16))[:-1])
        made.socket.close()
        with pytest.raises(BrokenTransportError, match="worker 1 has failed"):
            victim.submit(Exchange(1, torch.ones(4))).wait()


def accepted(messages: Iterator[tuple[Head, bytes | None]]) -> list[int]:
    """Return the bytes of each message that a stream has stored before it refuses one."""
    stream, stored = PeerStream("worker 0", "worker 1", lambda: 1 << 40), list[int]()

    def receive() -> None:
        for head, payload in messages:
            stream.receive(head, payload)
            stored.append(len(payload or b""))

    with pytest.raises(TransportError, match="worker 1 does not keep to the protocol"):
        receive()
    return stored


def posts(size: int, payload: bytes | None) -> Iterator[tuple[Head, bytes | None]]:
    for number in range(1, MAX_POSTS + 2):
        yield Head(POST, number=number, size=size), payload


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
