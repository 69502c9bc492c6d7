"""A server and its replica: whichever of the two is killed, whatever anybody was answered for is still there."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from served import ADDING, Processes, hear, push

from stretto.server.cuts import Folder
from stretto.server.pair import NOBODY, Line, Lock, Reading, noted
from stretto.wire.link import dial
from stretto.wire.server import ServerWire
from stretto.wire.shards import AnewError

LIMIT_S = 60.0
PATIENCE_S = 2.0
NUMBERS = 70_000


class Twins(Processes):
    """A server and its replica."""

    @property
    def serving(self) -> int:
        """Which of the two serves."""
        found = noted(self.cuts, "shard0").server
        return next(number for number, one in self.alive.items() if one.pid == found)


@pytest.fixture
def twins(tmp_path: Path) -> Iterator[Twins]:
    twins = Twins(tmp_path, STRETTO_REPLICA="0", STRETTO_PATIENCE=str(PATIENCE_S), STRETTO_CUT_EVERY="0.1")
    try:
        for number in (0, 1):
            twins.start(number)
        yield twins
    finally:
        twins.end()


def begun(twins: Twins) -> ServerWire:
    wire = dial(0, 1, twins.addresses, None, LIMIT_S, patience_s=LIMIT_S)
    wire.open(1, ADDING, [torch.zeros(NUMBERS)])
    wire.gather(b"open")
    return wire


def pushed(wire: ServerWire, first: int, updates: int) -> tuple[int, float]:
    """Push ones; how often what there is then was changed, and what the numbers are."""
    like = [torch.zeros(NUMBERS)]
    for seq in range(first, first + updates):
        hear(push(wire, seq, [torch.ones(NUMBERS)]), like)
    news, (found,) = hear(wire.read([NUMBERS]), like)
    assert bool((found == found[0]).all())
    return news.versions[0], float(found[0])


@pytest.mark.parametrize(("dies", "after_s"), [("the server", 0.21), ("the replica", 0.05)])
def test_nothing_is_lost_and_nothing_is_done_again(twins: Twins, dies: str, after_s: float) -> None:
    """It is killed in the middle of the updates; after that the other is alone, and so it goes on from a cut."""
    wire = begun(twins)
    victim = twins.serving if dies == "the server" else 1 - twins.serving
    blow = threading.Timer(after_s, twins.kill, [victim])
    blow.start()
    assert pushed(wire, 1, 300) == (300, 300.0)
    blow.join()
    assert wire.age == 0
    twins.start(victim)
    wire.meet(300)  # and keep what there is
    twins.kill(1 - victim)
    with pytest.raises(AnewError):
        pushed(wire, 301, 1)
    wire.recover()
    assert (wire.age, pushed(wire, 1, 5)) == (1, (305, 305.0))
    wire.close()


def test_a_replica_that_stands_still_is_given_up_and_never_serves(twins: Twins) -> None:
    wire = begun(twins)
    server, replica = twins.serving, twins.alive[1 - twins.serving]
    replica.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert pushed(wire, 1, 30) == (30, 30.0)
    assert time.monotonic() - began < PATIENCE_S + 10
    replica.send_signal(signal.SIGCONT)
    assert replica.wait(LIMIT_S) == 0
    assert twins.serving == server
    wire.close()


def test_server_and_replica_keep_the_same(twins: Twins) -> None:
    """What the clock decides, too: when a cut is due."""
    wire = begun(twins)
    wire.begin(1, [4] * 60, None, False)
    seq = 0
    while True:
        leased = wire.lease(wire.ask_lease(1))
        if leased.meet:
            wire.meet(seq, called=True)
            wire.apart()
        elif leased.batch is None:
            break
        else:
            seq += 1
            hear(push(wire, seq, [torch.ones(NUMBERS)]), [torch.zeros(NUMBERS)])
            wire.settle(1, [leased.batch])
            time.sleep(0.005)
    assert wire.met > 1
    assert wire.is_over(1)
    wire.meet(seq)
    for name in ("shard0", "coordinator"):
        server, replica = Folder(twins.cuts, name), Folder(twins.cuts, f"{name}-twin")
        limit = time.monotonic() + LIMIT_S
        while replica.cuts() != server.cuts():
            assert time.monotonic() < limit
            time.sleep(0.01)
        newest = server.cuts()[-1]
        files = [twins.cuts / f"{one}-{newest}.cut" for one in (name, f"{name}-twin")]
        assert files[0].read_bytes() == files[1].read_bytes()
    wire.close()


def test_a_lock_is_left_to_an_heir_that_lives_and_to_nobody_else(tmp_path: Path) -> None:
    lock, name = Lock(tmp_path, "shard0"), tmp_path / "shard0.lock"
    ended = subprocess.Popen(["true"])
    ended.wait(LIMIT_S)
    found = []
    for heir in (os.getpid(), ended.pid, NOBODY):
        assert lock.take()
        lock.note(heir)
        found.append(lock.leave_to_heir())
    assert found == [True, False, False]
    assert lock.take()
    lock.note(os.getpid())
    octets = name.read_bytes()
    name.write_bytes(octets[:-8] + struct.pack("<d", time.time() - 3600))  # another process had that number then
    assert not lock.leave_to_heir()


# --- the line -------------------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    messages=st.lists(st.tuples(st.binary(min_size=1, max_size=9), st.lists(st.binary(max_size=30), max_size=3))),
    share=st.floats(0, 1),
)
def test_what_was_handed_on_whole_is_heard_wherever_the_server_was_cut_off(
    tmp_path_factory: pytest.TempPathFactory, messages: list[tuple[bytes, list[bytes]]], share: float
) -> None:
    lock = Lock(tmp_path_factory.mktemp("pair"), "shard0")
    written, times, ends = bytearray(), list[float](), list[int]()
    for name, frames in messages:
        here, there = socket.socketpair()
        line = Line(lock, here, Reading(0.0))
        line.hand_on(name, frames)
        here.close()
        while octets := there.recv(1 << 16):
            written += octets
        there.close()
        times.append(line.clock.now)
        ends.append(len(written))
    cut = round(share * len(written))
    here, there = socket.socketpair()
    here.sendall(written[:cut])
    here.close()
    lock.note(os.getpid())
    replica = Line(lock, there, Reading(0.0), follows=True)
    heard = [
        (name, [bytes(one) for one in frames], replica.clock.now) for name, frames in replica.follow(threading.Event())
    ]
    whole = sum(one <= cut for one in ends)
    assert heard == [(name, frames, at) for (name, frames), at in zip(messages, times, strict=True)][:whole]
    assert lock.noted.heir == NOBODY
