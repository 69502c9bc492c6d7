"""Relay between hosts that cannot reach each other: whom it lets in, what it stores and what it survives."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zmq

from stretto import relay as relay_module
from stretto.collective_ops import Exchange
from stretto.errors import BrokenTransportError, TransportError, UnreachedError
from stretto.membership.messages import GenerationView, Member, MemberRanks, ReadyReport, ViewOfRanks
from stretto.process_config import WorkerConfig
from stretto.relay import (
    GREETING,
    HANDSHAKE_S,
    JOINED,
    NONCE_BYTES,
    REQUEST_BYTES,
    End,
    Stream,
    checked,
    digest,
    signed,
    stream_to,
)
from stretto.run_config import RunConfig
from stretto.training import worker_context
from stretto.transport import encrypted_sockets
from stretto.transport.encrypted import EncryptedTransport
from stretto.transport.encrypted_rendezvous import EncryptedRendezvous
from stretto.transport.encrypted_sockets import ReservedPort
from stretto.transport.noise import HANDSHAKE_BYTES
from stretto.transport.relay_tunnels import RelayAccess, ServiceTunnels
from stretto.transport.secure_connections import PREFACE
from stretto.transport.worker_endpoint import Endpoint
from tests.encrypted_ends import joined, new_keys
from tests.fixed_ports import fixed_port
from tests.relays import SECRET, RelayThread, received, relay, shared_relay

LIMIT_S = 60.0
STREAM = Stream(b"2" * 16, b"3" * 16, 7)


@pytest.fixture(autouse=True)
def _machines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encrypted_sockets, "machine_name", lambda: "")


@pytest.fixture
def running() -> Iterator[RelayThread]:
    """Yield a relay, and close the connections with it."""
    with relay() as made:
        yield made
    while _opened:
        _opened.pop().close()


def ports(count: int) -> list[ReservedPort]:
    return [ReservedPort("127.0.0.1", new_keys()) for _ in range(count)]


def until(is_so: Callable[[], object]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.005)


_opened = list[socket.socket]()


def plain(made: RelayThread) -> socket.socket:
    """Return a connection that is closed after the test."""
    _opened.append(socket.create_connection(("127.0.0.1", made.port), LIMIT_S))
    return _opened[-1]


def request_on(one: socket.socket, end: End = b"s", stream: Stream = STREAM, secret: bytes = SECRET) -> bytes:
    """Return a signed request for an end of a stream, on a new connection."""
    return signed(end, stream, greeted(one), secret)


def greeted(one: socket.socket) -> bytes:
    """Send the greeting of a worker, and return the random number."""
    one.sendall(GREETING)
    return received(one, NONCE_BYTES)


def end_of(made: RelayThread, end: End, stream: Stream = STREAM) -> socket.socket:
    """Return a connection that has asked for an end of a stream."""
    found = plain(made)
    found.sendall(request_on(found, end, stream))
    return found


def is_closed(one: socket.socket) -> bool:
    """Return True once the other end has closed the connection."""
    one.settimeout(LIMIT_S + HANDSHAKE_S)
    with one, contextlib.suppress(ConnectionError):
        while one.recv(1 << 16):
            pass
    return True


# --- strangers --------------------------------------------------------------------------------------------------------


def repeated(one: socket.socket) -> bytes:
    """Return a request that was signed for another connection."""
    greeted(one)
    return signed(b"s", STREAM, b"an earlier number", SECRET)


STRANGERS: dict[str, tuple[Callable[[socket.socket], bytes], str]] = {
    "silence": (lambda one: b"", "no request within 2 s"),
    "a greeting alone": (lambda one: GREETING, "no request within 2 s"),
    "half a greeting": (lambda one: GREETING[:5], "no request within 2 s"),
    "a web request": (lambda one: b"GET / HTTP/1.0\r\n\r\n", "no greeting of a worker"),
    "garbage": (lambda one: b"g" + os.urandom(5000), "no greeting of a worker"),
    "a request with the greeting": (lambda one: GREETING + bytes(REQUEST_BYTES), "no greeting of a worker"),
    "ZeroMQ where no coordinator is": (lambda one: b"\xff" + bytes(63), "a connection of ZeroMQ"),
    "a request and more": (lambda one: request_on(one) + b"and more", "more than a request"),
    "a request of garbage": (lambda one: greeted(one) and os.urandom(REQUEST_BYTES), "without the key"),
    "a service that the run has not": (lambda one: request_on(one, b"c", stream_to("127.0.0.1:22")), "no worker of"),
    "another secret": (lambda one: request_on(one, secret=b"of another run"), "without the key"),
    "a repeated request": (repeated, "without the key"),
    "another end than the signed one": (lambda one: b"r" + request_on(one)[1:], "without the key"),
}


@pytest.mark.parametrize(("sent", "why"), STRANGERS.values(), ids=STRANGERS)
def test_strangers_are_refused_and_logged_and_members_connect(
    running: RelayThread, sent: Callable[[socket.socket], bytes], why: str
) -> None:
    strangers = [plain(running) for _ in range(3)]
    for one in strangers:
        with contextlib.suppress(ConnectionError):
            one.sendall(sent(one))
    ends = joined(ports(2), relay=running.access)
    assert all(is_closed(one) for one in strangers)
    until(lambda: running.relay.refused == 3)
    assert len(running.relay.notices) == 2
    assert all("a connection from 127.0.0.1 was refused: " in text and why in text for text in running.relay.notices)
    close(ends)


@pytest.fixture
def flooded(monkeypatch: pytest.MonkeyPatch) -> Callable[[RelayThread, str, bytes], None]:
    """Return a flood of three times as many connections as a relay keeps, from an address, each with first bytes."""
    monkeypatch.setattr("stretto.relay.MAX_STRANGERS", KEPT)
    monkeypatch.setattr("stretto.relay.HANDSHAKE_S", LIMIT_S)

    def flood(made: RelayThread, source: str, first: bytes) -> None:
        for _ in range(3 * KEPT):
            one = socket.create_connection(("127.0.0.1", made.port), LIMIT_S, (source, 0))
            _opened.append(one)
            with contextlib.suppress(ConnectionError):
                one.sendall(first)
        until(lambda: made.relay.refused >= 2 * KEPT)

    return flood


KEPT = 64
Flood = Callable[[RelayThread, str, bytes], None]


@pytest.mark.parametrize("first", [b"", GREETING], ids=["silent", "greeting"])
def test_a_flood_from_one_address_closes_no_connection_from_another(
    running: RelayThread, flooded: Flood, first: bytes
) -> None:
    members = [plain(running) for _ in range(KEPT // 4)]
    until(lambda: running.relay.made == len(members))
    flooded(running, "127.0.0.2", first)
    assert all(greeted(one) for one in members)
    assert any("one of too many connections" in one for one in running.relay.notices)


def test_silent_connections_from_the_address_of_members_close_none_that_has_greeted_the_relay(
    running: RelayThread, flooded: Flood
) -> None:
    """Members and strangers may share one address; a member's greeting arrives with its connection."""
    streams = [STREAM._replace(generation=number) for number in range(KEPT // 4)]
    senders = [plain(running) for _ in streams]
    requests = [request_on(one, b"s", stream) for one, stream in zip(senders, streams, strict=True)]
    flooded(running, "127.0.0.1", b"")
    for one, request in zip(senders, requests, strict=True):
        one.sendall(request)
    receivers = [end_of(running, b"r", stream) for stream in streams]
    assert all(received(one, len(JOINED)) == JOINED for one in (*senders, *receivers))


def test_a_flood_of_greetings_from_the_address_of_members_closes_no_signed_request(
    running: RelayThread, flooded: Flood
) -> None:
    streams = [STREAM._replace(generation=number) for number in range(2 * KEPT)]
    senders = [end_of(running, b"s", stream) for stream in streams]
    until(lambda: running.relay.waiting == len(senders))
    flooded(running, "127.0.0.1", GREETING)
    assert running.relay.waiting == len(senders)


def test_members_connect_with_each_other_while_their_address_floods_the_relay(
    running: RelayThread, flooded: Flood
) -> None:
    """One connection of a flood closes any one of the others, so a member that connects again comes through."""
    is_over = threading.Event()

    def flood() -> None:
        while not is_over.is_set():
            flooded(running, "127.0.0.1", GREETING)
            for one in _opened[: -KEPT // 2]:
                one.close()
            del _opened[: -KEPT // 2]

    attacker = threading.Thread(target=flood)
    attacker.start()
    try:
        ends = joined(ports(2), relay=running.access)
        assert exchanged(ends, torch.ones(10))
    finally:
        is_over.set()
        attacker.join()
    close(ends)


@pytest.mark.parametrize("place", range(0, REQUEST_BYTES, 3))
def test_a_changed_request_is_not_signed(place: int) -> None:
    request = bytearray(signed(b"s", STREAM, b"number", SECRET))
    assert checked(request, b"number", SECRET) == (b"s", STREAM)
    request[place] ^= 1
    with pytest.raises(ValueError, match="without the key"):
        checked(request, b"number", SECRET)


def test_tunnels_that_are_closed_while_sockets_connect_leave_no_task(
    running: RelayThread, caplog: pytest.LogCaptureFixture
) -> None:
    tunnels = ServiceTunnels(running.access, ["127.0.0.1:9"])
    host, _, port = tunnels.addresses[0].rpartition(":")
    first, is_over = threading.Event(), threading.Event()

    def connect() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                socket.create_connection((host, int(port)), LIMIT_S).close()
            first.set()

    threads = [threading.Thread(target=connect) for _ in range(4)]
    for one in threads:
        one.start()
    try:
        assert first.wait(LIMIT_S)
        tunnels.close(0.0)
    finally:
        is_over.set()
        for one in threads:
            one.join()
    del tunnels
    gc.collect()
    assert not [record for record in caplog.records if "pending" in record.getMessage()]


# --- streams ----------------------------------------------------------------------------------------------------------


def test_bytes_pass_both_ways_and_an_end_that_closes_closes_the_other(running: RelayThread) -> None:
    sender, receiver = end_of(running, b"s"), end_of(running, b"r")
    assert {received(one, len(JOINED)) for one in (sender, receiver)} == {JOINED}
    data = os.urandom(3_000_000)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.sendall, data)
        assert received(receiver, len(data)) == data
        sending.result()
    receiver.sendall(b"back")
    assert received(sender, 4) == b"back"
    sender.sendall(b"last")
    sender.close()
    assert received(receiver, 100) == b"last"


def test_a_receiver_that_does_not_read_slows_its_sender_down(running: RelayThread) -> None:
    sender, receiver = end_of(running, b"s"), end_of(running, b"r")
    received(sender, len(JOINED))
    sender.settimeout(1.0)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < 256 << 20:
            sent += sender.send(bytes(1 << 20))
    assert sent < 64 << 20, "more than the buffers of the kernel hold"
    receiver.close()
    assert is_closed(sender)


def test_an_end_that_has_closed_is_forgotten_and_a_new_one_takes_the_place_of_a_waiting_one(
    running: RelayThread,
) -> None:
    end_of(running, b"s").close()
    until(lambda: running.relay.waiting == 0)
    waiting, newer = end_of(running, b"s"), end_of(running, b"s")
    assert is_closed(waiting)
    receiver = end_of(running, b"r")
    assert {received(one, len(JOINED)) for one in (newer, receiver)} == {JOINED}


def test_streams_of_other_workers_and_generations_are_apart(running: RelayThread) -> None:
    sender = end_of(running, b"s")
    apart = STREAM._replace(generation=8), Stream(STREAM.receiver, STREAM.sender, 7)
    others = [end_of(running, b"r", other) for other in apart]
    receiver = end_of(running, b"r")
    assert received(receiver, len(JOINED)) == received(sender, len(JOINED)) == JOINED
    for one in others:
        one.settimeout(0.2)
        with pytest.raises(TimeoutError):
            one.recv(1)


# --- transports -------------------------------------------------------------------------------------------------------


def close(ends) -> None:
    for end in ends:
        end.abort()
        end.close()


def exchanged(ends, tensor: torch.Tensor) -> bool:
    handles = [end.submit(Exchange(1 - end.worker, tensor)) for end in ends]
    return all(torch.equal(handle.wait(), tensor) for handle in handles)


def test_the_relay_reads_nothing_of_a_tensor(running: RelayThread, monkeypatch: pytest.MonkeyPatch) -> None:
    passed, forward = bytearray(), relay_module._Connection.data_received

    def recording(self, data: bytes) -> None:
        passed.extend(data)
        forward(self, data)

    monkeypatch.setattr(relay_module._Connection, "data_received", recording)
    ends, secret = joined(ports(2), relay=running.access), b"nobody reads this"
    tensor = torch.frombuffer(bytearray(secret * 20_000), dtype=torch.uint8)
    assert exchanged(ends, tensor)
    assert len(passed) > 2 * tensor.numel()
    assert secret not in passed
    close(ends)


def test_workers_of_one_machine_do_not_use_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nothing:
        unused = RelayAccess(f"127.0.0.1:{nothing.getsockname()[1]}", SECRET)
    monkeypatch.setattr(encrypted_sockets, "machine_name", lambda: "one")
    ends = joined(ports(2), relay=unused)
    assert exchanged(ends, torch.ones(10))
    close(ends)


def test_ranks_of_one_worker_do_not_use_the_relay() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nothing:
        unused = f"127.0.0.1:{nothing.getsockname()[1]}"
    options = RunConfig(Path("train.py"), host="127.0.0.1", failure_timeout_s=10.0)
    configs = [WorkerConfig(options=options, relay=unused, keys=("",) * 4, rank=rank, ranks=2) for rank in range(2)]
    siblings = [one for config in configs if (one := worker_context._siblings(config)) is not None]
    ranks = ViewOfRanks(1, [Member(0, 0, ReadyReport(0))], each=[MemberRanks([one.address for one in siblings])])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.connect(ranks, 0), siblings))
    for one in siblings:
        assert one.group is not None
        one.group.abort()
        one.close()


def test_a_generation_ends_with_its_relay_and_the_next_one_connects_at_the_restarted_relay() -> None:
    first = RelayThread(fixed_port())
    ends = joined(ports(2), relay=first.access)
    assert exchanged(ends, torch.ones(10))
    waiting = ends[0].submit(Exchange(1, torch.ones(9)))
    first.stop()
    with pytest.raises(BrokenTransportError, match="worker 1 has failed, or has left"):
        waiting.wait()
    own = ports(2)
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(joined, own, generation=2, relay=first.access)
        restarted = RelayThread(first.port)
        following = forming.result()
    assert exchanged(following, torch.ones(10))
    close([*ends, *following])
    restarted.stop()


def test_a_secret_is_not_printed() -> None:
    assert "of the run" not in repr(shared_relay().access)


@pytest.mark.parametrize("machine", ["", "a" * 32])
def test_an_endpoint_is_read_as_it_is_printed(machine: str) -> None:
    end = Endpoint("10.0.0.1", 7, new_keys().public, machine)
    assert Endpoint.parse(str(end)) == end


def test_ends_that_were_joined_are_not_waiting(running: RelayThread) -> None:
    ends = joined(ports(3), relay=running.access)
    assert not running.relay.waiting
    close(ends)


def test_two_generations_of_the_same_workers_are_apart(running: RelayThread) -> None:
    keys = [new_keys() for _ in range(2)]
    made = [[ReservedPort("127.0.0.1", one) for one in keys] for _ in range(2)]

    def formed(own: list[ReservedPort], generation: int) -> list[EncryptedTransport]:
        return joined(own, generation=generation, relay=running.access)

    with ThreadPoolExecutor(2) as pool:
        generations = list(pool.map(formed, made, (1, 2)))
    assert all(exchanged(ends, torch.ones(10)) for ends in generations)
    for ends in generations:
        close(ends)


def test_last_messages_pass_before_a_worker_leaves(running: RelayThread) -> None:
    ends, tensor = joined(ports(2), relay=running.access), torch.arange(400_000.0)
    handles = [end.submit(Exchange(1 - end.worker, tensor)) for end in ends]
    handles[0].wait()
    ends[0].close()
    assert torch.equal(handles[1].wait(), tensor)
    ends[1].close()


def test_a_relay_that_is_away_ends_no_process() -> None:
    """Transports are closed at any moment of their attempts to connect."""
    with socket.create_server(("127.0.0.1", 0)) as nothing:
        away = RelayAccess(f"127.0.0.1:{nothing.getsockname()[1]}", SECRET)
    for number in range(20):
        own = ports(2)
        ends = [(rank, port.endpoint) for rank, port in enumerate(own)]
        transport = EncryptedTransport(own[0], 1, 0, ends, LIMIT_S, away)
        own[1].close()
        with pytest.raises(BrokenTransportError, match="could not connect with worker 1"):
            transport.connect(0.01 * number)
        transport.close()


def test_worker_of_the_run_in_the_place_of_another_one_receives_a_handshake_alone(running: RelayThread) -> None:
    """All workers sign with one secret, so the two workers are apart while a third one takes the place of one."""
    own = ports(2)
    ends = [(rank, port.endpoint) for rank, port in enumerate(own)]
    third = end_of(running, b"r", Stream(digest(own[0].endpoint.public), digest(own[1].endpoint.public), 1))
    transports = [EncryptedTransport(own[0], 1, 0, ends, LIMIT_S, running.access)]
    first_bytes = len(JOINED) + PREFACE.size + HANDSHAKE_BYTES
    assert len(received(third, first_bytes)) == first_bytes
    third.sendall(os.urandom(HANDSHAKE_BYTES))
    assert received(third, 1) == b""
    transports.append(EncryptedTransport(own[1], 1, 1, ends, LIMIT_S, running.access))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.connect(LIMIT_S), transports))
    assert exchanged(transports, torch.ones(10))
    close(transports)


# --- workers that cannot reach each other -----------------------------------------------------------------------------


@pytest.mark.parametrize("relayed", [False, True])
def test_members_that_do_not_connect_in_time_are_named_by_their_numbers(running: RelayThread, relayed: bool) -> None:
    rendezvous = EncryptedRendezvous("127.0.0.1", 0.1, LIMIT_S, relay=running.access if relayed else None)
    silent = [ReservedPort("127.0.0.1", new_keys()) for _ in range(2)]
    addresses = [str(silent[0].endpoint), rendezvous.address, str(silent[1].endpoint)]
    members = [Member(number, 0, ReadyReport(0, address=one)) for number, one in zip((3, 5, 8), addresses, strict=True)]
    with pytest.raises(UnreachedError) as caught:
        rendezvous.form(GenerationView(1, members), 1)
    assert caught.value.workers == (3, 8)
    rendezvous.close()
    for one in silent:
        one.close()


def test_ends_that_ask_at_the_same_time_are_all_joined_beside_receivers_that_read_nothing(
    running: RelayThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generation of 12 workers forms so, some of them stopped."""
    monkeypatch.setattr("stretto.relay.HANDSHAKE_S", LIMIT_S)
    pairs, stopped, size = 150, 10, 100_000

    async def joined_end(kind: End, number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        stream = Stream(digest(b"sender %d" % number), digest(b"receiver %d" % number), 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(GREETING)
        writer.write(signed(kind, stream, await reader.readexactly(NONCE_BYTES), SECRET))
        assert await reader.readexactly(1) == JOINED
        return reader, writer

    async def passed(number: int) -> list[asyncio.StreamWriter]:
        (_, sender), (reader, receiver) = await asyncio.gather(joined_end(b"s", number), joined_end(b"r", number))
        if number < stopped:
            reader._transport.pause_reading()  # type: ignore[attr-defined]
            sender.write(bytes(100 * size))
        else:
            sender.write(bytes([number % 256]) * size)
            assert await reader.readexactly(size) == bytes([number % 256]) * size
        return [sender, receiver]

    async def all_pass() -> None:
        for writers in await asyncio.wait_for(asyncio.gather(*map(passed, range(pairs))), LIMIT_S):
            for one in writers:
                one.transport.abort()

    asyncio.run(all_pass())
    assert running.relay.refused == 0


# --- one port ---------------------------------------------------------------------------------------------------------


def bind(coordinator: zmq.Socket[bytes], port: int) -> None:
    """Bind to a port that a thread of ZeroMQ may not have closed yet."""

    def is_bound() -> bool:
        with contextlib.suppress(zmq.ZMQError):
            coordinator.bind(f"tcp://127.0.0.1:{port}")
            return True
        return False

    until(is_bound)


def test_connections_of_zeromq_lead_to_the_coordinator_also_after_it_was_away() -> None:
    with contextlib.ExitStack() as stack:
        port, context = fixed_port(), stack.enter_context(zmq.Context())
        running = stack.enter_context(relay(f"127.0.0.1:{port}"))
        client = stack.enter_context(context.socket(zmq.DEALER))
        client.setsockopt(zmq.LINGER, 0)
        client.connect(f"tcp://127.0.0.1:{running.port}")
        for message in (b"first", b"second" * 100_000):
            with context.socket(zmq.ROUTER) as coordinator:
                coordinator.setsockopt(zmq.LINGER, 0)
                bind(coordinator, port)

                def is_answered(coordinator: zmq.Socket[bytes] = coordinator, message: bytes = message) -> bool:
                    client.send(message)  # again, as one that is sent while the connection ends is lost
                    if coordinator.poll(500):
                        coordinator.send_multipart(coordinator.recv_multipart())
                    return bool(client.poll(500)) and client.recv() == message

                until(is_answered)
        assert running.relay.refused == 0


def test_a_worker_reaches_a_service_through_the_relay_also_after_it_was_away() -> None:
    port = fixed_port()
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(relay(services=[f"127.0.0.1:{port}"]))
        made = ServiceTunnels(running.access, [f"127.0.0.1:{port}"])
        stack.callback(made.close, 0.0)
        host, _, there = made.addresses[0].rpartition(":")
        with socket.create_connection((host, int(there)), LIMIT_S) as early:
            assert is_closed(early), "nothing listens there"
        for _ in range(2):
            with socket.create_server(("127.0.0.1", port)) as service:
                service.settimeout(LIMIT_S)
                with socket.create_connection((host, int(there)), LIMIT_S) as one, service.accept()[0] as other:
                    data = os.urandom(3_000_000)
                    with ThreadPoolExecutor(1) as pool:
                        sending = pool.submit(one.sendall, data)
                        assert received(other, len(data)) == data
                        sending.result()
                    other.sendall(b"back")
                    assert received(one, 4) == b"back"


@pytest.mark.parametrize("is_silent", [False, True], ids=["refused", "no reply"])
@pytest.mark.parametrize("closed", [(), (0,), (1,), (0, 1)])
def test_connections_pass_the_relay_only_where_the_port_of_a_member_is_closed(
    running: RelayThread, closed: tuple[int, ...], is_silent: bool
) -> None:
    """The address that the other member knows leads nowhere."""
    own, nowhere = ports(2), ReservedPort("127.0.0.1", new_keys())
    if is_silent:
        nowhere.socket.listen()
    access, machines = replace(running.access, after_s=0.5 if closed else LIMIT_S), [set[str](), set[str]()]
    transports = []
    for rank in range(2):
        ends = [
            replace(one.endpoint, machine=f"machine {number}")
            if number == rank or number not in closed
            else replace(one.endpoint, port=nowhere.endpoint.port, machine=f"machine {number}")
            for number, one in enumerate(own)
        ]
        transports.append(EncryptedTransport(own[rank], 1, rank, [*enumerate(ends)], LIMIT_S, access, machines[rank]))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.connect(LIMIT_S), transports))
    assert exchanged(transports, torch.ones(10))
    assert (running.relay.made > 0) == bool(closed)
    for one in closed:
        is_remembered = f"machine {one}" in machines[1 - one]
        assert is_remembered == is_silent, "a member that refuses connections may not have listened yet"
    close(transports)
    nowhere.close()


def test_ports_of_a_range_are_taken_once_each_and_then_the_range_is_named() -> None:
    first = fixed_port()
    taken = []
    with contextlib.ExitStack() as stack:
        for free in (True, True, True, True, False):
            is_left = contextlib.nullcontext() if free else pytest.raises(TransportError, match="--ports 20000-20100")
            with is_left:
                one = ReservedPort("127.0.0.1", new_keys(), range(first, first + 4))
                stack.callback(one.close)
                taken.append(one.endpoint.port)
    assert len({*taken}) == len(taken) == 4
    assert {*taken} <= {*range(first, first + 4)}
