"""Connections of a worker with the relay: whom they let in, and what passes while the relay or the worker restarts."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from stretto.collective_ops import Exchange
from stretto.errors import BrokenTransportError
from stretto.relay import GREETING, JOINED, NONCE_BYTES, REQUEST_BYTES
from stretto.transport import encrypted_rendezvous, encrypted_sockets
from stretto.transport.encrypted import EncryptedTransport
from stretto.transport.encrypted_rendezvous import EncryptedRendezvous
from stretto.transport.encrypted_sockets import ReservedPort
from stretto.transport.relay_tunnels import RelayAccess, RelayTunnels
from stretto.transport.worker_endpoint import Endpoint
from tests.encrypted_ends import joined, new_keys, view
from tests.fixed_ports import fixed_port
from tests.relays import SECRET, RelayThread, received

LIMIT_S = 60.0
PEER = new_keys().public
CONNECT = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + sys.argv[1]); print(s.recv(1))"


def joined_end(one: socket.socket) -> bytes:
    """Reply as a relay does that has the other end of a stream; return the request."""
    assert received(one, len(GREETING)) == GREETING
    one.sendall(bytes(NONCE_BYTES))
    return received(one, REQUEST_BYTES)


@contextlib.contextmanager
def listening(port: int = 0) -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", port)) as made:
        made.settimeout(LIMIT_S)
        yield made


@contextlib.contextmanager
def tunnels(relay: socket.socket, own: socket.socket, limit_s: float = 0.0) -> Iterator[RelayTunnels]:
    """Yield the tunnels of a worker with one peer."""
    end = Endpoint("127.0.0.1", own.getsockname()[1], new_keys().public)
    made = RelayTunnels(RelayAccess(f"127.0.0.1:{relay.getsockname()[1]}", SECRET), end, 1, [PEER])
    try:
        yield made
    finally:
        made.close(limit_s)


def sending(made: RelayTunnels) -> socket.socket:
    """Return a connection of this process, as of its sending socket."""
    found = socket.socket(socket.AF_UNIX)
    found.connect(made.name(PEER))
    return found


def accepted(relay: socket.socket, end: bytes) -> socket.socket:
    """Return the connection with the relay of an end; the other one is closed, and comes again."""
    while True:
        one, _ = relay.accept()
        one.settimeout(LIMIT_S)
        if joined_end(one)[:1] == end:
            return one
        one.close()


@pytest.mark.plain_processes
def test_another_process_cannot_use_the_connection_of_a_worker() -> None:
    with listening() as relay, listening() as own, tunnels(relay, own) as made:
        name = made.name(PEER)[1:].decode()
        found = subprocess.run([sys.executable, "-c", CONNECT, name], capture_output=True, timeout=150, text=True)
        assert found.stdout == "b''\n", found.stderr


def test_bytes_that_come_with_the_reply_reach_the_worker() -> None:
    with listening() as relay, listening() as own, tunnels(relay, own), accepted(relay, b"r") as one:
        one.sendall(JOINED + b"first")
        local, _ = own.accept()
        local.settimeout(LIMIT_S)
        with local:
            assert received(local, 5) == b"first"
            one.sendall(b"second")
            assert received(local, 6) == b"second"


def test_what_a_worker_has_sent_passes_before_its_tunnels_close() -> None:
    with contextlib.ExitStack() as stack:
        relay, own = stack.enter_context(listening()), stack.enter_context(listening())
        end = Endpoint("127.0.0.1", own.getsockname()[1], new_keys().public)
        made = RelayTunnels(RelayAccess(f"127.0.0.1:{relay.getsockname()[1]}", SECRET), end, 1, [PEER])
        local = stack.enter_context(sending(made))
        waiting = stack.enter_context(accepted(relay, b"r"))
        one = stack.enter_context(accepted(relay, b"s"))
        one.sendall(JOINED)
        local.settimeout(0.5)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 256 << 20:
                sent += local.send(bytes(1 << 20))
        assert sent < 64 << 20, "more than the buffers of the kernel hold"
        local.close()
        pool = stack.enter_context(ThreadPoolExecutor(1))
        closing = pool.submit(made.close, LIMIT_S)
        assert received(waiting, 1) == b"", "it closes"
        assert len(received(one, sent + 1)) == sent
        one.close()
        closing.result()


def test_ends_that_wait_for_another_worker_do_not_delay_the_end() -> None:
    with listening() as relay, listening() as own:
        began = time.monotonic()
        with tunnels(relay, own, limit_s=60) as made, sending(made), accepted(relay, b"s"):
            pass
        assert time.monotonic() - began < 30


def test_an_abort_while_a_transport_is_made_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous = EncryptedRendezvous("127.0.0.1", 3 * LIMIT_S, LIMIT_S)

    class Aborted(EncryptedTransport):
        def __init__(self, *arguments: Any) -> None:
            rendezvous.abort(1)
            super().__init__(*arguments)

    monkeypatch.setattr(encrypted_rendezvous, "EncryptedTransport", Aborted)
    silent, began = ReservedPort("127.0.0.1", new_keys()), time.monotonic()
    with pytest.raises(BrokenTransportError, match="the generation was aborted"):
        rendezvous.form(view([str(silent.endpoint), rendezvous.address]), 1)
    assert time.monotonic() - began < 2 * LIMIT_S
    silent.close()


def test_workers_try_again_while_the_relay_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encrypted_sockets, "machine_name", lambda: "")
    with ThreadPoolExecutor(1) as pool:
        port = fixed_port()
        with listening(port) as away:
            ports = [ReservedPort("127.0.0.1", new_keys()) for _ in range(2)]
            forming = pool.submit(joined, ports, relay=RelayAccess(f"127.0.0.1:{port}", SECRET))
            for _ in range(4):
                away.accept()[0].close()
        relay = RelayThread(port)
        ends = forming.result()
    handles = [end.submit(Exchange(1 - end.worker, torch.ones(9))) for end in ends]
    assert all(torch.equal(handle.wait(), torch.ones(9)) for handle in handles)
    for end in ends:
        end.abort()
        end.close()
    relay.stop()
