"""A real server with unknown clients, malformed messages, failures and concurrent clients keeps serving."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
import zmq
from example_counts import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parameter_servers import ADDING_RECIPE, Servers, push, receive

from stretto.errors import TransportError
from stretto.parameter_server import messages as m
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.client_types import ranges
from stretto.parameter_server.embedded import EmbeddedServer
from stretto.parameter_server.framing import CHUNK_BYTES, HEADER_BYTES, LARGEST_FRAME, decode_header, encode
from stretto.parameter_server.rpc_channel import RpcChannel, connect_client
from stretto.parameter_server.rpc_server import DEATH_NOTIFIER, name_of
from stretto.process_config import ShardConfig
from stretto.run_config import RunConfig
from stretto.security import RunKeys, WorkerKeys, use_keys

SLACK = 64 << 20
"""Number of bytes that a process may grow by during a test."""


def rss() -> int:
    return psutil.Process().memory_info().rss


@contextmanager
def dealer(address: str, name: bytes, keys: WorkerKeys | None) -> Iterator[Any]:
    """Yield a socket of an unknown client."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as one:
        one.setsockopt(zmq.LINGER, 1000)
        use_keys(one, name, keys)
        one.connect(address)
        yield one


def until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, f"not within {limit_s} s"
        time.sleep(0.005)


def works(wire: ParameterServerClient) -> None:
    """Check that the server applies an update of a valid worker once."""
    theta = [torch.zeros(100)]
    news, before = receive(wire.read([100]), theta)
    (version,) = news.versions
    later, after = receive(push(wire, version + 1, [torch.ones(100)], version), theta)
    assert later.versions == [version + 1]
    assert torch.equal(after[0], before[0] + 1)


def open_wire(servers: Servers, hosted: EmbeddedServer) -> ParameterServerClient:
    """Return the client of worker 0, which has sent 100 parameters."""
    wire = servers.client(hosted, 0)
    wire.open(1, ADDING_RECIPE, [torch.zeros(100)])
    return wire


# Unknown clients


@pytest.mark.parametrize("wrong", ["worker", "server"])
def test_a_foreign_key_is_refused_within_seconds_and_counted(
    servers: Servers, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hosted = servers.start(2)
    wire = open_wire(servers, hosted)
    own, foreign = hosted.keys_of(b"worker 1"), RunKeys.new().client(b"worker 1")
    assert own is not None
    keys = WorkerKeys(
        foreign.servers if wrong == "server" else own.servers,
        *((foreign.public, foreign.secret) if wrong == "worker" else (own.public, own.secret)),
    )
    began = time.monotonic()
    with zmq.Context() as context:
        link = RpcChannel(context, hosted.addresses[1], name_of(1), keys, "server 0", 20.0)
        with pytest.raises(TransportError) as error:
            link.wait(link.send(m.Read(False)))
        link.close()
    assert time.monotonic() - began < 60.0
    works(wire)
    if wrong == "worker":
        assert "refused this worker's key" in str(error.value)
        assert "an unknown key was refused (1 so far)" in capsys.readouterr().err
    else:
        assert "went away" in str(error.value)


def test_a_client_without_a_key_gets_no_reply(servers: Servers) -> None:
    hosted = servers.start(2)
    wire = open_wire(servers, hosted)
    with dealer(hosted.addresses[1], name_of(1), None) as stranger:
        stranger.send_multipart(next(encode(1, m.Read(False))))
        assert not stranger.poll(500)
    with zmq.Context() as context:
        link = RpcChannel(context, hosted.addresses[1], name_of(1), None, "server 0", 1.0)
        with pytest.raises(TransportError, match=r"server 0 at tcp.* (went away|did not answer within 1 s)"):
            link.wait(link.send(m.Read(False)))
        link.close()
    works(wire)


def test_a_message_with_a_wrong_identity_is_ignored(servers: Servers) -> None:
    hosted = servers.start(2)
    wire, service = open_wire(servers, hosted), hosted.server.services[1]
    names = [b"worker 2", b"worker -1", b"worker 1 ", b"worker x", b"w", b"worker 1234567890"]
    names += [name_of(0), DEATH_NOTIFIER]  # those of others
    for before, name in enumerate(names):
        with dealer(service.address, name, hosted.keys_of(b"worker 1")) as stranger:
            stranger.send_multipart(next(encode(1, m.Read(False))))
            until(lambda count=before: service.refused == count + 1)
            assert not stranger.poll(20)
    works(wire)


# Bytes outside of the protocol


def raw(hosted: EmbeddedServer) -> socket.socket:
    host, port = hosted.addresses[1].removeprefix("tcp://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def is_dropped(connection: socket.socket) -> bool:
    """Wait until the server closes the connection; raise TimeoutError if it does not."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "curve"])
def test_random_bytes_on_the_port_do_no_harm(servers: Servers, plain: bool) -> None:
    hosted = servers.start(2, plain=plain)
    wire, before = open_wire(servers, hosted), rss()
    source = torch.Generator().manual_seed(1)
    for begins in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00" * 64, b"", b"\xff" + bytes(8) + b"\x7f"):
        with raw(hosted) as connection, ThreadPoolExecutor(1):
            try:
                noise = torch.randint(0, 256, (1_000_000,), dtype=torch.uint8, generator=source)
                connection.sendall(begins + noise.numpy().tobytes())
            except ConnectionError:
                pass
    works(wire)
    assert rss() - before < SLACK


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
READY = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\x08worker 1"


@pytest.mark.parametrize("announced", [10 << 30, LARGEST_FRAME + 1, 2**63 - 1])
def test_a_frame_that_is_too_large_closes_the_connection(servers: Servers, announced: int) -> None:
    hosted = servers.start(2, plain=True)
    wire, before = open_wire(servers, hosted), rss()
    with raw(hosted) as connection:
        connection.sendall(GREETING + b"\x04" + bytes([len(READY)]) + READY)
        until(
            lambda: len(connection.recv(4096, socket.MSG_PEEK)) > 64
        )  # the server has replied: the connection is accepted
        connection.sendall(b"\x02" + struct.pack(">Q", announced) + bytes(1000))
        assert is_dropped(connection)
    works(wire)
    assert rss() - before < SLACK


def test_the_largest_frame_that_a_client_sends_is_accepted(servers: Servers) -> None:
    """Shows that the limit of the test before does not refuse valid frames."""
    hosted = servers.start(2, plain=True)
    open_wire(servers, hosted)
    with dealer(hosted.addresses[1], name_of(1), None) as one:
        head = encode(1, m.Contribute(1, "every"), [torch.zeros(2 * CHUNK_BYTES, dtype=torch.uint8)])
        one.send_multipart([next(head)[0], bytes(CHUNK_BYTES)])
        one.send_multipart([b"", bytes(LARGEST_FRAME)])
        assert one.poll(60_000)
        assert b"where it does not fit" in one.recv_multipart()[0]


# Malformed messages


NUMBER = st.one_of(st.integers(-3, 300), st.integers(-(2**63), 2**64 - 1))
REQUEST = st.one_of(st.integers(-3, 300), st.integers(-(2**63), 2**63))
LAST_REQUEST = 2**64 - 1
"""A service ignores smaller numbers after this one, as requests that come again."""
LENGTH = st.one_of(st.integers(-2, 200), st.sampled_from([2**31, 2**40, 2**62, 2**63 - 1, 2**64 - 1]))
KIND = st.sampled_from(["float32", "float64", "uint8", "int64", "bool", "float16", "object", ""])
REAL = st.one_of(st.floats(), st.just(0.1))
TEXT = st.sampled_from(
    [ADDING_RECIPE, "async_sgd", "soft_sync(collect=3)", "elastic_averaging", "delay_compensated", "x" * 99]
)
RECIPE = st.one_of(
    TEXT, st.sampled_from(["stale_synchronous(bound=0)", "async_diloco", "allreduce"]), st.text(max_size=20)
)
BODY = st.one_of(
    st.builds(m.Open, NUMBER, RECIPE, NUMBER),
    st.builds(m.Push, st.one_of(st.just(1), NUMBER), NUMBER, NUMBER, NUMBER, REAL),
    st.builds(m.Push, st.just(1), st.integers(1, 9), st.integers(0, 50), st.integers(0, 9), REAL),
    st.builds(m.EnterBarrier),
    st.builds(m.Read, st.booleans()),
    st.builds(m.Contribute, NUMBER, st.sampled_from(["mean", "every"])),
    st.builds(m.Gather, st.integers(0, 3), st.none() | NUMBER),
    st.builds(m.BeginEpoch, NUMBER, st.none() | NUMBER, st.booleans()),
    st.builds(m.BeginEpoch, st.integers(1, 99), st.none() | st.integers(-1, 3), st.booleans()),
    st.builds(m.Lease, st.one_of(st.integers(1, 99), NUMBER)),
    st.builds(m.Settle, NUMBER, st.lists(NUMBER, max_size=4)),
    st.builds(m.Leave),
    st.builds(m.PushReply, NUMBER),
    st.builds(m.Result),
    st.builds(m.Refused, st.text(max_size=9)),
)


@st.composite
def parcels(draw: Any) -> list[list[bytes]]:
    """Draw a valid header, with chunks that fit it or nearly do."""
    body, kind = draw(BODY), draw(KIND)
    lengths = draw(st.lists(LENGTH, max_size=3))
    if draw(st.booleans()):  # as a shard of 100 numbers expects
        lengths, kind = [100], draw(st.sampled_from(["float32", "float32", "int64", "uint8"]))
    head = msgspec.msgpack.encode(m.Header(draw(REQUEST), body, [(kind, one) for one in lengths]))
    size = {"float32": 4, "float64": 8, "int64": 8, "float16": 2}.get(kind, 1)
    fill = draw(st.sampled_from([b"\0", b"\xff", b"\x7f", b"\x01"]))
    chunks = [fill * (one * size) for one in lengths if 0 < one <= 200]
    if draw(st.integers(0, 9)) == 0:
        return [[head[: draw(st.integers(0, len(head)))], *chunks]]
    if draw(st.integers(0, 4)) == 0 and chunks:
        return [[head], *([b"", one] for one in chunks[: draw(st.integers(0, 2))])]
    return [[head, *chunks]]


FRAMES = st.one_of(
    st.lists(st.binary(max_size=80), min_size=1, max_size=4),
    st.builds(lambda one: [b"", one], st.binary(max_size=300)),
    st.builds(lambda one: [msgspec.msgpack.encode(one)], st.recursive(NUMBER | st.text(max_size=5), st.lists)),
    st.builds(lambda one: [msgspec.msgpack.encode([1, [one, 1, 2], []])], st.text(max_size=9)),
    st.just([b"\x91" * 3000]),
    st.just([bytes(HEADER_BYTES + 1)]),
)
SENDINGS = st.lists(parcels() | FRAMES.map(lambda one: [one]), min_size=1, max_size=4)
SETTINGS = settings(max_examples=examples(100), suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def besieged() -> Iterator[tuple[EmbeddedServer, ParameterServerClient]]:
    """One server for all examples, each of which is another worker than the one before; worker 0 is valid."""
    servers = Servers()
    hosted = servers.start(500)
    yield hosted, open_wire(servers, hosted)
    servers.close()


def bombard(one: Any, sendings: list[list[list[bytes]]]) -> None:
    """Send all messages, then a valid request, and wait until it is refused: the server has read all before it."""
    for message in (message for parcel in sendings for message in parcel):
        one.send_multipart(message)
    one.send_multipart(next(encode(LAST_REQUEST, m.PushReply(0))))
    while one.poll(60_000):
        with suppress(msgspec.MsgspecError, TypeError):  # chunks of a requested tensor
            if msgspec.msgpack.decode(one.recv_multipart()[0])[0] == LAST_REQUEST:
                return
    raise AssertionError("the service does not answer any more")


@pytest.mark.parametrize("which", [0, 1], ids=["coordinator", "shard"])
def test_the_server_keeps_serving_after_any_message(
    besieged: tuple[EmbeddedServer, ParameterServerClient], which: int
) -> None:
    hosted, healthy = besieged
    service, workers = hosted.server.services[which], itertools.cycle(range(1 + 200 * which, 200 + 200 * which))

    @SETTINGS
    @given(SENDINGS)
    def shoot(sendings: list[list[list[bytes]]]) -> None:
        name = name_of(next(workers))
        with dealer(service.address, name, hosted.keys_of(name)) as one:
            bombard(one, sendings)
        assert service.failure is None

    before = rss()
    shoot()
    works(healthy)
    assert rss() - before < SLACK
    assert service.refused > 50


def test_the_shard_keeps_serving_after_any_parameters_of_worker_0(servers: Servers) -> None:
    """Only worker 0 sends parameters; one server for all examples."""
    hosted = servers.start(2)
    service = hosted.server.services[1]

    @SETTINGS
    @given(SENDINGS)
    def shoot(sendings: list[list[list[bytes]]]) -> None:
        bombard(one, sendings)
        assert service.failure is None

    with dealer(service.address, name_of(0), hosted.keys_of(name_of(0))) as one:
        shoot()
    link = servers.client(hosted, 1).channels[0]
    try:
        assert isinstance(link.wait(link.send(m.Read(False)))[0], m.PushReply)
    except TransportError as error:
        assert "refused" in str(error)  # noqa: PT017
    assert service.failure is None


def message(body: m.Body, *tensors: torch.Tensor, number: int = 7) -> list[list[bytes]]:
    """Return the frames of a valid message."""
    return [[bytes(frame) for frame in frames] for frames in encode(number, body, tensors)]


HUGE = torch.full((4,), 2**63 - 1)
MEANINGLESS: dict[str, tuple[int, list[list[list[bytes]]]]] = {
    "meet after none": (0, [message(m.BeginEpoch(1, 0, "first-come"), HUGE), message(m.Lease(1))]),
    "meet after less": (0, [message(m.BeginEpoch(1, -1, "first-come"), HUGE), message(m.Lease(1))]),
    "samples beyond counting": (0, [message(m.BeginEpoch(1, None, "first-come"), HUGE), *[message(m.Lease(1))] * 4]),
    "less than no samples": (0, [message(m.BeginEpoch(1, None, "first-come"), -HUGE), *[message(m.Lease(1))] * 4]),
    "batches that are none": (
        0,
        [message(m.BeginEpoch(1, None, "first-come"), HUGE), message(m.Settle(1, [-1, 2**63]))],
    ),
    "a root that is none": (0, [message(m.Gather(1, 99), torch.zeros(3, dtype=torch.uint8))]),
    "a root below": (0, [message(m.Gather(1, -9), torch.zeros(3, dtype=torch.uint8))]),
    "a sum of truths": (1, [message(m.Contribute(1, "mean"), torch.ones(3, dtype=torch.bool))]),
    "no recipe": (1, [message(m.Open(1, "(" * 9000, 1), torch.zeros(3))]),
    "a recipe of zeros": (1, [message(m.Open(1, "\0", 1), torch.zeros(3))]),
    "a weight that is no number": (1, [message(m.Open(1, "async_sgd(weight='x')", 1), torch.zeros(3))]),
    "an answer that is none": (1, [message(m.Open(1, "Recipe(how=3)", 1), torch.zeros(3))]),
    "another kind of recipe": (1, [message(m.Open(1, "allreduce", 1), torch.zeros(3))]),
    "whole numbers": (1, [message(m.Open(1, ADDING_RECIPE, 1), torch.zeros(3, dtype=torch.int8))]),
    "an update of nothing": (1, [message(m.Open(1, ADDING_RECIPE, 1)), message(m.Push(1, 1, 0, 0, 0.1))]),
    "rates beyond numbers": (
        1,
        [
            message(m.Open(1, "delay_compensated", 1), torch.zeros(3)),
            *(message(m.Push(1, seq, 2**63, 2**63, float("nan")), torch.ones(3)) for seq in (-1, 0, 1, 2**64 - 1)),
        ],
    ),
    "new parameters amid an update": (
        1,
        [
            message(m.Open(1, ADDING_RECIPE, 1), torch.zeros(400_000)),
            message(m.Push(1, 1, 0, 8, 0.1), torch.ones(400_000))[:1],
            message(m.Read(True)),
            message(m.Push(1, 1, 0, 8, 0.1), torch.ones(400_000))[1:],
        ],
    ),
}


def test_invalid_requests_are_refused(servers: Servers) -> None:
    """They are valid messages of a worker of this run."""
    for kind, (which, sendings) in MEANINGLESS.items():
        hosted = servers.start(1)
        service = hosted.server.services[which]
        with dealer(service.address, name_of(0), hosted.keys_of(name_of(0))) as one:
            bombard(one, sendings)
        assert service.failure is None, kind


def test_new_parameters_during_another_workers_update(servers: Servers) -> None:
    hosted = servers.start(2, plain=True)
    wire, theta = servers.client(hosted, 0), torch.zeros(600_000)
    wire.open(1, ADDING_RECIPE, [theta])
    with dealer(hosted.addresses[1], name_of(1), None) as one:
        first, *rest = message(m.Push(1, 1, 0, 8, 0.1), torch.ones(600_000))
        one.send_multipart(first)
        half = next(iter(rest))
        one.send_multipart(half)
        until(lambda: hosted.server.services[1]._assemblies[1].request_id == 7)
        wire.open(2, ADDING_RECIPE, [theta])
        bombard(one, [[frames] for frames in rest[1:]])
    news, (found,) = receive(wire.read([600_000]), [theta])
    assert news.versions == [0]
    assert torch.equal(found, theta)


# Updates that do not fit


MISFITS = [
    ([torch.ones(7)], 1, "an update of 7 float32 for a shard of 100 float32"),
    ([torch.ones(101)], 1, "an update of 101 float32 for a shard of 100 float32"),
    ([torch.ones(100, dtype=torch.float64)], 1, "an update of 100 float64 for a shard of 100 float32"),
    ([torch.ones(100, dtype=torch.int32)], 1, "an update of 100 int32 for a shard of 100 float32"),
    ([torch.ones(50), torch.ones(50)], 1, "an update of 50 float32, 50 float32 for a shard of 100 float32"),
    ([], 1, "an update of nothing for a shard of 100 float32"),
    ([torch.ones(100)], 9, r"no parameters 9 were given to this shard \(it has 1\)"),
]


def test_an_update_that_does_not_fit_is_refused_by_name(servers: Servers) -> None:
    wire = open_wire(servers, servers.start(2))
    began = time.monotonic()
    for parts, arena, said in MISFITS:
        with pytest.raises(TransportError, match=f"server 0 refused: {said}"):
            push(wire, 1, parts, arena=arena).wait(lambda *_: None)
        works(wire)
    assert time.monotonic() - began < 15.0  # the limit of a request is 20 s


def test_a_late_refusal_is_sent_immediately_too(servers: Servers) -> None:
    """The error is detected only in the whole message."""
    (wire,) = servers.clients(servers.start(1))
    for wrong, said in (("allreduce", "applies nothing on arrival"), ("no such", "--recipe cannot be read")):
        with pytest.raises(TransportError, match=said):
            wire.open(1, wrong, [torch.zeros(3)])
    with pytest.raises(TransportError, match="this shard has no parameters"):
        wire.read([3]).wait(lambda *_: None)


def test_an_update_that_is_not_finite_is_refused_or_skipped(servers: Servers) -> None:
    theta = [torch.zeros(400_000)]
    for value in (torch.nan, torch.inf, -torch.inf):
        wrong = torch.ones(400_000)
        wrong[399_999] = value
        for on_nan in ("stop", "skip"):
            (wire,) = servers.clients(servers.start(1, on_nan=on_nan))
            wire.open(1, ADDING_RECIPE, theta)
            if on_nan == "stop":
                with pytest.raises(TransportError, match="server 0 refused: the update holds NaN or infinity"):
                    push(wire, 1, [wrong]).wait(lambda *_: None)
            else:
                news, (found,) = receive(push(wire, 1, [wrong]), theta)
                assert (news.refused, news.versions, news.applied) == ({1}, [0], [])
                assert torch.equal(found, theta[0])
            news, (found,) = receive(push(wire, 2, [torch.ones(400_000)]), theta)
            assert news.versions == [1]
            assert torch.equal(found, torch.ones(400_000))


# Failures


HALF = """
import sys, torch, zmq
from stretto.parameter_server import messages as m
from stretto.parameter_server.framing import encode
from stretto.security import use_keys, worker_keys
address, *keys = sys.argv[1:]
dealer = zmq.Context().socket(zmq.DEALER)
use_keys(dealer, b"worker 1", worker_keys(keys))
dealer.connect(address)
messages = [[bytes(one) for one in frames] for frames in encode(1, m.Push(1, 1, 0, 8, 0.1), [torch.ones(2_000_000)])]
assert len(messages) > 4
for message in messages[: len(messages) // 2]:
    dealer.send_multipart(message)
print("sent", flush=True)
sys.stdin.read()
"""


def test_a_push_of_a_worker_killed_during_it_is_not_applied(servers: Servers) -> None:
    hosted = servers.start(2)
    service, wire = hosted.server.services[1], servers.client(hosted, 0)
    theta = [torch.zeros(2_000_000)]
    wire.open(1, ADDING_RECIPE, theta)
    keys = own.texts if (own := hosted.keys_of(name_of(1))) else ()
    command = [sys.executable, "-c", HALF, service.address, *keys]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"sent\n"
        until(lambda: service._assemblies[1].request_id == 1)
        news, (between,) = receive(push(wire, 1, [torch.ones(2_000_000)]), theta)
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait(timeout=60) == -signal.SIGKILL
    assert news.versions == [1]
    assert torch.equal(between, torch.ones(2_000_000))
    for seq in (2, 3, 4):
        news, (after,) = receive(push(wire, seq, [torch.ones(2_000_000)], seq - 1), theta)
        assert news.versions == [seq]
        assert torch.equal(after, torch.full((2_000_000,), float(seq)))
    again = servers.client(hosted, 1)  # the restarted worker sends a whole update, which is applied
    news, (found,) = receive(push(again, 1, [torch.ones(2_000_000)]), theta)
    assert news.versions == [5]
    assert torch.equal(found, torch.full((2_000_000,), 5.0))


def test_a_failed_server_is_named_in_the_error_of_a_waiting_worker(servers: Servers) -> None:
    """The server is a process that is killed while the worker waits."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=16)
    coordinator = socket.create_server(("127.0.0.1", 0), backlog=16)
    addresses = [f"tcp://127.0.0.1:{one.getsockname()[1]}" for one in (coordinator, listener)]
    fds = {"listen_fd": listener.fileno(), "dispatcher_fd": coordinator.fileno()}
    environment = (
        os.environ
        | ShardConfig(options=RunConfig(Path("train.py"), workers=2), run=".", shard=0, shards=1, **fds).environment()
    )
    command = [sys.executable, "-P", "-m", "stretto.launcher.shard_main"]
    with subprocess.Popen(command, env=environment, pass_fds=list(fds.values())) as process:
        coordinator.close()
        listener.close()
        wire = connect_client(0, 2, addresses, None, 20.0)
        try:
            wire.open(1, ADDING_RECIPE, [torch.zeros(100)])
            works(wire)
            waiting = wire._dispatcher.send(m.Gather(1, None), [torch.zeros(3, dtype=torch.uint8)])
            os.kill(process.pid, signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(TransportError, match=r"the coordinator at tcp://127\.0\.0\.1:\d+ went away"):
                wire._dispatcher.wait(waiting)
            with pytest.raises(TransportError, match=r"server 0 at tcp://127\.0\.0\.1:\d+ went away"):
                push(wire, 2, [torch.ones(100)]).wait(lambda *_: None)
        finally:
            process.kill()
            wire.close()
    assert time.monotonic() - began < 15.0  # the limit of a request is 20 s


# Concurrent clients

PUSHES, READS, LIMIT_S = 10, 5, 60.0
"""Pushes of each worker and distinct versions seen by each reader, at least, and the time limit in s."""


@pytest.mark.parametrize("shards", [1, 2])
def test_a_reader_never_sees_a_torn_shard(servers: Servers, shards: int) -> None:
    """Every update adds 1 everywhere: version v of a shard holds v in all its numbers."""
    hosted, length, limit = servers.start(4, shards=shards, plain=True), 1_300_000, time.monotonic() + LIMIT_S
    done: set[int] = set()  # workers with enough pushes or reads; all continue until all have enough
    wires = servers.clients(hosted, 30.0)
    wires[0].open(1, ADDING_RECIPE, [torch.zeros(length)])

    def whole(versions: list[int], theta: torch.Tensor) -> bool:
        parts = [theta[start:stop] for start, stop in ranges(length, shards)]
        return all(bool((part == version).all()) for part, version in zip(parts, versions, strict=True))

    def note(worker: int, is_enough: bool) -> None:
        assert time.monotonic() < limit, f"only workers {sorted(done)} had enough pushes or reads in {LIMIT_S:g} s"
        if is_enough:
            done.add(worker)

    def pushing(wire: ParameterServerClient) -> int:
        seq, ones = 0, torch.ones(length)
        while len(done) < len(wires):
            seq += 1
            assert whole(*_version(push(wire, seq, [ones]), length))
            note(wire.worker, seq >= PUSHES)
        return seq

    def reading(wire: ParameterServerClient) -> None:
        seen: list[list[int]] = [[0] * shards]
        while len(done) < len(wires):
            versions, theta = _version(wire.read([length]), length)
            assert whole(versions, theta)
            assert all(now >= before for now, before in zip(versions, seen[-1], strict=True))
            seen.append(versions)
            note(wire.worker, len({tuple(one) for one in seen}) > READS)

    with ThreadPoolExecutor(4) as pool:
        pushes = [pool.submit(pushing, wire) for wire in wires[:2]]
        reads = [pool.submit(reading, wire) for wire in wires[2:]]
        pushed = sum(one.result() for one in pushes)
        for one in reads:
            one.result()
    versions, theta = _version(wires[0].read([length]), length)
    assert versions == [pushed] * shards
    assert whole(versions, theta)


def _version(ticket: Any, length: int) -> tuple[list[int], torch.Tensor]:
    news, (theta,) = receive(ticket, [torch.empty(length)])
    return news.versions, theta


def test_a_slow_reader_receives_one_version_while_updates_are_applied(servers: Servers) -> None:
    """Its connection is full: most of the data is still at the server while other workers push."""
    hosted, length = servers.start(2, plain=True), 6_000_000
    service, wire = hosted.server.services[1], servers.client(hosted, 0)
    theta, ones = [torch.zeros(length)], torch.ones(length)
    wire.open(1, ADDING_RECIPE, theta)
    with zmq.Context() as context, context.socket(zmq.DEALER) as slow:
        for option, value in {zmq.IDENTITY: name_of(1), zmq.RCVHWM: 1, zmq.RCVBUF: 1 << 16, zmq.LINGER: 0}.items():
            slow.setsockopt(option, value)
        slow.connect(service.address)
        slow.send_multipart(next(encode(1, m.Read(False))))
        assert slow.poll(60_000)
        for seq in range(1, 6):
            assert torch.equal(
                receive(push(wire, seq, [ones], seq - 1), theta)[1][0], torch.full((length,), float(seq))
            )
        head, *chunks = slow.recv_multipart()
        assert decode_header(head).body == m.PushReply(0)
        while sum(map(len, chunks)) < 4 * length:
            assert slow.poll(60_000)
            chunks += slow.recv_multipart()[1:]
    assert not any(torch.frombuffer(bytearray(one), dtype=torch.float32).any() for one in chunks)


@pytest.mark.parametrize("length", [100, 100_000])
def test_buffers_of_versions_that_were_sent_are_reused(servers: Servers, length: int) -> None:
    """Small and large replies, and replies to a failed worker."""
    hosted = servers.start(2, plain=True)
    service, wire = hosted.server.services[1], servers.client(hosted, 0)
    theta = [torch.zeros(length)]
    wire.open(1, ADDING_RECIPE, theta)
    for turn in range(3):
        with dealer(service.address, name_of(1), None) as gone:
            for _ in range(10):
                gone.send_multipart(next(encode(1, m.Read(False))))
        for seq in range(20 * turn + 1, 20 * turn + 21):
            receive(push(wire, seq, [torch.ones(length)], seq - 1), theta)
    retired = service._service.handler._shard._versions._retired  # type: ignore[attr-defined]
    limit = time.monotonic() + 60.0
    while any(one.readers for one in retired):
        assert time.monotonic() < limit, "replies that were sent, or can't be, hold their numbers"
        time.sleep(0.001)
    before = len(retired)
    receive(push(wire, 61, [torch.ones(length)], 60), theta)
    assert len(retired) == before < 60
