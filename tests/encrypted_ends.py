"""Encrypted transports in the threads of one process."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import zmq
from zmq.utils import z85

from stretto.membership.messages import GenerationView, Member, ReadyReport
from stretto.transport.encrypted import EncryptedTransport
from stretto.transport.encrypted_sockets import KeyPair, ReservedPort
from stretto.transport.noise import HANDSHAKE_BYTES, Cipher, Handshake
from stretto.transport.relay_tunnels import RelayAccess
from stretto.transport.secure_connections import MAGIC, PREFACE, sealed
from stretto.transport.worker_endpoint import Endpoint
from tests.relays import received, shared_relay

LIMIT_S = 60.0


def view(addresses: Sequence[str], generation: int = 1) -> GenerationView:
    """Return what the coordinator would send the workers of these addresses."""
    members = [Member(worker, 0, ReadyReport(0, address=one)) for worker, one in enumerate(addresses)]
    return GenerationView(generation, members)


def new_keys() -> KeyPair:
    """Return the keys of one worker process."""
    return KeyPair(*zmq.curve_keypair())


def encrypted(workers: int, timeout_s: float = LIMIT_S, generation: int = 1) -> list[EncryptedTransport]:
    """Return the ends of one generation on the loopback interface."""
    return joined([ReservedPort("127.0.0.1", new_keys()) for _ in range(workers)], timeout_s, generation)


def relayed(workers: int, timeout_s: float = LIMIT_S) -> list[EncryptedTransport]:
    """Return the ends of one generation that exchange through a relay, if this machine has no name."""
    ports = [ReservedPort("127.0.0.1", new_keys()) for _ in range(workers)]
    return joined(ports, timeout_s, relay=shared_relay().access)


def joined(
    ports: Sequence[ReservedPort], timeout_s: float = LIMIT_S, generation: int = 1, relay: RelayAccess | None = None
) -> list[EncryptedTransport]:
    """Return the ends of one generation at these ports."""
    ends = [(worker, port.endpoint) for worker, port in enumerate(ports)]

    def connect(rank: int) -> EncryptedTransport:
        transport = EncryptedTransport(ports[rank], generation, rank, ends, timeout_s, relay)
        transport.connect(LIMIT_S)
        return transport

    with ThreadPoolExecutor(len(ports)) as pool:
        return list(pool.map(connect, range(len(ports))))


class Sending:
    """Connection that sends to an endpoint with these keys, as that of a member's rank does; nothing while silent."""

    def __init__(self, keys: KeyPair, end: Endpoint, rank: int, generation: int = 1, is_silent: bool = False) -> None:
        self.socket = socket.create_connection((end.host, end.port), LIMIT_S)
        self._preface = PREFACE.pack(MAGIC, generation, rank)
        self._handshake = Handshake(True, z85.decode(keys.secret), z85.decode(end.public), self._preface)
        self.cipher: Cipher | None = None
        if not is_silent:
            self.begin()

    def begin(self) -> None:
        """Send the first message of the handshake."""
        self.socket.sendall(self._preface + self._handshake.write())

    def is_admitted(self) -> bool:
        """Return True if the receiver replies to the handshake, and False if it closes the connection."""
        try:
            reply = received(self.socket, HANDSHAKE_BYTES)
        except ConnectionError:
            return False
        if reply:
            self._handshake.read(reply)
            self.cipher, _ = self._handshake.ciphers()
        return bool(reply)

    def send(self, head: bytes, payload: bytes = b"") -> None:
        """Send a message, once the receiver has replied."""
        assert self.cipher is not None
        self.socket.sendall(sealed(self.cipher, head, payload))
