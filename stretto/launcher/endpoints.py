"""Listening sockets and keys of the services of a run: the parameter server and the coordinator."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from socket import socket

from stretto.errors import LaunchError, explain
from stretto.launcher.listeners import listening
from stretto.process_config import KeyTexts


@dataclass(frozen=True)
class Servers:
    """Listening sockets of the batch dispatcher and of each shard, or none; of the coordinator; of the relay.

    All keys are derived from `secret`; it is None where traffic is not encrypted. `coordinator` and `relay` are None
    where the run has none. `elsewhere` are the addresses of services that another launcher has started: the relay's,
    which leads to the coordinator, the batch dispatcher's and the shards'. The keys of this launcher and its workers
    are `given` then, by role.
    """

    sockets: tuple[socket, ...] = ()
    secret: str | None = field(default=None, repr=False)
    coordinator: socket | None = None
    elsewhere: tuple[str, ...] = ()
    relay: socket | None = None
    hosted: tuple[str, ...] = ()
    """Addresses of the shards on other hosts, which this launcher has started there."""
    given: Mapping[str, KeyTexts] = field(default_factory=dict, repr=False)

    @property
    def coordinator_at(self) -> str | None:
        """Address at which processes of this machine reach the coordinator, if there is one."""
        if self.coordinator is not None:
            return address(self.coordinator)
        return self.elsewhere[0] if self.elsewhere else None

    @property
    def relay_at(self) -> str | None:
        """Address of the relay, at which other machines reach the run, if they do."""
        if self.relay is not None:
            return address(self.relay)
        return self.elsewhere[0] if self.elsewhere else None

    @property
    def joined_at(self) -> str | None:
        """Address at which launchers join the run: the relay's, or the coordinator's on this machine alone."""
        return self.relay_at or self.coordinator_at

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self.hosted) or max(0, len(self.sockets) - 1)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the batch dispatcher and of each shard; empty without a parameter server."""
        return (*map(address, self.sockets), *self.hosted) if self.shards else self.elsewhere[1:]

    @property
    def is_encrypted(self) -> bool:
        """True if traffic is encrypted."""
        return self.secret is not None or bool(self.given)

    def keys_of(self, role: bytes) -> KeyTexts | None:
        """Return the keys of a client in this role; None where traffic is not encrypted."""
        if self.secret is None:
            return self.given.get(role.decode())
        from stretto.security import RunKeys  # imports zmq

        return RunKeys(self.secret).client(role).texts

    @property
    def relay_secret(self) -> tuple[str, ...]:
        """Key with which workers sign requests to the relay; empty without a relay."""
        keys = self.keys_of(b"relay") if self.relay_at is not None else None
        return keys[2:] if keys is not None else ()

    def keys_of_worker(self, number: int) -> tuple[str, ...] | None:
        """Return the keys of a worker, and that for the relay; None where traffic is not encrypted."""
        keys = self.keys_of(b"worker %d" % number)
        return (*keys, *self.relay_secret) if keys is not None else None

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
    hosted: bool = False,
    ports: range | None = None,
) -> Iterator[Servers]:
    """Open sockets for the shards and, if `coordinated`, for a coordinator; make a new secret unless `plain`.

    With a `host`, an address that other machines reach, the shards listen there, on free ones of the `ports`, and a
    relay on `port`, by default a free one; the coordinator is behind it. If the shards are `hosted`, other hosts have
    their sockets.
    """
    opened = (1 if hosted else shards + 1) if shards else 0
    with contextlib.ExitStack() as stack:
        relay = stack.enter_context(listening(port, host)) if coordinated and host is not None else None
        sockets = [stack.enter_context(listening(host=host, ports=ports)) for _ in range(opened)]
        coordinator = stack.enter_context(listening()) if coordinated else None
        secret = None if plain or not (shards or coordinated) else _new_secret()
        yield Servers(tuple(sockets), secret, coordinator, relay=relay)


def _new_secret() -> str:
    import zmq  # only where traffic is encrypted

    if not zmq.has("curve"):
        problem, expected = "traffic cannot be encrypted", "a ZeroMQ with CURVE encryption"
        raise LaunchError(explain(problem, got=zmq.zmq_version(), expected=expected, to_type="--no-encryption"))
    return secrets.token_hex(32)
