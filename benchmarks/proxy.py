"""A proxy between a worker and the coordinator, shards and other workers, which can be slow, silent or cut.

It prints its address. A connection to it has one request, a line of JSON, and one reply: `{"worker": "1.0",
"addresses": [...]}` returns the addresses that process 0 of worker 1 has to use in place of these, and `{"worker":
"1.0", "trouble": "STALL"}` begins a trouble of its connections, in both directions.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from benchmarks.pace import ROOT

LONGEST = 1 << 16
"""Bytes of the longest piece that is passed on at a time."""


class Trouble(NamedTuple):
    """A trouble of connections: its duration, and what happens to each piece of bytes that comes in it."""

    lasts_s: float = 0.0
    waits_s: float = 0.0
    """Seconds that a piece waits, at most until the end of the trouble."""
    is_halved: bool = False
    """True if the first half of a piece does not wait."""
    is_cut: bool = False
    """True if the connection is cut in the middle of a piece."""


TROUBLES = {
    "DELAY": Trouble(2.0, waits_s=0.05),
    "LOSS": Trouble(2.0, waits_s=0.25, is_halved=True),
    "STALL": Trouble(1.0, waits_s=1.0),
    "SILENCE": Trouble(5.0, waits_s=5.0),
    "TEAR": Trouble(0.5, is_halved=True, is_cut=True),
}
current: defaultdict[str, tuple[Trouble, float]] = defaultdict(lambda: (Trouble(), 0.0))
"""The last trouble of each process, and the time of its end."""


@contextmanager
def proxy() -> Iterator[str]:
    """Yield the address of a proxy in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.proxy"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


async def carry(process: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what a connection of a process brings, as its trouble has it."""
    clock = asyncio.get_running_loop().time
    while piece := await reader.read(LONGEST):
        trouble, end = current[process]
        if (left_s := end - clock()) > 0:
            first = len(piece) // 2 if trouble.is_halved else 0
            writer.write(piece[:first])
            await writer.drain()
            if trouble.is_cut:
                raise ConnectionAbortedError
            await asyncio.sleep(min(trouble.waits_s, left_s))
            piece = piece[first:]
        writer.write(piece)
        await writer.drain()
    writer.write_eof()


async def listen(process: str, address: str) -> str:
    """Return an address of this proxy, whose connections are those of a process with an address."""
    host, _, port = address.rpartition(":")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            from_there, to_there = await asyncio.open_connection(host, int(port))
            writers.append(to_there)
            async with asyncio.TaskGroup() as group:
                group.create_task(carry(process, reader, to_there))
                group.create_task(carry(process, from_there, writer))
        except* OSError:
            for one in writers:
                one.transport.abort()
        finally:
            for one in writers:
                one.close()

    server = await asyncio.start_server(connected, host, 0)
    return "{}:{}".format(*server.sockets[0].getsockname())


async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry out a request."""
    request = json.loads(await reader.readline())
    process, trouble = request["worker"], TROUBLES.get(request.get("trouble"))
    if trouble is not None:
        current[process] = trouble, asyncio.get_running_loop().time() + trouble.lasts_s
    addresses = [await listen(process, address) for address in request.get("addresses", ())]
    writer.write(json.dumps(addresses).encode() + b"\n")
    await writer.drain()
    writer.close()


async def main() -> None:
    """Listen, and print the address, until this process is ended."""
    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    print("{}:{}".format(*server.sockets[0].getsockname()), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
