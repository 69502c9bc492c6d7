"""A parameter server in this very process, each shard in a thread: for those whom no launcher has given one."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.dispatcher_handler import DispatcherHandler
from stretto.parameter_server.rpc_channel import dial
from stretto.parameter_server.rpc_server import ServerThreads, listening
from stretto.parameter_server.shard_handler import ShardHandler
from stretto.security import WorkerKeys, new_keys
from stretto.transport.interface import Transport


@dataclass(frozen=True)
class Hosted:
    """Where the services listen (the coordinator first), and the keys to speak to them."""

    house: ServerThreads
    addresses: list[str]
    keys: WorkerKeys | None
    workers: int

    def wire(self, worker: int, timeout_s: float, life: int = 0) -> ParameterServerClient:
        """One worker's end; a later life joins a run that is under way."""
        return dial(worker, self.workers, self.addresses, self.keys, timeout_s, life)

    def close(self) -> None:
        """End the services. Idempotent."""
        self.house.close()

    def see_out(self, limit_s: float = 10.0) -> None:
        """End the services once all workers have left, or after a while."""
        self.house.await_leave(limit_s)
        self.close()


def host(workers: int, shards: int = 1, *, on_nan: str = "stop", plain: bool = False, at: str = "127.0.0.1") -> Hosted:
    """Start a coordinator and so many shards in threads of this process."""
    servers, keys = (None, None) if plain else new_keys()
    house = ServerThreads(workers, servers)
    addresses = [house.open(listening(at), DispatcherHandler(workers, time.monotonic))]
    for _ in range(shards):
        addresses.append(house.open(listening(at), ShardHandler(workers, time.monotonic, on_nan)))
    return Hosted(house, addresses, keys, workers)


def meet_at_lead(
    meeting: Transport, shards: int, on_nan: str, timeout_s: float, at: str = "127.0.0.1"
) -> ParameterServerClient:
    """Worker 0 keeps a server in its process and tells the others over the wire on which they met, which is let go.

    It listens `at` the address where the workers met, and nowhere else. The keys travel as open as that wire is.
    """
    hosted = host(meeting.workers, shards, on_nan=on_nan, at=at) if meeting.worker == 0 else None
    told = meeting.broadcast_bytes(_pack(hosted) if hosted is not None else b"")
    addresses, keys = msgspec.msgpack.decode(told, type=tuple[list[str], tuple[bytes, bytes, bytes]])
    wire = dial(meeting.worker, meeting.workers, addresses, WorkerKeys(*keys), timeout_s)
    wire.all_gather_bytes(b"here")
    meeting.close()
    if hosted is not None:
        wire.when_closed(hosted.see_out)
    return wire


def _pack(hosted: Hosted) -> bytes:
    assert hosted.keys is not None
    keys = (hosted.keys.servers, hosted.keys.public, hosted.keys.secret)
    return msgspec.msgpack.encode((hosted.addresses, keys))
