"""Keys of a run: admission, and the names of connections."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from stretto.security import (
    COORDINATOR,
    HEAD,
    JOINING,
    NOT_SEEN,
    RunKeys,
    doorman,
    name_in,
    role_of,
    router,
    use_keys,
)
from tests.strangers import FIRST_BYTES, GREETING, HELLO

WORKERS = 4
NAMES = [
    HEAD,
    b"launcher 5",
    b"joining 4fd0",
    b"agent 4fd0",
    COORDINATOR,
    b"worker 2",
    b"worker 2.1",
    b"barrier 2.0",
    b"worker 5.0 rank 1 of 2",
]
SECOND_S = 20.0


@contextmanager
def service(keys: RunKeys) -> Iterator[tuple[Any, str]]:
    """Yield a server's socket and its address."""
    context: Any = zmq.Context()
    door = doorman(context, keys)
    sock = router(context, keys, 1000)
    port = sock.bind_to_random_port("tcp://127.0.0.1")
    try:
        yield sock, f"tcp://127.0.0.1:{port}"
    finally:
        door.stop()
        context.destroy(linger=0)


@contextmanager
def client(address: str, name: bytes, keys: RunKeys, role: bytes) -> Iterator[Any]:
    with zmq.Context() as context, closing(context.socket(zmq.DEALER)) as made:
        made.setsockopt(zmq.LINGER, 0)
        use_keys(made, name, keys.client(role))
        made.connect(address)
        made.send(b"hello")
        yield made


def test_a_name_needs_the_key_of_its_role() -> None:
    keys = RunKeys.new()
    with service(keys) as (sock, address):
        for name in NAMES:
            for role in dict.fromkeys(map(role_of, NAMES)):
                with client(address, name, keys, role):
                    assert sock.poll(SECOND_S * 1000)
                    identity, _ = sock.recv_multipart()
                    if role == role_of(name):
                        assert name_in(identity, keys) == name
                    else:
                        with pytest.raises(ValueError, match="not the key"):
                            name_in(identity, keys)


def test_keys_of_another_run_are_not_admitted() -> None:
    keys, others = RunKeys.new(), RunKeys.new()
    with service(keys) as (sock, address):
        for name in NAMES:
            for made in (others, RunKeys(others.secret)):
                made.public = keys.public
                with client(address, name, made, role_of(name)):
                    assert not sock.poll(100)
        with client(address, HEAD, keys, HEAD):
            assert sock.poll(SECOND_S * 1000), "the service serves clients of the run as before"


def test_a_restarted_service_has_the_same_keys() -> None:
    keys = RunKeys.new()
    again = RunKeys(keys.secret)
    assert again.public == keys.public
    assert all(again.client(role) == keys.client(role) for role in (HEAD, JOINING, b"worker 7"))


@given(st.lists(st.integers(0, NOT_SEEN - 1), min_size=1, max_size=3))
def test_workers_that_join_are_known_by_their_numbers(steps: list[int]) -> None:
    keys = RunKeys("0" * 64, WORKERS)
    number = WORKERS
    for step in steps:
        number += step % 50
        assert keys.role(keys.client(b"worker %d" % number).public) == b"worker %d" % number


def test_unknown_keys_cost_time_once() -> None:
    keys, stranger = RunKeys.new(), RunKeys.new()
    foreign = stranger.client(b"worker 0").public
    assert keys.role(foreign) is None
    derived = keys._derived
    began = time.process_time()
    assert all(keys.role(foreign) is None for _ in range(10_000))
    assert (keys._derived, time.process_time() - began < 5) == (derived, True)
    assert keys.role(b"not a key") is None


@pytest.mark.parametrize("secret", ["repr", "str"])
def test_secret_keys_are_not_shown(secret: str) -> None:
    keys = RunKeys.new().client(HEAD)
    shown = repr(keys) if secret == "repr" else str(keys)
    assert keys.secret.decode() not in shown


def connected(address: str) -> socket.socket:
    host, port = address.removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), SECOND_S)


@pytest.mark.parametrize("sent", FIRST_BYTES.values(), ids=FIRST_BYTES)
def test_a_connection_that_does_not_authenticate_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr("stretto.security.HANDSHAKE_MS", 200)
    keys = RunKeys.new()
    with service(keys) as (sock, address):
        strangers = [connected(address) for _ in range(50)]
        for connection in strangers:
            with contextlib.suppress(ConnectionError):
                connection.sendall(sent)
        for connection in strangers:
            with closing(connection), contextlib.suppress(ConnectionError):
                while connection.recv(100):  # the greeting, then the end
                    pass
        assert not sock.poll(0)
        with client(address, HEAD, keys, HEAD):
            assert sock.poll(SECOND_S * 1000)


def recorded(address: str, keys: RunKeys, sock: Any) -> bytes:
    """Return the bytes that a client with a key has sent until the service has received its message."""
    found = bytearray()

    def forward(source: socket.socket, target: socket.socket, seen: bytearray) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                seen += piece
                target.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as pool:
        with client("tcp://{}:{}".format(*listener.getsockname()), HEAD, keys, HEAD):
            here, there = listener.accept()[0], connected(address)
            pool.submit(forward, here, there, found)
            pool.submit(forward, there, here, bytearray())
            assert sock.poll(SECOND_S * 1000)
            assert sock.recv_multipart()[1] == b"hello"
        for one in (here, there):
            with one, contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
    return bytes(found)


def test_a_recorded_connection_that_is_sent_again_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.security.HANDSHAKE_MS", 200)
    keys = RunKeys.new()
    with service(keys) as (sock, address):
        sent = recorded(address, keys, sock)
        assert len(sent) > len(GREETING + HELLO)
        for end in (len(sent), len(GREETING + HELLO)):
            with closing(connected(address)) as again, contextlib.suppress(ConnectionError):
                again.sendall(sent[:end])
                while again.recv(100):
                    pass
        assert not sock.poll(0)
        with client(address, HEAD, keys, HEAD):
            assert sock.poll(SECOND_S * 1000)
