"""Workers in processes that share memory, and scenarios in which they are killed, stopped and forked.

This file runs a scenario in a process of its own, which forks the workers and sends signals to them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from stretto.collective_ops import AllReduceMean, Exchange
from stretto.errors import BrokenTransportError
from stretto.transport import peer_group, peer_means, shared_memory
from stretto.transport.host_memory import HostMemory
from stretto.transport.interface import Transport
from stretto.transport.process_group import ProcessGroupTransport
from stretto.transport.shared_memory import HostsTransport, SharedMemoryTransport, over_shared_memory

offer_memory = shared_memory.offer_memory
TIMEOUT_S = 40.0
TWO_HOSTS = (0, 0, 1, 1)
PIECE = 65_536
"""Numbers of float32 in a piece of the kernel."""


def traces() -> list[str]:
    """Return the memory files that this process has mapped or opened, without those of garbage."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        found = [line.split()[-2] for line in maps if "memfd:stretto (" in line]
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "memfd:stretto (" in (name := os.readlink(f"/proc/self/fd/{entry}")):
                found.append(name)
    return found


class Child:
    """A forked worker: it writes lines of JSON, and aborts its transport at each line that it reads."""

    def __init__(self, work: Callable[[Speaker], None]) -> None:
        (self.replies, say), (listen, self.orders) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                work(Speaker(say, listen))
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(say)
        os.close(listen)

    def reply(self) -> Any:
        """Return the next line of the worker."""
        assert select.select([self.replies], [], [], TIMEOUT_S)[0], "a worker did not reply"
        line = b""
        while not line.endswith(b"\n"):
            read = os.read(self.replies, 1)
            assert read, "a worker has failed"
            line += read
        return json.loads(line)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class Speaker:
    """The worker's side of its pipes."""

    def __init__(self, say: int, listen: int) -> None:
        self._say = say
        self.transport: Any = None
        self.is_told = threading.Event()
        """Set once a line has aborted the transport."""
        self._abort_lock = threading.Lock()
        """Held within an abort, which refers to the memory until it returns."""
        threading.Thread(target=self._listen, args=(listen,), daemon=True).start()

    def _listen(self, listen: int) -> None:
        while os.read(listen, 1):
            with self._abort_lock:
                self.transport.abort()
            self.is_told.set()

    def say(self, **what: Any) -> None:
        os.write(self._say, (json.dumps(what) + "\n").encode())

    def connect(self, path: Path, rank: int, workers: int, hosts: Sequence[int] = ()) -> SharedMemoryTransport:
        """Connect with the other workers, as if each was on the host of its rank in `hosts`."""
        store = dist.FileStore(str(path), workers)
        if hosts:
            shared_memory.offer_memory = lambda *arguments: msgspec.structs.replace(
                offer_memory(*arguments), host=f"host {hosts[rank]}"
            )
        found = over_shared_memory(ProcessGroupTransport(store, rank, workers, TIMEOUT_S, elastic=True))
        assert isinstance(found, HostsTransport if hosts else SharedMemoryTransport)
        self.transport = found
        return found

    def leave(self) -> None:
        """Close the transport. Its memory is free once no traceback refers to it."""
        with self._abort_lock:
            self.transport.abort()
            self.transport.close()
            gc.collect()
            assert traces() == []


def check_means(transport: Transport, seconds: float, seed: int = 0) -> None:
    """Compute means of random sizes, several at a time; check that each is exact."""
    case, end = random.Random(seed), time.monotonic() + seconds
    going = True
    while going:
        sizes = [case.choice([1, 1000, PIECE, 300_001]) for _ in range(case.randint(1, 3))]
        tensors = [torch.full((size,), transport.worker + index + 1.0) for index, size in enumerate(sizes)]
        for index, handle in enumerate([transport.submit(AllReduceMean(one)) for one in tensors]):
            expected = sum(rank + index + 1.0 for rank in range(transport.workers))
            assert bool((handle.wait() == expected).all()), "a wrong sum"
        going = all(transport.all_gather_bytes(b"" if time.monotonic() > end else b"on"))


def replies_after_kill(children: list[Child], victim: int, hosts: Sequence[int]) -> list[Any]:
    """Wait for the exit of a worker; return the replies of those on its host, which notice it, and of the others.

    Gloo may forget a message that an abort cuts off, and wait for its whole time limit. In a run, the coordinator tells
    all workers of an exit, as is done here.
    """
    others = [child for child, host in zip(children, hosts, strict=True) if host != hosts[victim]]
    os.waitpid(children.pop(victim).pid, 0)
    found = [child.reply() for child in children if child not in others]
    for child in children:
        os.write(child.orders, b"a")
    return found + [child.reply() for child in others]


def killed(stage: str, folder: Path) -> dict[str, Any]:
    """Kill worker 1 of 3 at a stage of a mean of several pieces."""

    def work(rank: int, speaker: Speaker) -> None:
        transport = speaker.connect(folder / "three", rank, 3)
        transport.all_gather_bytes(b"all are here")
        first = {"absent": None, "posted": 1, "summed": 0}[stage]
        time.sleep(0.0 if (rank == 1) == (first == 1) else 0.2)
        if rank == 1 and stage == "absent":
            os.kill(os.getpid(), signal.SIGKILL)
        handle = transport.submit(AllReduceMean(torch.ones(9 * PIECE)))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            while True:
                assert bool((handle.wait() == 3.0).all())
                handle = transport.submit(AllReduceMean(torch.ones(9 * PIECE)))
        except BrokenTransportError as error:
            speaker.say(seconds=time.monotonic() - began, why=str(error))
        speaker.leave()
        check_means(speaker.connect(folder / "two", rank // 2, 2), 0.1)
        speaker.leave()
        speaker.say(ended=True)

    children = [Child(lambda speaker, rank=rank: work(rank, speaker)) for rank in range(3)]
    survivors = [children[0], children[2]]
    outs = [child.reply() for child in survivors]
    ended = [child.reply() for child in survivors]
    for child in children:
        child.end()
    return {"outs": outs, "ended": ended}


def _kill(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _copy_and_kill(memory: HostMemory, values: torch.Tensor, copy: Any = HostMemory.start_copy) -> None:
    copy(memory, values)
    _kill()


STAGES = {
    "before its sum": lambda: setattr(HostMemory, "start_sum", _kill),
    "after its sum": lambda: setattr(HostsTransport, "_spread", _kill),
    "before the exchange": lambda: setattr(peer_group.PeerGroup, "start_all", _kill),
    "within the exchange": lambda: setattr(peer_means, "_sum", _kill),
    "after the exchange": lambda: setattr(HostMemory, "start_copy", _kill),
    "within the copy": lambda: setattr(HostMemory, "start_copy", _copy_and_kill),
}
"""Stages of a mean of several hosts, each with a function that has this worker killed there."""


def killed_on_two_hosts(how: str, folder: Path) -> dict[str, Any]:
    """Kill a worker of two hosts with two workers each at a stage of a mean of several segments and pieces."""
    killed_rank, stage = how.split(" ", 1)
    victim = int(killed_rank)
    shared_memory.SEGMENT_BYTES = 12 * PIECE

    def work(rank: int, speaker: Speaker) -> None:
        transport = speaker.connect(folder / "four", rank, 4, TWO_HOSTS)
        check_means(transport, 0.05)
        if rank == victim:
            STAGES[stage]()
        began = time.monotonic()
        try:
            while True:
                handles = [transport.submit(AllReduceMean(torch.ones(9 * PIECE))) for _ in range(2)]
                for handle in handles:
                    assert bool((handle.wait() == 4.0).all()), "a torn result"
        except BrokenTransportError as error:
            speaker.say(seconds=time.monotonic() - began, why=str(error))
        speaker.is_told.wait(TIMEOUT_S)
        speaker.leave()
        survivors = [one for one in range(4) if one != victim]
        hosts = [TWO_HOSTS[one] for one in survivors]
        check_means(speaker.connect(folder / "three", survivors.index(rank), 3, hosts), 0.1)
        speaker.leave()
        speaker.say(ended=True)

    children = [Child(lambda speaker, rank=rank: work(rank, speaker)) for rank in range(4)]
    outs = replies_after_kill(children, victim, TWO_HOSTS)
    ended = [child.reply() for child in children]
    for child in children:
        child.end()
    return {"outs": outs, "ended": ended}


def killed_at_random(rounds: str, folder: Path, hosts: Sequence[int] = ()) -> dict[str, Any]:
    """Kill one of 4 workers at random moments of their means."""
    chance, outs = random.Random(0), []

    def work(rank: int, round_: int, speaker: Speaker) -> None:
        transport = speaker.connect(folder / f"{round_}", rank, 4, hosts)
        speaker.say(here=True)
        with contextlib.suppress(BrokenTransportError):
            check_means(transport, TIMEOUT_S)
        speaker.say(at=time.monotonic())
        speaker.is_told.wait(TIMEOUT_S)
        speaker.leave()
        speaker.say(ended=True)

    for round_ in range(int(rounds)):
        children = [Child(lambda speaker, rank=rank, round_=round_: work(rank, round_, speaker)) for rank in range(4)]
        for child in children:
            child.reply()
        time.sleep(chance.uniform(0.0, 0.05))
        victim, at = chance.randrange(4), time.monotonic()
        os.kill(children[victim].pid, signal.SIGKILL)
        outs.append(max(reply["at"] for reply in replies_after_kill(children, victim, hosts or (0,) * 4)) - at)
        assert all(child.reply()["ended"] for child in children)
        for child in children:
            child.end()
    return {"outs": outs}


def killed_at_random_on_two_hosts(rounds: str, folder: Path) -> dict[str, Any]:
    """Kill one of 4 workers on two hosts at random moments of their means."""
    return killed_at_random(rounds, folder, TWO_HOSTS)


def stopped_on_two_hosts(_: str, folder: Path) -> dict[str, Any]:
    """Stop the only worker of the second host within its means, form a group of the others, and let it continue."""
    return stopped(_, folder, (0, 0, 1))


def stopped(_: str, folder: Path, hosts: Sequence[int] = ()) -> dict[str, Any]:
    """Stop worker 2 of 3 within its means, form a group of the others, and let worker 2 continue."""

    def work(rank: int, speaker: Speaker) -> None:
        transport = speaker.connect(folder / "three", rank, 3, hosts)
        speaker.say(here=True)
        try:
            check_means(transport, TIMEOUT_S)
        except BrokenTransportError as error:
            speaker.say(why=str(error))
        speaker.leave()
        if rank < 2:
            shared_memory.offer_memory = offer_memory
            check_means(speaker.connect(folder / "two", rank, 2), 0.6, seed=1)
            speaker.leave()
            speaker.say(ended=True)

    children = [Child(lambda speaker, rank=rank: work(rank, speaker)) for rank in range(3)]
    for child in children:
        child.reply()
    time.sleep(0.1)
    os.kill(children[2].pid, signal.SIGSTOP)
    time.sleep(0.1)
    began = time.monotonic()
    for child in children[:2]:
        os.write(child.orders, b"a")
    whys = [child.reply()["why"] for child in children[:2]]
    out = time.monotonic() - began
    time.sleep(0.2)
    os.kill(children[2].pid, signal.SIGCONT)
    whys.append(children[2].reply()["why"])
    ended = [child.reply() for child in children[:2]]
    for child in children:
        child.end()
    return {"out": out, "whys": whys, "ended": ended}


def sent_before_exit(_: str, folder: Path) -> dict[str, Any]:
    """Let a worker exit after it has sent a large tensor, and the other one wait for it then."""
    (gone, _end), tensor = os.pipe(), torch.arange(1 << 20)

    def first(speaker: Speaker) -> None:
        handle = speaker.connect(folder / "two", 0, 2).submit(Exchange(1, tensor))
        handle.wait()
        os._exit(0)

    def second(speaker: Speaker) -> None:
        os.close(_end)
        handle = speaker.connect(folder / "two", 1, 2).submit(Exchange(0, tensor[:1]))
        os.read(gone, 1)  # until the first worker has exited
        speaker.say(equal=torch.equal(handle.wait(), tensor))

    children = [Child(first), Child(second)]
    os.close(_end)
    found: dict[str, Any] = children[1].reply()
    for child in children:
        child.end()
    return found


def forked(_: str, folder: Path) -> dict[str, Any]:
    """Fork a process from each worker, as a DataLoader does, and let it exit after the worker's transport is closed."""

    def work(rank: int, speaker: Speaker) -> None:
        transport = speaker.connect(folder / "two", rank, 2)
        check_means(transport, 0.05)
        (read, write), (ends, end) = os.pipe(), os.pipe()
        if (pid := os.fork()) == 0:
            transport._memory = None
            transport._exchanges.close()
            gc.collect()
            os.write(write, json.dumps(traces()).encode())
            os.close(end)
            os.read(ends, 1)
            os._exit(0)
        check_means(transport, 0.1)
        speaker.leave()
        os.close(end)
        os.waitpid(pid, 0)
        speaker.say(traces=json.loads(os.read(read, 1 << 16)))

    children = [Child(lambda speaker, rank=rank: work(rank, speaker)) for rank in range(2)]
    found = [child.reply() for child in children]
    for child in children:
        child.end()
    return {"found": found}


if __name__ == "__main__":
    torch.set_num_threads(1)
    scenario, how, folder = sys.argv[1:]
    print(json.dumps(globals()[scenario](how, Path(folder))))
