"""Keys of a run, and server sockets that admit only clients with its key (CURVE). Does not import torch."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.auth.thread

BACKLOG = 1024
SMALL_BYTES = 1 << 15
"""Size in bytes below which ZeroMQ copies a frame, which is cheaper than tracking it."""


@dataclass(frozen=True)
class ServerKeys:
    """Keys of a server: its own pair, and the public key of the run's workers."""

    secret: bytes
    public: bytes
    workers: bytes


@dataclass(frozen=True)
class WorkerKeys:
    """Keys of a worker: the servers' public key, and the pair that all workers of the run share."""

    servers: bytes
    public: bytes
    secret: bytes


def worker_keys(texts: Sequence[str] | None) -> WorkerKeys | None:
    """Return the keys of a worker from its configuration; None where traffic is not encrypted."""
    return WorkerKeys(*(text.encode() for text in texts)) if texts else None


def server_keys(texts: Sequence[str] | None) -> ServerKeys | None:
    """Return the keys of a server from its configuration; None where traffic is not encrypted."""
    return ServerKeys(*(text.encode() for text in texts)) if texts else None


def new_keys() -> tuple[ServerKeys, WorkerKeys]:
    """Return new keys for one run."""
    server_public, server_secret = zmq.curve_keypair()
    worker_public, worker_secret = zmq.curve_keypair()
    return (
        ServerKeys(server_secret, server_public, worker_public),
        WorkerKeys(server_public, worker_public, worker_secret),
    )


def address_toward(host: str) -> str:
    """Return this machine's address on the route to another. Raise OSError if there is no route."""
    family = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def use_keys(client: Any, keys: WorkerKeys | None) -> None:
    """Encrypt the connection of a client's socket, which has not connected yet; do nothing without keys."""
    if keys is not None:
        client.curve_serverkey = keys.servers
        client.curve_publickey, client.curve_secretkey = keys.public, keys.secret


def doorman(context: zmq.Context[Any], keys: ServerKeys) -> Any:
    """Start and return the authenticator that admits clients with the workers' key."""
    made = zmq.auth.thread.ThreadAuthenticator(context)
    made.start()
    made.configure_curve_callback("*", credentials_provider=_KeyCheck(keys.workers))
    return made


class _KeyCheck:
    """Credentials provider that accepts one key, and logs and counts others."""

    def __init__(self, public: bytes) -> None:
        self._public = public
        self.refused = 0

    def callback(self, _domain: str, key: bytes) -> bool:
        if key == self._public:
            return True
        self.refused += 1
        log(f"an unknown key was refused ({self.refused} so far)")
        return False


def router(context: zmq.Context[Any], keys: ServerKeys | None, largest: int) -> Any:
    """Return a ROUTER socket that refuses frames above `largest` bytes."""
    made = context.socket(zmq.ROUTER)
    for option, value in {
        zmq.SNDHWM: 0,
        zmq.RCVHWM: 0,
        zmq.MAXMSGSIZE: largest,
        zmq.ROUTER_MANDATORY: 1,
        zmq.ROUTER_HANDOVER: 1,
        zmq.BACKLOG: BACKLOG,
    }.items():
        made.setsockopt(option, value)
    made.copy_threshold = SMALL_BYTES
    if keys is not None:
        made.curve_server = True
        made.curve_secretkey, made.curve_publickey = keys.secret, keys.public
    return made


def log(text: str) -> None:
    """Print a line to the log of a server process."""
    print(f"stretto: server: {text}", file=sys.stderr, flush=True)
