"""Messages between a launcher and its agent of shards on another host, one line of JSON each.

    launcher                                    agent, `stretto serve`
      | -- ServeShards, the first line ----------> | opens a listening socket for each shard
      | <- ShardsListen -------------------------- |
      | -- StartShard, with keys ----------------> | starts a process, which inherits the socket of its shard
      | <- ShardOutput --------------------------- |
      | -- SignalShard --------------------------> |
      | <- ShardExited --------------------------- | the socket stays open for the next incarnation
      | -- ReleaseShard -------------------------> |
      | -- end of the input ---------------------> | ends all processes, and exits

`start` is the number of a start, from 0, by which later messages name the process.
"""

from __future__ import annotations

import msgspec

from stretto.membership.worker_status import ProcessRecord
from stretto.process_config import ShardConfig
from stretto.run_config import decode_path


class ServeShards(msgspec.Struct, frozen=True, tag=True):
    """Request for listening sockets, at this host's address on the route to the launcher's `host`."""

    versions: dict[str, str]
    host: str
    shards: tuple[int, ...]
    name: str
    """Name of the program, for the folder of the shards."""
    code: bytes = b""
    """Archive of the script's folder, if the recipe has codecs of its own; else empty."""


class StartShard(msgspec.Struct, frozen=True, tag=True):
    """Request to start the process of a shard. The configuration holds its keys."""

    start: int
    config: ShardConfig


class SignalShard(msgspec.Struct, frozen=True, tag=True):
    """Request to send a signal to a process; `injected` is True for a fault."""

    start: int
    number: int
    injected: bool


class ReleaseShard(msgspec.Struct, frozen=True, tag=True):
    """Request to kill the remaining processes of a group."""

    start: int


class ShardsListen(msgspec.Struct, frozen=True, tag=True):
    """Addresses of the shards, in order."""

    addresses: tuple[str, ...]


class ShardOutput(msgspec.Struct, frozen=True, tag=True):
    """Output of a process; empty at its end."""

    start: int
    data: bytes


class ShardExited(msgspec.Struct, frozen=True, tag=True):
    """Exit of a process, with its last record and the lines that it wrote to its event log."""

    start: int
    code: int
    injected: bool
    record: ProcessRecord
    events: bytes


ToAgent = StartShard | SignalShard | ReleaseShard
FromAgent = ShardsListen | ShardOutput | ShardExited
SERVE_SHARDS = msgspec.json.Decoder(ServeShards)
TO_AGENT = msgspec.json.Decoder(ToAgent, dec_hook=decode_path)
FROM_AGENT = msgspec.json.Decoder(FromAgent)


def line(message: ServeShards | ToAgent | FromAgent) -> bytes:
    """Return the line of a message."""
    return msgspec.json.encode(message, enc_hook=str) + b"\n"
