"""Generations of workers on real processes: one is killed or stopped, the others abort, connect again and count right.

Workers are forked from a nursery, which has imported what takes long. They obey a socket: this file is all three.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto.collective_ops import AllGather, AllReduceMean, Exchange
from stretto.errors import BrokenTransportError
from stretto.transport import encrypted_sockets
from stretto.transport.conformance import check_transport
from stretto.transport.encrypted_rendezvous import EncryptedRendezvous
from stretto.transport.encrypted_sockets import ReservedPort
from stretto.transport.gloo_rendezvous import abort_forming, form, store_keeper
from stretto.transport.process_group import ProcessGroupTransport, drop_parked
from stretto.transport.relay_tunnels import RelayAccess
from stretto.transport.rendezvous import GroupRendezvous
from tests.encrypted_ends import new_keys, view
from tests.relays import SECRET, shared_relay

LIMIT_S = 60.0
TIMEOUT_S = 4.0
"""Time-out of the groups in seconds: an abandoned thread of gloo sleeps until it has passed."""
QUIET_THREADS, QUIET_DESCRIPTORS = 6, 40
"""Resources of a worker with one group parked: its own and the store's threads, three of gloo; connections.

A worker that hosts the store has up to 31 descriptors, others 7 to 26; a group that leaked in each round would add ten.
"""
SIZES = (1, 1000, 300_000, 2_000_000)

# --- a worker -------------------------------------------------------------------------------------------------------


class GlooGenerations:
    """Groups of gloo, which meet in the store of one member."""

    @property
    def address(self) -> str:
        return store_keeper().address

    def form(self, told: dict[str, Any], number: int) -> Any:
        members, keeps = told["members"], told["keeper"] == number
        store = None if keeps else told["addresses"][members.index(told["keeper"])]
        return form(store, keeps, told["prefix"], members.index(number), len(members), told["limit_s"], TIMEOUT_S)

    def abort(self, prefix: str) -> None:
        abort_forming(prefix)


class EncryptedGenerations:
    """Encrypted transports."""

    def __init__(self) -> None:
        self.rendezvous = EncryptedRendezvous("127.0.0.1", LIMIT_S, TIMEOUT_S)
        self.aborted = set[int]()
        self.formed: Any = None

    @property
    def address(self) -> str:
        return self.rendezvous.address

    def form(self, told: dict[str, Any], number: int) -> Any:
        generation = self.number_of(told["prefix"])
        self.formed = None
        self.rendezvous._patience_s = told["limit_s"]
        self.formed = self.rendezvous.form(view(told["addresses"], generation), told["members"].index(number))
        if generation in self.aborted:
            self.formed.abort()
        return self.formed

    def abort(self, prefix: str) -> None:
        self.aborted.add(self.number_of(prefix))
        self.rendezvous.abort(self.number_of(prefix))
        if (formed := self.formed) is not None:
            formed.abort()

    @staticmethod
    def number_of(prefix: str) -> int:
        return int(prefix.rpartition("/")[2])


class RelayedGenerations(EncryptedGenerations):
    """Encrypted transports whose workers count as on machines of their own, through the relay of `shared_relay`."""

    def __init__(self) -> None:
        super().__init__()
        encrypted_sockets.machine_name = lambda: ""
        access = RelayAccess(os.environ["RELAY"], SECRET)
        self.rendezvous = EncryptedRendezvous("127.0.0.1", LIMIT_S, TIMEOUT_S, relay=access)


KINDS: dict[str, Any] = {
    "gloo": GlooGenerations,
    "encrypted": EncryptedGenerations,
    "relayed": RelayedGenerations,
}


class Obeying:
    """A worker that exchanges in a loop, and forms the generations that it is told."""

    def __init__(self, number: int, path: str, kind: str) -> None:
        self.number, self.generations = number, KINDS[kind]()
        self.link = socket.socket(socket.AF_UNIX)
        self.link.connect(path)
        self.said = threading.Lock()
        self.told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.traffic = 0
        self.wire: Any = None
        threading.Thread(target=self.listen, daemon=True).start()
        self.say("here", address=self.generations.address, pid=os.getpid())

    def say(self, what: str, **more: Any) -> None:
        line = json.dumps({"what": what, "number": self.number, "at": time.monotonic(), **more}) + "\n"
        with self.said:
            self.link.sendall(line.encode())

    def listen(self) -> None:
        for line in self.link.makefile():
            told = json.loads(line)
            if told["do"] == "abort":
                self.generations.abort(told["prefix"])
            else:
                self.told.put(told)
        os._exit(0)

    def live(self) -> None:
        """Form what it is told, and exchange in it until that breaks; between two generations it tells of itself."""
        while True:
            told = self.told.get()
            if told["do"] == "tell":
                self.say("told", **_state())
                continue
            try:
                self.enter(told)
                self.exchange(told)
            except BrokenTransportError as error:
                self.leave()
                self.say("out", prefix=told["prefix"], why=str(error), address=self.generations.address)

    def enter(self, told: dict[str, Any]) -> None:
        self.wire = self.generations.form(told, self.number)
        self.wire.all_gather_bytes(b"here")
        self.say("formed", prefix=told["prefix"])

    def leave(self) -> None:
        if self.wire is not None:
            self.wire.abort()
            self.traffic += self.wire.traffic().bytes_sent
            self.wire.close()
            self.wire = None

    def exchange(self, told: dict[str, Any]) -> None:
        """All-reduces over fresh copies, several under way at once; sums of whole numbers are exact."""
        members = told["members"]
        expected = float(sum(one + 1 for one in members))
        for round_ in range(10**9):
            tensors = [torch.full((size,), float(self.number + 1)) for size in told["sizes"]]
            kept = list(tensors)
            try:
                for ticket in [self.wire.submit(AllReduceMean(one)) for one in tensors]:
                    assert bool((ticket.wait() == expected).all()), "a wrong sum"
            except BrokenTransportError:
                for one in kept:
                    one.fill_(float(-7))
                self.leave()
                time.sleep(0.002)
                assert all(bool((one == -7).all()) for one in kept), "an old group has written"
                raise
            if round_ % 4 == 0:
                mine = torch.full((self.number * 1000 + 1,), self.number)
                found = self.wire.submit(AllGather(mine)).wait()
                assert [int(one[0]) for one in found] == members
                if (peer := members.index(self.number) ^ 1) < len(members):
                    received = self.wire.submit(Exchange(peer, mine)).wait()
                    assert bool((received == members[peer]).all())


def _state() -> dict[str, Any]:
    """Return this process's threads, sockets and files."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "cpu_s": time.process_time(),
        "parked": drop_parked(),
    }


def _nursery(path: str, kind: str) -> None:
    """Fork a worker for each number that is read; exit with the requesting process."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    torch.set_num_threads(1)
    for line in sys.stdin:
        if os.fork() == 0:
            sys.stdin.close()
            try:
                Obeying(int(line), path, kind).live()
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(1)


# --- who tells them -------------------------------------------------------------------------------------------------


class Crew:
    """Workers, and what a coordinator would tell them."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        self.path = str(folder / "link")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen(16)
        self.heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.links: dict[int, socket.socket] = {}
        self.places: dict[int, dict[str, Any]] = {}
        self.generation = 0
        self.members: list[int] = []
        # PyTorch asks the DNS for the name of each store that it connects to; a lost answer must not cost 5 s
        resolver = {"RES_OPTIONS": "timeout:1 attempts:1"}
        root = str(Path(__file__).resolve().parents[2])  # the nursery imports modules of the tests
        resolver["RELAY"] = shared_relay().access.address if kind == "relayed" else ""
        environment = {**os.environ, **resolver, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
        self.nursery = subprocess.Popen(
            [sys.executable, __file__, self.path, kind], stdin=subprocess.PIPE, env=environment, text=True
        )

    def born(self, number: int) -> None:
        """Start a worker and wait until it is there."""
        assert self.nursery.stdin is not None
        self.nursery.stdin.write(f"{number}\n")
        self.nursery.stdin.flush()
        self.listener.settimeout(LIMIT_S)
        link, _ = self.listener.accept()
        self.links[number] = link
        threading.Thread(target=self._hear, args=(link,), daemon=True).start()
        self.places[number] = self.wait("here", {number})[number]

    def _hear(self, link: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for line in link.makefile():
                self.heard.put(json.loads(line))

    def tell(self, number: int, do: str, **more: Any) -> None:
        self.links[number].sendall((json.dumps({"do": do, **more}) + "\n").encode())

    def wait(self, what: str, numbers: set[int], prefix: str | None = None) -> dict[int, dict[str, Any]]:
        """Until each of them has said it."""
        found: dict[int, dict[str, Any]] = {}
        end = time.monotonic() + LIMIT_S
        while set(found) != numbers:
            one = self.wait_for_any(what, prefix, end, numbers - set(found))
            found[one["number"]] = one
        return found

    def wait_for_any(
        self, what: str, prefix: str | None, end: float | None = None, numbers: set[int] | None = None
    ) -> dict[str, Any]:
        """Until one of them has said it."""
        end = end or time.monotonic() + LIMIT_S
        passed: list[dict[str, Any]] = []
        while True:
            try:
                one = self.heard.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"{what} never came from any of {numbers}; passed over: {passed}") from None
            if "address" in one and one["number"] in self.places:
                self.places[one["number"]]["address"] = one["address"]
            if one["what"] == what and one.get("prefix") == prefix and (numbers is None or one["number"] in numbers):
                return one
            passed.append(one)

    @property
    def prefix(self) -> str:
        return f"generation/{self.generation}"

    def call(
        self,
        members: list[int],
        limit_s: float = LIMIT_S,
        come: list[int] | None = None,
        sizes: tuple[int, ...] = SIZES,
    ) -> None:
        """Send the members, or the workers in `come`, the next generation, at the store of the first."""
        self.generation += 1
        self.members = members
        keeper = members[0]
        addresses = [self.places[one]["address"] for one in members]
        for one in come or members:
            self.tell(
                one,
                "form",
                prefix=self.prefix,
                members=members,
                keeper=keeper,
                addresses=addresses,
                limit_s=limit_s,
                sizes=sizes,
            )

    def form(self, members: list[int], sizes: tuple[int, ...] = SIZES) -> float:
        """The same, and wait until all have; returns how long it took."""
        began = time.monotonic()
        self.call(members, sizes=sizes)
        formed = self.wait("formed", set(members), self.prefix)
        return max(one["at"] for one in formed.values()) - began

    def abort(self) -> float:
        """Tell all members that this generation is over; returns how long it took until all were out."""
        return self.abort_among(self.members)

    def abort_among(self, numbers: list[int]) -> float:
        """The same with these alone."""
        began = time.monotonic()
        for one in numbers:
            self.tell(one, "abort", prefix=self.prefix)
        return self.outs(set(numbers)) - began

    def told_by_the_first(self, numbers: list[int]) -> float:
        """Wait until one worker notices, notify the others, and return when all have left."""
        first = self.wait_for_any("out", self.prefix)
        rest = [one for one in numbers if one != first["number"]]
        for one in rest:
            self.tell(one, "abort", prefix=self.prefix)
        return max(self.outs(set(rest)), float(first["at"]))

    def outs(self, numbers: set[int]) -> float:
        return max(one["at"] for one in self.wait("out", numbers, self.prefix).values())

    def signal(self, number: int, which: int) -> None:
        os.kill(self.places[number]["pid"], which)

    def bury(self, number: int) -> None:
        """Kill a worker, if it is there."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(number, signal.SIGKILL)
        self.links.pop(number).close()
        del self.places[number]

    def states(self) -> dict[int, dict[str, Any]]:
        """Return the resources of each worker between two generations."""
        for one in self.links:
            self.tell(one, "tell")
        return self.wait("told", set(self.links))

    def bury_all(self) -> None:
        for one in list(self.links):
            self.bury(one)

    def end(self) -> None:
        self.bury_all()
        assert self.nursery.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the nursery has ended by itself
            self.nursery.stdin.close()
        try:
            self.nursery.wait(LIMIT_S)
        finally:
            self.nursery.kill()
            self.nursery.wait()
        self.listener.close()


@pytest.fixture(scope="module", params=list(KINDS))
def nursed(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Crew]:
    crew = Crew(tmp_path_factory.mktemp("crew"), request.param)
    try:
        yield crew
    finally:
        crew.end()


@pytest.fixture
def crew(nursed: Crew) -> Iterator[Crew]:
    """Four workers, new for each test."""
    try:
        for number in range(4):
            nursed.born(number)
        yield nursed
    finally:
        nursed.bury_all()


def kills(crew: Crew, rounds: int, seed: int = 0) -> dict[str, list[float]]:
    """Kill one of four inside its exchange, continue with three, let a new one join; repeatedly."""
    chance = random.Random(seed)
    took: dict[str, list[float]] = {"out": [], "fewer": [], "again": []}
    crew.form([0, 1, 2, 3])
    for _ in range(rounds):
        time.sleep(chance.uniform(0.0, 0.03))
        victim = chance.choice(crew.members)
        left = [one for one in crew.members if one != victim]
        killed = time.monotonic()
        crew.bury(victim)
        took["out"].append(crew.told_by_the_first(left) - killed)
        took["fewer"].append(crew.form(left))
        crew.born(victim)
        crew.abort()
        took["again"].append(crew.form(sorted([*left, victim])))
    crew.abort()
    return took


def settled(crew: Crew) -> dict[int, dict[str, Any]]:
    """Return each worker's resources after gloo's abandoned operations have timed out, with one group parked."""
    crew.form([0, 1, 2, 3], sizes=(1,))
    crew.abort()
    end = time.monotonic() + 60
    while True:
        found = crew.states()
        are_quiet = all(
            one["threads"] <= QUIET_THREADS and one["descriptors"] <= QUIET_DESCRIPTORS for one in found.values()
        )
        if time.monotonic() > end or are_quiet:
            return found
        time.sleep(0.2)


@pytest.mark.parametrize("rounds", [8, pytest.param(20, marks=pytest.mark.long)])
def test_survivors_continue_newcomers_join_and_nothing_leaks(crew: Crew, rounds: int) -> None:
    took = kills(crew, rounds)
    assert median(took["out"]) < 0.75 * TIMEOUT_S, took
    for state in settled(crew).values():
        assert state["threads"] <= QUIET_THREADS
        assert state["descriptors"] <= QUIET_DESCRIPTORS


def test_a_generation_of_running_workers_can_be_aborted_at_any_point(crew: Crew) -> None:
    chance = random.Random(0)
    before = settled(crew)
    for _ in range(30):
        crew.form([0, 1, 2, 3])
        time.sleep(chance.uniform(0.0, 0.03))
        assert crew.abort() < 3.0
    began = crew.states()
    time.sleep(0.3)
    for number, state in crew.states().items():
        assert state["cpu_s"] - began[number]["cpu_s"] < 0.2, "a thread runs hot at a group that is over"
    for number, state in settled(crew).items():
        assert state["threads"] <= QUIET_THREADS
        assert state["descriptors"] <= QUIET_DESCRIPTORS
        assert (
            state["resident"] < before[number]["resident"] + 100e6
        )  # 30 groups that keep a tensor each would hold 240


def test_a_stopped_worker_blocks_no_other_after_the_abort(crew: Crew) -> None:
    crew.form([0, 1, 2, 3])
    first = crew.prefix
    crew.signal(2, signal.SIGSTOP)
    time.sleep(0.1)
    assert crew.abort_among([0, 1, 3]) < 3.0
    crew.form([0, 1, 3])
    crew.signal(2, signal.SIGCONT)
    crew.tell(2, "abort", prefix=first)
    assert set(crew.wait("out", {2}, first)) == {2}
    crew.abort()
    crew.form([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: GroupRendezvous(10 * LIMIT_S, TIMEOUT_S, None), "a member failed"),
        (lambda: EncryptedRendezvous("127.0.0.1", 10 * LIMIT_S, TIMEOUT_S), "the generation was aborted"),
    ],
)
def test_a_generation_aborted_before_its_members_connect_ends_immediately(make: Callable[[], Any], why: str) -> None:
    rendezvous, silent, began = make(), ReservedPort("127.0.0.1", new_keys()), time.monotonic()
    rendezvous.abort(7)
    with pytest.raises(BrokenTransportError, match=why):
        rendezvous.form(view([rendezvous.address, str(silent.endpoint)], 7), 0)
    assert time.monotonic() - began < 5 * LIMIT_S
    silent.close()
    rendezvous.close()


def test_a_rendezvous_ends_at_its_limit_and_immediately_on_an_abort(crew: Crew) -> None:
    crew.call([0, 1, 2, 3], limit_s=0.5, come=[0, 1, 2])
    began = time.monotonic()
    assert 0.3 < crew.outs({0, 1, 2}) - began < LIMIT_S / 2
    crew.call([0, 1, 2, 3], come=[0, 1, 2])
    time.sleep(0.1)
    assert crew.abort_among([0, 1, 2]) < 3.0
    crew.form([0, 1, 2, 3])
    crew.abort()


def test_a_rendezvous_ends_if_the_store_process_is_stopped_or_failed(crew: Crew) -> None:
    crew.signal(0, signal.SIGSTOP)
    crew.call([0, 1, 2, 3], come=[1, 2, 3])
    time.sleep(0.1)
    assert crew.abort_among([1, 2, 3]) < 3.0
    crew.signal(0, signal.SIGKILL)
    crew.call([0, 1, 2, 3], limit_s=0.5, come=[1, 2, 3])
    crew.outs({1, 2, 3})
    crew.form([1, 2, 3])
    crew.abort()


def test_the_last_worker_continues_alone(crew: Crew) -> None:
    crew.form([0, 1])
    crew.bury(0)
    crew.abort_among([1])
    crew.form([1])
    crew.abort()


# --- in one process -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def enduring(workers: int, timeout_s: float = LIMIT_S) -> list[ProcessGroupTransport]:
    """Wires that endure, in the threads of this process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(workers) as pool:
        return list(
            pool.map(lambda one: ProcessGroupTransport(store, one, workers, timeout_s, elastic=True), range(workers))
        )


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_elastic_process_group_passes_the_conformance_test(workers: int) -> None:
    check_transport(enduring, (workers,))


def test_handles_of_an_aborted_transport_raise_and_its_traffic_stays() -> None:
    ends = enduring(2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda end: end.submit(AllReduceMean(torch.ones(100_000))).wait(), ends))
    waiting = ends[0].submit(AllReduceMean(torch.ones(1000)))
    threading.Timer(0.1, ends[0].abort).start()
    with pytest.raises(BrokenTransportError, match="worker 0"):
        waiting.wait()
    ends[0].abort()
    sent = ends[0].traffic()
    assert sent.counted
    assert sent.bytes_sent > 400_000
    for ask in (AllReduceMean(torch.ones(2)), AllGather(torch.ones(2))):
        ticket = ends[0].submit(ask)
        with pytest.raises(BrokenTransportError):
            ticket.wait()
    with pytest.raises(BrokenTransportError):
        ends[0].all_gather_bytes(b"anyone?")
    ends[0].close()
    ends[0].close()
    assert ends[0].traffic() == sent
    with pytest.raises(BrokenTransportError):
        ends[1].submit(AllReduceMean(torch.ones(1000))).wait()
    ends[1].close()


def test_a_closed_transport_returns_no_results() -> None:
    for end in enduring(2):
        end.close()
        with pytest.raises(BrokenTransportError):
            end.submit(AllReduceMean(torch.ones(2))).wait()
        end.abort()


def test_no_foreign_socket_is_shut() -> None:
    """Threads open and close connections while groups are formed and broken off."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    over, pairs, failed = threading.Event(), list[tuple[socket.socket, socket.socket]](), list[str]()

    def open_and_close() -> None:
        while not over.wait(0.002):
            one = socket.create_connection(listener.getsockname())
            other, _ = listener.accept()
            pairs.append((one, other))
            if len(pairs) > 64:
                failed.extend(_severed(*pairs.pop(0)))

    opening = threading.Thread(target=open_and_close)
    opening.start()
    try:
        for _ in range(10):
            for end in enduring(2):
                end.abort()
                end.close()
    finally:
        over.set()
        opening.join()
        listener.close()
    for pair in pairs:
        failed.extend(_severed(*pair))
    assert not failed


def _severed(one: socket.socket, other: socket.socket) -> list[str]:
    with one, other:
        try:
            one.sendall(b"x")
            return [] if other.recv(1) == b"x" else ["nothing came"]
        except OSError as error:
            return [str(error)]


def main(path: str, kind: str) -> None:
    """A nursery."""
    _nursery(path, kind)


if __name__ == "__main__":
    main(*sys.argv[1:])
