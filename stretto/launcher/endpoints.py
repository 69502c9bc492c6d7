"""Listening sockets and keys of the services of a run: the parameter server and the coordinator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from socket import socket

from stretto.errors import LaunchError, explain
from stretto.launcher.listeners import listening
from stretto.process_config import KeyTexts


@dataclass(frozen=True)
class Pair:
    """A CURVE key pair; the secret key is never printed."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True)
class Keys:
    """Key pairs of one run: one for its servers, one for its workers."""

    server: Pair
    worker: Pair


@dataclass(frozen=True)
class Servers:
    """Listening sockets of the batch dispatcher and of each shard, or none; of the coordinator; of the relay.

    `keys` is None where traffic is not encrypted, `coordinator` and `relay` where the run has none. `elsewhere` are the
    addresses of services that another launcher has started: the coordinator's, the batch dispatcher's and the shards';
    `relay_elsewhere` is that of its relay.
    """

    sockets: tuple[socket, ...] = ()
    keys: Keys | None = None
    coordinator: socket | None = None
    elsewhere: tuple[str, ...] = ()
    relay: socket | None = None
    relay_elsewhere: str | None = None

    @property
    def coordinator_at(self) -> str | None:
        """Address of the coordinator, if there is one."""
        if self.coordinator is not None:
            return address(self.coordinator)
        return self.elsewhere[0] if self.elsewhere else None

    @property
    def relay_at(self) -> str | None:
        """Address of the relay, if there is one."""
        return address(self.relay) if self.relay is not None else self.relay_elsewhere

    @property
    def shards(self) -> int:
        """Number of shards."""
        return max(0, len(self.sockets) - 1)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the batch dispatcher and of each shard; empty without a parameter server."""
        return tuple(map(address, self.sockets)) if self.shards else self.elsewhere[1:]

    @property
    def worker_keys(self) -> KeyTexts | None:
        """Keys of a worker; None where traffic is not encrypted."""
        if self.keys is None:
            return None
        return self.keys.server.public, self.keys.worker.public, self.keys.worker.secret

    @property
    def server_keys(self) -> KeyTexts | None:
        """Keys of a server and of the coordinator; None where traffic is not encrypted."""
        if self.keys is None:
            return None
        return self.keys.server.secret, self.keys.server.public, self.keys.worker.public

    def inherited(self, shard: int, with_dispatcher: bool) -> list[int]:
        """Return the sockets that a shard's process inherits: its own, and perhaps that of the batch dispatcher."""
        return [sock.fileno() for sock in (self.sockets[shard + 1], *self.sockets[:with_dispatcher])]

    def close(self) -> None:
        """Close the sockets. Once only the servers hold them, connections to an exited server are refused."""
        for sock in self.sockets:
            sock.close()


def address(listener: socket) -> str:
    """Return the address of a listening socket, host:port."""
    return "{}:{}".format(*listener.getsockname()[:2])


@contextlib.contextmanager
def servers_for(
    shards: int,
    plain: bool,
    coordinated: bool = False,
    host: str | None = None,
    port: int | None = None,
    relayed: bool = False,
) -> Iterator[Servers]:
    """Open sockets at `host` for the shards and, if `coordinated`, for a coordinator; make new keys unless `plain`.

    The coordinator listens on `port`, by default a free one. If `relayed`, there is a socket for a relay.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(listening(host=host)) for _ in range(shards + 1 if shards else 0)]
        coordinator = stack.enter_context(listening(port, host)) if coordinated else None
        relay = stack.enter_context(listening(host=host)) if relayed else None
        keys = None if plain or not (shards or coordinated) else _new_keys()
        yield Servers(tuple(sockets), keys, coordinator, relay=relay)


def _new_keys() -> Keys:
    import zmq  # only where traffic is encrypted

    try:
        return Keys(Pair(*_halves(zmq.curve_keypair())), Pair(*_halves(zmq.curve_keypair())))
    except zmq.ZMQError as error:
        problem = f"keys cannot be generated: {error}"
        expected = "a ZeroMQ with CURVE encryption"
        raise LaunchError(
            explain(problem, got=zmq.zmq_version(), expected=expected, to_type="--no-encryption")
        ) from error


def _halves(pair: tuple[bytes, bytes]) -> Iterator[str]:
    return (half.decode("ascii") for half in pair)
