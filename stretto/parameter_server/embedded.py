"""A parameter server in threads of this process, for workers that were not started by a launcher."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.dispatcher_handler import DispatcherHandler
from stretto.parameter_server.rpc_channel import connect_client
from stretto.parameter_server.rpc_server import ServerThreads, listening
from stretto.parameter_server.service import Service
from stretto.parameter_server.shard_handler import ShardHandler
from stretto.security import RunKeys, WorkerKeys, role_of
from stretto.transport.interface import Transport


@dataclass(frozen=True)
class EmbeddedServer:
    """Addresses of the services, the dispatcher's first, and the keys to connect to them."""

    server: ServerThreads
    addresses: list[str]
    keys: RunKeys | None
    workers: int

    def client(self, worker: int, timeout_s: float, incarnation: int = 0) -> ParameterServerClient:
        """Return one worker's client; an incarnation above 0 joins the running training."""
        joins = incarnation > 0
        keys = self.keys_of(b"worker %d" % worker)
        return connect_client(worker, self.workers, self.addresses, keys, timeout_s, incarnation, joins=joins)

    def keys_of(self, name: bytes) -> WorkerKeys | None:
        """Return the keys of the client with the connection of this name; None where traffic is not encrypted."""
        return self.keys.client(role_of(name)) if self.keys is not None else None

    def close(self) -> None:
        """End the services. Idempotent."""
        self.server.close()

    def close_when_left(self, limit_s: float = 10.0) -> None:
        """End the services once all workers have left, or after `limit_s` seconds."""
        self.server.await_leave(self.workers, limit_s)
        self.close()


def start_server(
    workers: int, shards: int = 1, *, on_nan: str = "stop", plain: bool = False, address: str = "127.0.0.1"
) -> EmbeddedServer:
    """Start a dispatcher and `shards` shards in threads of this process."""
    keys = None if plain else RunKeys.new()
    server = ServerThreads(keys, workers - 1)
    addresses = [server.open(listening(address), Service(DispatcherHandler(workers, time.monotonic)))]
    for _ in range(shards):
        addresses.append(server.open(listening(address), Service(ShardHandler(workers, time.monotonic, on_nan))))
    return EmbeddedServer(server, addresses, keys, workers)


def serve_at_rank0(
    rendezvous: Transport, shards: int, on_nan: str, timeout_s: float, address: str = "127.0.0.1"
) -> ParameterServerClient:
    """Start a server in worker 0's process and broadcast its addresses over `rendezvous`, which is then closed.

    The server listens only at the address where the workers met. The keys are as exposed as that transport.
    """
    embedded = (
        start_server(rendezvous.workers, shards, on_nan=on_nan, address=address) if rendezvous.worker == 0 else None
    )
    broadcast = rendezvous.broadcast_bytes(_pack(embedded) if embedded is not None else b"")
    addresses, secret = msgspec.msgpack.decode(broadcast, type=tuple[list[str], str])
    keys = RunKeys(secret).client(b"worker %d" % rendezvous.worker)
    client = connect_client(rendezvous.worker, rendezvous.workers, addresses, keys, timeout_s)
    client.all_gather_bytes(b"here")
    rendezvous.close()
    if embedded is not None:
        client.on_close(embedded.close_when_left)
    return client


def _pack(embedded: EmbeddedServer) -> bytes:
    assert embedded.keys is not None
    return msgspec.msgpack.encode((embedded.addresses, embedded.keys.secret))
