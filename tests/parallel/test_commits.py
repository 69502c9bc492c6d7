"""An attempt of tensors commits at all ranks of all replicas, or at none, whenever a rank fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from thread_pool import thread_pool

from stretto.collective_ops import AllReduceMean
from stretto.errors import MemberOutError
from stretto.membership.client_state import CoordinatorConnection
from stretto.membership.coordinator import MembershipCoordinator, Outgoing
from stretto.membership.coordinator_records import Started
from stretto.membership.messages import Continue, GenerationView, ReadyReport
from stretto.transport.elastic import ElasticTransport
from stretto.transport.siblings import Siblings
from tests.elastic_workers import LIMIT_S, AbortableInMemory, Table, WorkerKilled

REPLICAS, RANKS, ATTEMPTS = 3, 2, 8
Place = tuple[int, int]


class Run:
    """A coordinator for threads, each of which is one rank of a replica."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._coordinator = MembershipCoordinator(Started(REPLICAS, LIMIT_S, return_s=0.0))
        self.connections: dict[Place, Connection] = {}
        self._tables: dict[Any, Table] = {}

    def receive(self, place: Place, message: Any) -> None:
        """Let the coordinator process a message of a rank."""
        with self.changed:
            self._deliver(self._coordinator.receive(place[0], 0, message, 0.0, place[1], RANKS))

    def end(self, worker: int) -> None:
        """End all ranks of a worker, as the launcher does."""
        with self.changed:
            self._deliver(self._coordinator.process_exited(worker, 0, 0.0))
        for rank in range(RANKS):
            self.table(("inside", worker), RANKS).abort_all()
            self.connections[worker, rank].transport_of_generation.abort_all()

    def _deliver(self, sent: list[Outgoing]) -> None:
        for post in sent:
            connection = self.connections[post.worker, post.rank]
            connection.state.receive(post.message)
            if isinstance(post.message, GenerationView):
                connection.reports_again = False
        self.changed.notify_all()

    def table(self, key: Any, size: int) -> Table:
        """Return the operations of a group of threads."""
        with self.changed:
            return self._tables.setdefault(key, Table(size, LIMIT_S))


class Connection(CoordinatorConnection):
    """A rank's connection to the coordinator."""

    def __init__(self, run: Run, place: Place) -> None:
        super().__init__(place[0], 0)
        self._run, self._place, self.reports_again = run, place, False
        self.transport_of_generation = Table(1, LIMIT_S)
        run.connections[place] = self

    def now(self) -> float:
        return 0.0

    def wake(self, with_heartbeat: bool = False) -> None:
        for message in self.due_messages(with_heartbeat, 0.0):
            self._run.receive(self._place, message)

    def close(self) -> None:
        """Do nothing."""

    def _pause(self, report: ReadyReport) -> GenerationView | Continue:
        with self._run.changed:
            self.state.pause(report)
            end = time.monotonic() + LIMIT_S
            while self.state.reply is None and self.state.evicted is None and time.monotonic() < end:
                self.wake()
                if self.state.reply is None and self.state.evicted is None:
                    self._run.changed.wait(0.05)
            if self.state.evicted is not None or self.state.reply is None:
                raise MemberOutError(self.state.evicted.why if self.state.evicted is not None else "no reply")
            return self.state.reply


class Agreeing(AbortableInMemory):
    """A transport that calls a function before each all-gather of bytes."""

    def __init__(self, rank: int, table: Table, before: Callable[[], None]) -> None:
        super().__init__(rank, table, None)
        self._before = before

    def all_gather_bytes(self, message: Any) -> list[bytes]:
        self._before()
        return super().all_gather_bytes(message)


class Meeting:
    """Rendezvous of the ranks of one number, or of the ranks of one replica."""

    def __init__(self, run: Run, place: Place, inside: bool, before_agreement: Callable[[], None] = int) -> None:
        self._run, self._place, self._inside, self._before_agreement = run, place, inside, before_agreement
        self.address = f"{place}"
        self._table = Table(1, LIMIT_S)

    def form(self, form: GenerationView, rank: int) -> Any:
        worker, number = self._place
        key = ("inside", worker) if self._inside else (number, form.generation)
        self._table = self._run.table(key, len(form.members))
        if not self._inside:
            self._run.connections[self._place].transport_of_generation = self._table
        return Agreeing(rank, self._table, self._before_agreement)

    def abort(self, generation: int) -> None:
        self._table.abort_all()

    def close(self) -> None:
        """Do nothing."""


def results(run: Run, place: Place, dies_at: int, where: str, random: Random, exchange: str = "tensors") -> list[float]:
    """Return the results of all exchanges at one rank; [] at a rank of a replica that ends."""
    worker, rank = place
    siblings = Siblings(rank, RANKS, Meeting(run, place, inside=True))
    found: list[float] = []

    def pause() -> None:
        time.sleep(random.random() * 0.004)

    def kill(here: str) -> None:
        if len(found) == dies_at and where == here:
            time.sleep(0.01)  # in which the other ranks may commit
            raise WorkerKilled

    def ask() -> torch.Tensor:
        pause()
        answer: Any = transport.submit(AllReduceMean(torch.tensor([10.0**worker]))).wait()
        kill("after an operation")
        pause()
        return torch.as_tensor(answer)

    def make() -> bytes:
        """Make the message of a broadcast together with the other ranks, as an evaluation is."""
        assert transport.siblings is not None
        with transport.waiting():
            numbers = transport.siblings.all_gather_bytes(b"%d" % len(found))
        assert len(set(numbers)) == 1
        kill("after an operation")
        return b"%d" % worker

    def once() -> float:
        if exchange == "made together":
            return float(transport.broadcast_by_ranks(make))
        return float(transport.attempt(ask))

    try:
        meeting = Meeting(run, place, inside=False, before_agreement=lambda: kill("before an agreement"))
        transport = ElasticTransport(worker, run.connections[place], meeting, siblings)
        for number in range(ATTEMPTS):
            kill("before an attempt")
            found.append(once())
            assert transport.siblings is not None
            with transport.waiting():  # as for the input of a stage
                transport.siblings.all_gather_bytes(b"%d" % number)
            kill("after a wait")
            pause()
    except WorkerKilled:
        run.end(worker)
        return []
    except MemberOutError:
        return []
    return found


def all_results(seed: int, where: str, exchange: str, killed: Place | None = None) -> dict[Place, list[float]]:
    """Return the results of all ranks of the replicas that remain when a rank is killed, which are equal."""
    random, run = Random(f"{seed}{where}"), Run()
    places = [(worker, rank) for worker in range(REPLICAS) for rank in range(RANKS)]
    victim, dies_at = killed or random.choice(places), random.randrange(1, ATTEMPTS - 1)
    for place in places:
        Connection(run, place)

    def work(place: Place) -> list[float]:
        dies = dies_at if place == victim else -1
        return results(run, place, dies, where, Random(f"{seed}{place}"), exchange)

    with thread_pool(len(places)) as pool:
        found = dict(zip(places, pool.map(work, places, timeout=2 * LIMIT_S), strict=True))
    survivors = {place: each for place, each in found.items() if place[0] != victim[0]}
    assert all(len(each) == ATTEMPTS for each in survivors.values()), found
    assert len({tuple(each) for each in survivors.values()}) == 1, found
    return survivors


@pytest.mark.parametrize("where", ["before an attempt", "after an operation", "before an agreement", "after a wait"])
@pytest.mark.parametrize("seed", range(4))
def test_attempts_commit_at_all_ranks_or_at_none(seed: int, where: str) -> None:
    survivors = all_results(seed, where, "tensors")
    gone = ({0, 1, 2} - {worker for worker, _ in survivors}).pop()
    assert next(iter(survivors.values()))[-1] == 111.0 - 10.0**gone


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("where", ["after an operation", "after a wait"])
def test_ranks_that_make_a_message_together_have_that_of_rank_0(rank: int, where: str) -> None:
    """The ranks of the first worker make its message together, as those of the next one do if that worker fails."""
    survivors = all_results(rank, where, "made together", (0, rank))
    assert next(iter(survivors.values()))[-1] == 1.0
