"""Keys of a run, and server sockets that admit only clients with its key (CURVE). Does not import torch."""

from __future__ import annotations

import functools
import hmac
import re
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.auth.thread
from zmq.utils import z85

from stretto.notices import printable

BACKLOG = 1024
HANDSHAKE_MS = 10_000
"""Time after which a service closes a connection that has not authenticated."""
SMALL_BYTES = 1 << 15
"""Size in bytes below which ZeroMQ copies a frame, which is cheaper than tracking it."""
HEAD, JOINING, AGENT, COORDINATOR, RELAY = b"launcher", b"joining", b"agent", b"coordinator", b"relay"
"""Roles of the launcher of a run, of a launcher that asks to join it, of an agent (a launcher on another host that the
launcher of the run has started, and that asks for the numbers reserved for it), of the coordinator at the parameter
server, and of workers at the relay. The others are b"worker 3", and b"launcher 3" for a launcher that has joined with
worker 3."""
NOT_SEEN = 4096
"""Number of workers that may have joined before the first of them connects to a service."""
PROOF, PROOF_BYTES = b" proof ", 32
_OF_WORKER = re.compile(rb"(?!launcher )[a-z]+ (\d+)\b")


class RunKeys:
    """Keys of one run: the pair of its services, and one for each role of their clients.

    All are derived from one secret, so a restarted service has the keys of the one before, and a worker that joins
    needs no registration. The launcher and the services have the secret; a client has its own pair. A key is
    HMAC-SHA256(secret, role). `workers` is the number of workers before any has joined.
    """

    def __init__(self, secret: str, workers: int = 0) -> None:
        self.secret, self._limit = secret, workers + NOT_SEEN
        self.public, self.private = self._pair(b"services")
        self._roles = {self._pair(role)[0]: role for role in (HEAD, JOINING, AGENT, COORDINATOR)}
        self._derived = 0
        self._lock = threading.Lock()

    @classmethod
    def new(cls) -> RunKeys:
        """Return new keys."""
        return cls(secrets.token_hex(32))

    def client(self, role: bytes) -> WorkerKeys:
        """Return the keys of a client in this role."""
        return WorkerKeys(self.public, *self._pair(role))

    def role(self, public: bytes) -> bytes | None:
        """Return the role of the client with this public key; None if it is not a key of the run.

        Worker numbers grow by one, so keys are derived up to a number above the largest that has been seen.
        """
        with self._lock:
            while public not in self._roles and self._derived < self._limit:
                for kind in (b"worker", b"launcher"):
                    role = b"%s %d" % (kind, self._derived)
                    self._roles[self._pair(role)[0]] = role
                self._derived += 1
            found = self._roles.get(public)
            if found is not None and found[-1:].isdigit():
                self._limit = max(self._limit, int(found.rpartition(b" ")[2]) + NOT_SEEN)
            return found

    def secret_of(self, name: bytes) -> bytes:
        """Return the secret key of the client with the connection of this name."""
        return _derived(self.secret, role_of(name))

    def _pair(self, role: bytes) -> tuple[bytes, bytes]:
        private = _derived(self.secret, role)
        return zmq.curve_public(private), private


@functools.lru_cache(maxsize=4096)  # each message needs one
def _derived(secret: str, role: bytes) -> bytes:
    """Return the secret key of a role."""
    return z85.encode(hmac.digest(bytes.fromhex(secret), role, "sha256"))


@dataclass(frozen=True)
class WorkerKeys:
    """Keys of a client: the public key of the run's services, and the pair of its own role."""

    servers: bytes
    public: bytes
    secret: bytes = field(repr=False)

    def secret_of(self, _name: bytes) -> bytes:
        """Return the secret key of any connection of this client."""
        return self.secret

    @property
    def texts(self) -> tuple[str, str, str]:
        """The keys as texts, for a configuration."""
        return self.servers.decode(), self.public.decode(), self.secret.decode()


def worker_keys(texts: Sequence[str] | None) -> WorkerKeys | None:
    """Return the keys of a worker from its configuration; None where traffic is not encrypted."""
    return WorkerKeys(*(text.encode() for text in texts[:3])) if texts else None


def run_keys(texts: Sequence[str] | None, workers: int) -> RunKeys | None:
    """Return the keys of a run from the configuration of a service; None where traffic is not encrypted."""
    return RunKeys(texts[0], workers) if texts else None


def role_of(name: bytes) -> bytes:
    """Return the role whose keys the connection of this name has: a worker has several connections.

    >>> role_of(b"worker 3.1"), role_of(b"events 3.0 rank 0 section 1"), role_of(b"launcher 4")
    (b'worker 3', b'worker 3', b'launcher 4')
    >>> role_of(HEAD), role_of(b"joining 4fd0")
    (b'launcher', b'joining')
    """
    if (match := _OF_WORKER.match(name)) is not None:
        return b"worker " + match[1]
    return name.partition(b" ")[0] if name.startswith((JOINING, AGENT)) else name


def address_toward(host: str) -> str:
    """Return this machine's address on the route to another. Raise OSError if there is no route."""
    family = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def use_keys(client: Any, name: bytes, keys: WorkerKeys | None) -> None:
    """Name a client's socket, which has not connected yet, and encrypt its connection if there are keys."""
    client.setsockopt(zmq.IDENTITY, identity_of(name, keys))
    if keys is not None:
        client.curve_serverkey = keys.servers
        client.curve_publickey, client.curve_secretkey = keys.public, keys.secret


def identity_of(name: bytes, keys: RunKeys | WorkerKeys | None) -> bytes:
    """Return the socket identity of the connection of this name: with keys, a proof of its role's key follows.

    A service has one connection for each identity, so without the proof a client could take the place of another.
    """
    if keys is None:
        return name
    return name + PROOF + hmac.digest(keys.secret_of(name), name, "sha256")[: PROOF_BYTES // 2].hex().encode()


def name_in(identity: bytes, keys: RunKeys | None) -> bytes:
    """Return the name in a socket identity. Raises ValueError without a proof of its role's key."""
    name = identity if keys is None else identity.partition(PROOF)[0]
    if not hmac.compare_digest(identity, identity_of(name, keys)):
        raise ValueError("it has not the key of this name")
    return name


def doorman(context: zmq.Context[Any], keys: RunKeys) -> Any:
    """Start and return the authenticator that admits clients with keys of the run."""
    made = zmq.auth.thread.ThreadAuthenticator(context)
    made.start()
    made.configure_curve_callback("*", credentials_provider=_KeyCheck(keys))
    return made


class _KeyCheck:
    """Credentials provider that accepts the keys of a run, and logs and counts others."""

    def __init__(self, keys: RunKeys) -> None:
        self._keys = keys
        self.refused = 0

    def callback(self, _domain: str, key: bytes) -> bool:
        if self._keys.role(key) is not None:
            return True
        self.refused += 1
        log(f"an unknown key was refused ({self.refused} so far)")
        return False


def router(context: zmq.Context[Any], keys: RunKeys | None, largest: int) -> Any:
    """Return a ROUTER socket that refuses frames above `largest` bytes."""
    made = context.socket(zmq.ROUTER)
    for option, value in {
        zmq.SNDHWM: 0,
        zmq.RCVHWM: 0,
        zmq.MAXMSGSIZE: largest,
        zmq.ROUTER_MANDATORY: 1,
        zmq.ROUTER_HANDOVER: 1,
        zmq.BACKLOG: BACKLOG,
        zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
    }.items():
        made.setsockopt(option, value)
    made.copy_threshold = SMALL_BYTES
    if keys is not None:
        made.curve_server = True
        made.curve_secretkey, made.curve_publickey = keys.private, keys.public
    return made


def log(text: str) -> None:
    """Print a line to the log of a server process."""
    print(f"stretto: server: {printable(text)}", file=sys.stderr, flush=True)
