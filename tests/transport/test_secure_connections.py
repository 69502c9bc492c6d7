"""Ends of encrypted connections: last messages, aborts, and connections that end in one direction alone."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from zmq.utils import z85

from stretto.collective_ops import AllGather, Exchange
from stretto.errors import BrokenTransportError, TransportError
from stretto.transport import encrypted_sockets, secure_connections
from stretto.transport.encrypted import EncryptedTransport
from stretto.transport.encrypted_sockets import MemberSockets, ReservedPort
from stretto.transport.noise import HANDSHAKE_BYTES, Cipher, Handshake
from stretto.transport.peer_stream import HELLO, RECEIVED, Head
from stretto.transport.relay_tunnels import RelayAccess
from stretto.transport.secure_connections import PREFACE, IncomingMessage, SendingConnection
from stretto.transport.worker_endpoint import Endpoint
from tests.encrypted_ends import LIMIT_S, Sending, encrypted, joined, new_keys
from tests.relays import received


def test_last_messages_arrive_at_a_worker_that_can_send_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, tensors = encrypted(2), [torch.full((3000,), float(number)) for number in range(64)]
    sender, receiver = ends[1]._sockets._senders[0], ends[1]._sockets._receivers[0]
    messages, is_lost = receiver.messages, threading.Event()

    def late() -> Iterator[Any]:
        """Yield messages once the sending connection has been lost for a while."""
        if sender.lost_at is None or time.monotonic() < sender.lost_at + 0.2:
            return iter(())
        is_lost.set()
        return messages()

    monkeypatch.setattr(receiver, "messages", late)
    handles = [[end.submit(Exchange(1 - end.worker, one)) for one in tensors] for end in ends]
    assert all(torch.equal(handle.wait(), one) for handle, one in zip(handles[0], tensors, strict=True))
    ends[0].close()
    assert is_lost.wait(LIMIT_S)
    assert all(torch.equal(handle.wait(), one) for handle, one in zip(handles[1], tensors, strict=True))
    with pytest.raises(BrokenTransportError, match="worker 0 has failed, or has left"):
        ends[1].submit(Exchange(0, torch.ones(4))).wait()
    ends[1].close()


@contextlib.contextmanager
def child_process() -> Iterator[None]:
    """Run a process that has this one's sockets, as those of a DataLoader have them."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            os.close(writing)
            os.read(reading, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


def test_an_abort_ends_connections_whose_sockets_a_child_process_has() -> None:
    ends = encrypted(2)
    with child_process():
        waiting = ends[1].submit(Exchange(0, torch.ones(4)))
        ends[0].abort()
        with pytest.raises(BrokenTransportError, match="worker 0 has failed, or has left"):
            waiting.wait()
    for end in ends:
        end.close()


def test_a_port_that_a_child_process_has_refuses_connections_once_the_generation_has_formed() -> None:
    ports = [ReservedPort("127.0.0.1", new_keys()) for _ in range(2)]
    with child_process():
        ends = joined(ports)
        for port in ports:
            with socket.socket() as late:
                assert late.connect_ex(("127.0.0.1", port.endpoint.port)) == errno.ECONNREFUSED
    for end in ends:
        end.close()


def test_a_connection_that_the_receiver_resets_is_lost() -> None:
    own, peer = new_keys(), new_keys()

    def proceed() -> None:
        poller = select.poll()
        if sender.socket is not None:
            poller.register(sender.socket, sender.events)
            assert poller.poll(1000 * LIMIT_S)
        sender.proceed()

    def handshake(is_initiator: bool, preface: bytes) -> Handshake:
        one, other = (own, peer) if is_initiator else (peer, own)
        return Handshake(is_initiator, z85.decode(one.secret), z85.decode(other.public), preface)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = SendingConnection((socket.AF_INET, listener.getsockname()), 1, 0, lambda one: handshake(True, one))
        proceed()
        while sender._is_connecting:
            proceed()
        accepted, _ = listener.accept()
        preface = received(accepted, PREFACE.size)
        responder = handshake(False, preface)
        responder.read(received(accepted, HANDSHAKE_BYTES))
        accepted.sendall(responder.write())
        proceed()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        proceed()
    assert sender.lost_at is not None
    assert not sender.send(Head(HELLO).packed(), b"")


def test_a_members_second_connection_does_not_end_its_first() -> None:
    keys = new_keys()
    ports = [ReservedPort("127.0.0.1", one) for one in (new_keys(), keys)]
    sockets = MemberSockets(ports[0], 0, [port.endpoint for port in ports], generation=1)
    connections = [Sending(keys, ports[0].endpoint, 1) for _ in range(2)]

    def ready() -> set[int]:
        found = sockets.watch().wait()
        sockets.proceed(found)
        return found

    while [one.rank for one in sockets._arriving] != [1, 1]:
        assert not list(sockets.receive(ready(), 1))
    for one in connections:
        assert one.is_admitted()
        one.send(Head(HELLO).packed())
    both = {one.socket.fileno() for one in sockets._arriving}
    while not both <= (found := ready()):
        pass
    ranks = list[int]()
    for rank, _ in sockets.receive(found, 16):
        ranks.append(rank)
        sockets.accept_no_more()
    assert ranks == [1]
    assert sockets.ended() == []
    sockets.close(None)
    ports[1].close()
    for one in connections:
        one.socket.close()


def test_operations_of_different_kinds_wait_for_each_other() -> None:
    """Workers whose loops are of unequal length run them; the coordinator names these workers."""
    ends = encrypted(3)
    with ThreadPoolExecutor(3) as pool:
        begun: list[Future[Any]] = [
            pool.submit(ends[0].all_gather_bytes, b"of all"),
            pool.submit(ends[1].broadcast_bytes, b"", 0),
            pool.submit(lambda: ends[2].submit(AllGather(torch.ones(4))).wait()),
        ]
        assert not wait(begun, 0.2).done
        for end in ends:
            end.abort()
        for one in begun:
            with pytest.raises(BrokenTransportError):
                one.result()
    for end in ends:
        end.close()


def test_exchanges_end_when_their_transport_is_closed() -> None:
    ends = encrypted(2, timeout_s=5.0)
    waiting = ends[1].submit(Exchange(0, torch.ones(4)))
    ends[1].close()
    with pytest.raises(BrokenTransportError, match="the transport is closed"):
        waiting.wait()
    ends[0].close()


def test_an_error_of_the_receiving_thread_ends_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    ends = encrypted(2, timeout_s=5.0)
    monkeypatch.setattr(ends[1]._streams[0], "_room", fail)
    waiting = [ends[rank].submit(Exchange(1 - rank, torch.ones(1 << 20))) for rank in (1, 0)]
    with pytest.raises(TransportError, match="Too many open files"):
        waiting[0].wait()
    with pytest.raises(BrokenTransportError, match="worker 1 has failed, or has left"):
        waiting[1].wait()
    for end in ends:
        end.close()


KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


@pytest.mark.parametrize("place", ["127.0.0.1:7", "::1:7", "fe80::1%eth0:7"])
def test_an_address_of_numbers_is_read(place: str) -> None:
    assert str(Endpoint.parse(f"{place} {KEY}")) == f"{place} {KEY}"


@pytest.mark.parametrize(
    "address",
    [f"127.0.0.1:7 {'#' * 40}", f"127.0.0.1:7 {chr(34) * 40}", f"127.0.0.1:7 {chr(233) * 40}", f"a.name:7 {KEY}"],
)
def test_an_address_without_a_public_key_or_with_a_name_is_refused(address: str) -> None:
    with pytest.raises(TransportError, match="a worker's address can't be read"):
        Endpoint.parse(address)


def test_a_connection_that_ends_in_one_direction_ends_the_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encrypted_sockets, "LINGER_S", 0.1)
    sent = list[SendingConnection]()
    proceed = SendingConnection.proceed

    def noting(self: SendingConnection) -> None:
        sent.append(self)
        proceed(self)

    monkeypatch.setattr(SendingConnection, "proceed", noting)
    ends = encrypted(2)
    waiting = [end.submit(Exchange(1 - end.worker, torch.ones(1 << 20))) for end in ends]
    assert all(torch.equal(one.wait(), torch.ones(1 << 20)) for one in waiting)
    waiting = [end.submit(Exchange(1 - end.worker, torch.ones(4), 1)) for end in ends[:1]]
    assert sent[0].socket is not None
    sent[0].socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(BrokenTransportError, match="worker . has failed, or has left|was aborted"):
        waiting[0].wait()
    for end in ends:
        end.close()


def test_a_member_that_always_sends_holds_up_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = encrypted(3)
    sockets = ends[0]._sockets
    message = IncomingMessage(Head(RECEIVED).packed(), None, Cipher(bytes(32)))
    for one in sockets._receivers.values():
        monkeypatch.setattr(one, "messages", lambda: itertools.repeat(message))
    ready = {one.socket.fileno() for one in sockets._receivers.values()}
    assert {rank for rank, _ in itertools.islice(sockets.receive(ready, 16), 100)} == {1, 2}
    for end in ends:
        end.abort()
        end.close()


def test_a_member_may_stop_between_its_handshake_and_its_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secure_connections, "HANDSHAKE_S", 0.1)
    keys, port = [new_keys() for _ in range(2)], ReservedPort("127.0.0.1", new_keys())
    ends = [(0, port.endpoint), (1, Endpoint("127.0.0.1", 9, keys[1].public))]
    transport = EncryptedTransport(port, 1, 0, ends, LIMIT_S)
    made = Sending(keys[1], port.endpoint, 1)
    with made.socket:
        assert made.is_admitted()
        time.sleep(0.3)
        made.send(Head(HELLO).packed())
        transport.connect(LIMIT_S)
    transport.close()


def test_a_member_that_does_not_reply_is_connected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host may have dropped the packets of the first attempt, and the kernel waits longer after each."""
    monkeypatch.setattr(secure_connections, "HANDSHAKE_S", 0.1)
    ports = [ReservedPort("127.0.0.1", new_keys()) for _ in range(2)]
    ends = [(rank, port.endpoint) for rank, port in enumerate(ports)]
    ports[1].socket.listen()
    ports[1].socket.settimeout(LIMIT_S)
    transport = EncryptedTransport(ports[0], 1, 0, ends, LIMIT_S)
    silent = ports[1].socket.accept()[0]
    again = ports[1].socket.accept()[0]
    for one in (silent, again):
        one.close()
    ports[1].close()
    transport.abort()
    transport.close()


def test_a_waking_thread_writes_to_no_closed_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be that of another file of the process by then."""
    port = ReservedPort("127.0.0.1", new_keys())
    sockets = MemberSockets(port, 0, [port.endpoint])
    is_sending, is_over = threading.Event(), threading.Event()
    sender, was_open = sockets._wake_sender, list[bool]()

    class Slow:
        """Socket that another thread has the time to close during a send."""

        def send(self, data: bytes) -> None:
            is_sending.set()
            is_over.wait(0.2)
            was_open.append(sender.fileno() >= 0)

        def close(self) -> None:
            sender.close()

    monkeypatch.setattr(sockets, "_wake_sender", Slow())
    waking = threading.Thread(target=sockets.wake)
    waking.start()
    assert is_sending.wait(LIMIT_S)
    sockets.close(None)
    is_over.set()
    waking.join()
    assert was_open == [True]


@pytest.mark.parametrize("failing", ["socketpair", "RelayTunnels"])
def test_no_socket_stays_open_if_there_are_too_few_descriptors(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    port = ReservedPort("127.0.0.1", new_keys())
    other = Endpoint("127.0.0.1", 9, new_keys().public, "another machine")
    monkeypatch.setattr(socket if failing == "socketpair" else encrypted_sockets, failing, fail)
    with pytest.raises(OSError, match="Too many open files"):
        MemberSockets(port, 0, [port.endpoint, other], RelayAccess("127.0.0.1:9", b""))
    assert port.socket.fileno() == -1


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2])
def test_tensors_of_rare_dtypes_are_exchanged(dtype: torch.dtype) -> None:
    ends = encrypted(2)
    waiting = [end.submit(Exchange(1 - end.worker, torch.ones(4).to(dtype))) for end in ends]
    for one in waiting:
        received: Any = one.wait()
        assert received.dtype == dtype
        assert torch.equal(received.float(), torch.ones(4))
    for end in ends:
        end.close()


def test_a_dtype_without_a_code_is_named_and_the_exchanges_after_it_match() -> None:
    ends = encrypted(2)
    with pytest.raises(TransportError, match=r"got: torch.float8_e4m3fnuz\n.*expected: torch.float32, "):
        ends[0].submit(Exchange(1, torch.ones(4).to(torch.float8_e4m3fnuz)))
    waiting = [end.submit(Exchange(1 - end.worker, torch.ones(4))) for end in ends]
    assert all(torch.equal(one.wait(), torch.ones(4)) for one in waiting)
    for end in ends:
        end.close()
