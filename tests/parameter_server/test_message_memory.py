"""Updates and replies through memory that a worker and a shard share: the same bits, whichever process fails."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from parameter_servers import ADDING_RECIPE, ServerProcesses, Servers, push, receive
from torch import Tensor

from stretto.codecs import CodecContext
from stretto.errors import TransportError
from stretto.parameter_server import message_memory
from stretto.parameter_server import messages as m
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.client_types import RollbackRequiredError, Update, ranges, split_among_shards
from stretto.parameter_server.embedded import EmbeddedServer
from stretto.parameter_server.message_memory import MemoryFile
from stretto.parameter_server.rpc_channel import DeathNotifier, connect_client
from stretto.recipe.parser import parse
from stretto.security import COORDINATOR
from stretto.transport.host_memory import Offer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files exist on Linux only")

LENGTH = 700_001
"""Elements of the updates: some chunks, the last of which is odd."""
LIMIT_S = 60.0


def uses_memory(wire: ParameterServerClient) -> bool:
    return not wire.traffic().counted


def only_connections(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(message_memory, "SMALLEST_BYTES", sys.maxsize)


def mappings() -> int:
    """Return the number of memory files that this process maps, each counted once for each mapping."""
    return Path("/proc/self/maps").read_text().count("memfd:stretto (")


def open_files() -> int:
    """Return the number of memory files that this process has open; a mapping keeps a descriptor, too."""
    found = 0
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the directory
            found += "memfd:stretto (" in str(file.readlink())
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check that no memory file stays open or mapped after a test."""
    yield
    gc.collect()
    assert (mappings(), open_files()) == (0, 0)


@pytest.fixture
def servers(nothing_is_left: None) -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.close()


def record_of(hosted: EmbeddedServer, worker: int) -> Any:
    """Return the first shard's record of a worker."""
    handler: Any = hosted.server.services[1]._service.handler
    return handler._shard.members[worker]


def until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, f"not within {limit_s} s"
        time.sleep(0.005)


# The same bits


RECIPES = [
    "async_sgd",
    "async_sgd(shards=2)",
    "elastic_averaging(every=1)",
    "stale_synchronous(bound=0)",
    "soft_sync(collect=2)",
    "delay_compensated",
    "async_sgd(how=top_k(0.3))",
    "async_sgd(how=quantise(8))",
    "async_sgd(how=both_ways(top_k(0.5), top_k(0.5)))",
]


def trained(servers: Servers, text: str) -> tuple[list[Tensor], list[bool]]:
    """Return all replies to the updates of two workers, and for each worker True if it used memory."""
    recipe, generator = parse(text), torch.Generator().manual_seed(5)
    hosted = servers.start(2, shards=2 if "shards" in text else 1)
    wires, how = servers.clients(hosted), recipe.how
    start, replies, versions = torch.randn(LENGTH, generator=generator), [], [[0] * wire.shards for wire in wires]
    wires[0].open(1, text, [start])
    states = [
        [how.init_state(start[a:b], CodecContext(worker, 2)) for a, b in ranges(LENGTH, wires[0].shards)]
        for worker in range(2)
    ]
    for seq in range(1, 5):
        handles = []
        for worker, wire in enumerate(wires):
            parts = split_among_shards([torch.randn(LENGTH, generator=generator)], wire.shards)
            messages = [[how.encode(part, state)] for (part,), state in zip(parts, states[worker], strict=True)]
            handles.append(wire.push(1, Update(seq, versions[worker], 8, 0.1, messages), [LENGTH]))
            for service in hosted.server.services[1:]:
                until(lambda at=service, of=worker, to=seq: at._service.handler._shard.members[of].completed == to)
        for worker, handle in enumerate(handles):
            if how.reply is not None:
                result, replied = handle.messages()
                replies += [reply for each in replied for reply in each]
            else:
                result, found = receive(handle, [start])
                replies += found
            versions[worker] = result.versions
    replies += receive(wires[0].read([LENGTH], flush=True), [start])[1]
    return replies, [uses_memory(wire) for wire in wires]


@pytest.mark.parametrize("recipe", RECIPES)
def test_replies_have_the_same_bits_with_and_without_memory(
    servers: Servers, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, used = trained(servers, recipe)
    assert used == [True, True]
    assert mappings() >= 4
    only_connections(monkeypatch)
    expected, used = trained(servers, recipe)
    assert used == [False, False]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_updates_of_workers_at_the_same_time_are_all_applied(servers: Servers) -> None:
    wires = servers.clients(servers.start(2, shards=2))
    theta = [torch.zeros(LENGTH)]
    wires[0].open(1, ADDING_RECIPE, theta)

    def run(wire: ParameterServerClient) -> None:
        for seq in range(1, 21):
            _, (found,) = receive(push(wire, seq, [torch.ones(LENGTH)]), theta)
            assert all(len(part.unique()) == 1 for (part,) in split_among_shards([found], 2))

    with ThreadPoolExecutor() as pool:
        list(pool.map(run, wires))
    assert torch.equal(receive(wires[0].read([LENGTH]), theta)[1][0], torch.full((LENGTH,), 40.0))


def test_a_second_update_in_flight_goes_over_the_connection(servers: Servers) -> None:
    (wire,) = servers.clients(servers.start(1))
    theta = [torch.zeros(LENGTH)]
    wire.open(1, ADDING_RECIPE, theta)
    receive(push(wire, 1, [torch.ones(LENGTH)]), theta)
    for seq in (2, 4):
        before = wire.channels[0]._memory.traffic  # type: ignore[attr-defined]
        one, two = (push(wire, number, [torch.ones(LENGTH)]) for number in (seq, seq + 1))
        assert torch.equal(receive(two, theta)[1][0], torch.full((LENGTH,), seq + 1.0))
        assert torch.equal(receive(one, theta)[1][0], torch.full((LENGTH,), seq + 0.0))
        after = wire.channels[0]._memory.traffic  # type: ignore[attr-defined]
        assert [now - earlier for now, earlier in zip(after, before, strict=True)] == [4 * LENGTH] * 2


def test_the_file_of_a_discarded_update_is_used_again_once_its_reply_has_arrived(servers: Servers) -> None:
    (wire,) = servers.clients(servers.start(1))
    theta = [torch.zeros(LENGTH)]
    wire.open(1, ADDING_RECIPE, theta)
    receive(push(wire, 1, [torch.ones(LENGTH)]), theta)
    for seq in (2, 4, 6):
        push(wire, seq, [torch.ones(LENGTH)]).discard()
        assert torch.equal(
            receive(push(wire, seq + 1, [torch.ones(LENGTH)]), theta)[1][0], torch.full((LENGTH,), seq + 1.0)
        )
        assert wire.channels[0]._memory._lent_to == 0  # type: ignore[attr-defined]


def test_larger_updates_get_a_larger_file_and_smaller_ones_keep_it(servers: Servers) -> None:
    (wire,) = servers.clients(servers.start(1))
    text, generator = "async_sgd(how=top_k(0.9))", torch.Generator().manual_seed(1)
    how, start = parse(text).how, torch.zeros(LENGTH)
    wire.open(1, text, [start])
    sum_of_all = torch.zeros(LENGTH)
    for seq, share in enumerate((0.1, 0.2, 0.15, 0.8, 0.3), 1):
        change = torch.randn(LENGTH, generator=generator)
        message = parse(f"async_sgd(how=top_k({share}))").how.encode(change, None)
        sum_of_all += how.decode(message, torch.empty(LENGTH))
        result, (found,) = receive(wire.push(1, Update(seq, [seq - 1], 8, 0.1, [[message]]), [LENGTH]), [start])
        assert result.versions == [seq]
        assert torch.equal(found, sum_of_all)
        until(lambda: mappings() == 2)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "curve"])
def test_traffic_is_that_of_connections(servers: Servers, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for _ in range(2):
        (wire,) = servers.clients(servers.start(1, plain=plain))
        wire.open(1, ADDING_RECIPE, [torch.zeros(LENGTH)])
        before = wire.traffic()
        for seq in (1, 2, 3):
            receive(push(wire, seq, [torch.ones(LENGTH)]), [torch.zeros(LENGTH)])
        after = wire.traffic()
        found.append((after.bytes_sent - before.bytes_sent, after.bytes_received - before.bytes_received))
        assert after.counted == (len(found) == 2)
        only_connections(monkeypatch)
    assert all(abs(one / other - 1) < 0.02 for one, other in zip(*found, strict=True))


# No memory


OFFERS: dict[str, Callable[[Offer], Offer]] = {
    "another host or network": lambda offer: msgspec.structs.replace(offer, host="elsewhere net:[1]"),
    "another file": lambda offer: msgspec.structs.replace(offer, name=bytes(64)),
    "no such process": lambda offer: msgspec.structs.replace(offer, pid=2**22 + 1),
    "a file that can become shorter": lambda offer: msgspec.structs.replace(offer, file=_unsealed(offer.name)),
}


def _unsealed(name: bytes) -> int:
    file = os.memfd_create("other")
    os.pwrite(file, name, 0)
    return file


def check_updates(wire: ParameterServerClient) -> None:
    """Assert that each of three updates is in the parameters of its reply."""
    theta = [torch.zeros(LENGTH)]
    wire.open(1, ADDING_RECIPE, theta)
    for seq in (1, 2, 3):
        _, (after,) = receive(push(wire, seq, [torch.ones(LENGTH)]), theta)
        assert torch.equal(after, torch.full((LENGTH,), float(seq)))


@pytest.mark.parametrize("which", OFFERS)
def test_a_file_that_the_shard_cannot_map_is_offered_once(
    servers: Servers, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_file, made = message_memory._new_file, []

    def offered(room: int) -> tuple[Offer, MemoryFile]:
        offer, file = new_file(room)
        made.append(offer)
        return OFFERS[which](offer), file

    monkeypatch.setattr(message_memory, "_new_file", offered)
    (wire,) = servers.clients(servers.start(1))
    check_updates(wire)
    assert (len(made), uses_memory(wire), mappings()) == (1, False, 0)


@pytest.mark.parametrize("at", [0, 1], ids=["worker", "shard"])
def test_without_memory_for_a_file_messages_go_over_the_connection(
    servers: Servers, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, calls = os.posix_fallocate, iter(range(9))

    def failing(*arguments: int) -> None:
        if next(calls) == at:
            raise OSError(28, "No space left on device")
        allocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", failing)
    (wire,) = servers.clients(servers.start(1))
    check_updates(wire)
    assert not uses_memory(wire)


def test_places_outside_of_the_file_are_refused(servers: Servers) -> None:
    hosted = servers.start(1)
    (wire,) = servers.clients(hosted)
    theta = [torch.zeros(LENGTH)]
    wire.open(1, ADDING_RECIPE, theta)
    receive(push(wire, 1, [torch.ones(LENGTH)]), theta)
    channel: Any = wire.channels[0]
    for place in (
        b"",
        b"short",
        bytes(16),
        message_memory._PLACE.pack(2**40, 4),
        message_memory._PLACE.pack(2**64 - 4, 8),
    ):
        request_id = channel._session.number((m.Push(1, 2, 0, 8, 0.1), ()))
        header = m.MemoryHeader(request_id, m.Push(1, 2, 0, 8, 0.1), [("float32", LENGTH)], 0, True)
        channel._socket.send_multipart([msgspec.msgpack.encode(header), place])
        with pytest.raises(TransportError, match="server 0 refused: a chunk of 0 bytes where it does not fit"):
            channel.wait(request_id)
    assert torch.equal(receive(push(wire, 2, [torch.ones(LENGTH)]), theta)[1][0], torch.full((LENGTH,), 2.0))


# Workers that fail


STAGES = """
import sys, torch
from stretto.parameter_server import framing, rpc_channel
from stretto.parameter_server.client_types import Update
from stretto.security import WorkerKeys
stage, length, addresses, keys = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(), sys.argv[4].split()
torch.set_num_threads(1)
wire = rpc_channel.connect_client(1, 2, addresses, WorkerKeys(*(key.encode() for key in keys)), 60.0)
push = lambda seq: wire.push(1, Update(seq, [0], 8, 0.1, [[torch.ones(length)]]), [length])
if stage != "offered":
    push(1).wait(lambda *_: None)
    assert not wire.traffic().counted
if stage == "half":
    encode = rpc_channel.encode
    rpc_channel.encode = lambda *arguments: list(encode(*arguments))[:1]
handle = push(2 if stage != "offered" else 1)
if stage == "idle":
    handle.wait(lambda *_: None)
print("sent", flush=True)
sys.stdin.readline()
for channel in wire.channels:
    channel._timeout_s = 1.0  # no reply comes any more
rpc_channel.encode = framing.encode
try:
    push(3).wait(lambda *_: None)
except Exception as error:
    print(type(error).__name__, flush=True)
"""
APPLIED = {"offered": 1, "half": 1, "unread": 2, "idle": 2}
"""Updates of the worker that are applied at each stage."""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("stage", APPLIED)
def test_a_worker_may_fail_at_any_stage(servers: Servers, stage: str, how: signal.Signals) -> None:
    """The others continue without waiting, and the memory is freed when the worker is known to have failed."""
    length = 2_000_000
    hosted = servers.start(2)
    service, wire = hosted.server.services[1], servers.client(hosted, 0)
    theta = [torch.zeros(length)]
    wire.open(1, ADDING_RECIPE, theta)
    keys = " ".join(worker_keys.texts if (worker_keys := hosted.keys_of(b"worker 1")) else ())
    command = [sys.executable, "-c", STAGES, stage, str(length), " ".join(hosted.addresses), keys]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == b"sent\n"
        until(lambda: record_of(hosted, 1).completed == APPLIED[stage])
        until(lambda: service._assemblies[1].request_id == (2 if stage == "half" else 0))
        os.kill(child.pid, how)
        if how == signal.SIGKILL:
            child.wait(60)
        for seq in (1, 2, 3):
            _, (found,) = receive(push(wire, seq, [torch.ones(length)]), theta)
            assert torch.equal(found, torch.full((length,), float(APPLIED[stage] + seq)))
        assert mappings() == 3, "this worker, and the shard for both"
        notifier = DeathNotifier(hosted.addresses, hosted.keys_of(COORDINATOR))
        assert notifier.notify_ended(1, 0)
        notifier.close()
        until(lambda: mappings() == 2)
        if how == signal.SIGSTOP:
            os.kill(child.pid, signal.SIGCONT)
            child.stdin.write(b"\n")
            child.stdin.flush()
            assert child.stdout.readline() == b"TransportError\n"
            child.kill()
    again = connect_client(1, 2, hosted.addresses, worker_keys, LIMIT_S, incarnation=1)
    again._join_shards()
    for seq in (1, 2):
        _, (found,) = receive(push(again, seq, [torch.ones(length)]), theta)
        assert torch.equal(found, torch.full((length,), float(APPLIED[stage] + 3 + seq)))
    assert uses_memory(again)
    again.close()
    until(lambda: mappings() == 2)


# Shards that fail


@pytest.fixture
def server(tmp_path: Path, nothing_is_left: None) -> Iterator[ServerProcesses]:
    server = ServerProcesses(tmp_path)
    server.start()
    yield server
    server.end()


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.005, 0.01, 0.02, None])
def test_a_killed_shard_maps_the_worker_s_next_file(server: ServerProcesses, delay_s: float | None) -> None:
    """It is killed during an update or its reply; None: with no request under way."""
    length = 4_000_000
    theta = [torch.zeros(length)]
    wire = connect_client(0, 1, server.addresses, None, LIMIT_S, failure_timeout_s=LIMIT_S)
    wire.open(1, ADDING_RECIPE, theta)
    for seq in (1, 2):
        receive(push(wire, seq, [torch.ones(length)]), theta)
    handle = push(wire, 3, [torch.ones(length)]) if delay_s is not None else None
    time.sleep(delay_s or 0.0)
    server.kill()
    server.start()
    try:
        receive(handle or push(wire, 3, [torch.ones(length)]), theta)
        receive(push(wire, 4, [torch.ones(length)]), theta)
        raise AssertionError("a restarted shard has no parameters")
    except RollbackRequiredError:
        wire.roll_back()
    assert wire.rolled_back_to >= 0
    before = sum(wire.channels[0]._memory.traffic)  # type: ignore[attr-defined]
    for seq in (1, 2, 3):
        _, (found,) = receive(push(wire, seq, [torch.ones(length)]), theta)
        assert torch.equal(found, torch.full((length,), float(seq)))
    after = sum(wire.channels[0]._memory.traffic)  # type: ignore[attr-defined]
    assert after - before >= 5 * 4 * length, "all but the first update"
    assert mappings() == 1
    wire.close()


def test_a_stopped_shard_continues(server: ServerProcesses) -> None:
    length = 4_000_000
    theta = [torch.zeros(length)]
    wire = connect_client(0, 1, server.addresses, None, LIMIT_S, failure_timeout_s=LIMIT_S)
    wire.open(1, ADDING_RECIPE, theta)
    for seq in range(1, 8):
        handle = push(wire, seq, [torch.ones(length)])
        time.sleep(0.002 * seq)
        server.running[0].send_signal(signal.SIGSTOP)
        time.sleep(0.05)
        server.running[0].send_signal(signal.SIGCONT)
        _, (found,) = receive(handle, theta)
        assert torch.equal(found, torch.full((length,), float(seq)))
    wire.close()
