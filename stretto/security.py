"""The doors of services: sockets that let in who has the run's key, and the keys. Nothing here imports torch."""

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
"""Frames that are cheaper to copy than to keep account of."""


@dataclass(frozen=True)
class ServerKeys:
    """What a server must know: its own pair, and the public key of the run's workers."""

    secret: bytes
    public: bytes
    workers: bytes


@dataclass(frozen=True)
class WorkerKeys:
    """What a worker must know: the servers' public key, and the pair of the run's workers."""

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
    """Keys for one run."""
    server_public, server_secret = zmq.curve_keypair()
    worker_public, worker_secret = zmq.curve_keypair()
    return (
        ServerKeys(server_secret, server_public, worker_public),
        WorkerKeys(server_public, worker_public, worker_secret),
    )


def address_toward(host: str) -> str:
    """This machine's address on the way to another. Raises OSError where there is no way."""
    family = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def doorman(context: zmq.Context[Any], keys: ServerKeys) -> Any:
    """Lets in who has the workers' key."""
    made = zmq.auth.thread.ThreadAuthenticator(context)
    made.start()
    made.configure_curve_callback("*", credentials_provider=_Guests(keys.workers))
    return made


class _Guests:
    """Says to the authenticator who may come in; says to the log who may not."""

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
    """A socket for many; frames above `largest` bytes are not taken in."""
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
    """What the log of a server's process says."""
    print(f"stretto: server: {text}", file=sys.stderr, flush=True)
