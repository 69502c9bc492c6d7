"""Results that some workers received before a failure reach the others, whichever workers remain."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stretto.collective_ops import AllReduceMean, Exchange
from stretto.errors import BrokenTransportError, MemberOutError, TransportError
from stretto.membership.messages import GenerationView, Member, ReadyReport
from stretto.transport.elastic import ElasticTransport
from tests.elastic_workers import (
    LIMIT_S,
    AbortableInMemory,
    InMemoryRendezvous,
    KillInExchange,
    ThreadConnection,
    ThreadCoordinator,
    WorkerKilled,
)

WORKERS, ATTEMPTS, LENGTHS = 4, 6, (3, 5)


def sums(coordinator: ThreadCoordinator, worker: int, changes: bool) -> list[list[float]]:
    """Return a worker's results in each attempt of two means, as numbers of contributions; [] if it failed."""
    wire = ElasticTransport(worker, ThreadConnection(coordinator, worker), InMemoryRendezvous(coordinator))
    given = [torch.zeros(length) for length in LENGTHS]
    found: list[list[float]] = []

    def ask() -> list[torch.Tensor]:
        asked = [one.fill_(float(10**worker)) for one in given] if changes else [one + 10**worker for one in given]
        return [ticket.wait() for ticket in [wire.submit(AllReduceMean(one)) for one in asked]]

    try:
        for _ in range(ATTEMPTS):
            answers = wire.attempt(ask)
            assert all(bool((one == one[0]).all()) for one in answers)
            found.append([float(one[0]) for one in answers])
            for one in answers if changes else ():
                one.zero_()
    except WorkerKilled:
        coordinator.fail(worker)
        return []
    wire.close()
    return found


@pytest.mark.parametrize("changes", [False, True])
def test_a_worker_that_received_a_result_can_forward_it(changes: bool) -> None:
    """Worker 3 fails once only worker 0 has the result; worker 0 while forwarding it, once only worker 1 has it."""
    last = len(LENGTHS) * (ATTEMPTS - 1)
    coordinator = ThreadCoordinator(
        WORKERS, KillInExchange(last, killed=3, receiver=0), KillInExchange(1, killed=0, receiver=1, generation=2)
    )
    with ThreadPoolExecutor(WORKERS) as pool:
        done = [pool.submit(sums, coordinator, worker, changes) for worker in range(WORKERS)]
        _, second, third, fourth = [one.result(timeout=LIMIT_S) for one in done]
    assert second == third == [[1111.0] * 2] * (ATTEMPTS - 1) + [[110.0] * 2]
    assert fourth == []


def pairs(coordinator: ThreadCoordinator, worker: int) -> list[tuple[int, int, int]]:
    """Return what a worker received in each attempt: generation and number of the sender, and workers; [] if it failed.

    Neighbours exchange; of an odd number of workers the last one submits nothing and receives what it has sent.
    """
    transport = ElasticTransport(worker, ThreadConnection(coordinator, worker), InMemoryRendezvous(coordinator))
    received: list[tuple[int, int, int]] = []

    def exchange() -> tuple[int, int, int]:
        mine, peer = torch.tensor([transport._form.generation, worker, transport.workers]), transport.worker ^ 1
        answer = transport.submit(Exchange(peer, mine)).wait() if peer < transport.workers else mine
        generation, sender, workers = (int(number) for number in answer)
        return generation, sender, workers

    try:
        for _ in range(ATTEMPTS):
            received.append(transport.attempt(exchange, in_pairs=True))
    except WorkerKilled:
        coordinator.fail(worker)
        return []
    transport.close()
    return received


@pytest.mark.parametrize(
    ("plan", "committed"),
    [
        (KillInExchange((2, 3, 0, 4), killed=3, receiver=2), 3),
        (KillInExchange((0, 1, 0, 4), killed=1, receiver=0), 3),
        (KillInExchange(4, killed=3, receiver=0), 4),
        (KillInExchange(4, killed=3, receiver=2), 4),
    ],
    ids=["exchange", "other pair's exchange", "agreement, received by another pair", "agreement, received by its pair"],
)
def test_an_attempt_in_pairs_commits_at_all_workers_under_one_generation(plan: KillInExchange, committed: int) -> None:
    """Worker 0 has the results of its exchange in any case, and commits them only if worker 2 commits its own, too."""
    coordinator = ThreadCoordinator(WORKERS, plan)
    with ThreadPoolExecutor(WORKERS) as pool:
        done = [pool.submit(pairs, coordinator, worker) for worker in range(WORKERS)]
        results = [future.result(timeout=LIMIT_S) for future in done]
    first, second, third = [worker for worker in range(WORKERS) if worker != plan.killed]
    after = {first: (2, second, 3), second: (2, first, 3), third: (2, third, 3)}
    for worker in (first, second, third):
        assert results[worker] == [(1, worker ^ 1, 4)] * committed + [after[worker]] * (ATTEMPTS - committed)
    assert results[plan.killed] == []


def test_an_exchange_in_an_attempt_that_is_not_in_pairs_is_refused() -> None:
    coordinator = ThreadCoordinator(1)
    transport = ElasticTransport(0, ThreadConnection(coordinator, 0), InMemoryRendezvous(coordinator))
    with pytest.raises(TransportError, match=r"in_pairs=True at all workers"):
        transport.attempt(lambda: transport.submit(Exchange(1, torch.ones(1))))


def test_a_group_ends_with_its_generation() -> None:
    coordinator = ThreadCoordinator(3)

    def work(worker: int) -> str:
        transport = ElasticTransport(worker, ThreadConnection(coordinator, worker), InMemoryRendezvous(coordinator))
        group = transport.group(range(3))
        transport.attempt(lambda: group.submit(AllReduceMean(torch.ones(5))).wait(), in_pairs=True)
        if worker == 2:
            coordinator.fail(worker)
            return ""
        transport.all_gather_bytes(b"without worker 2")
        with pytest.raises(BrokenTransportError, match="the group of generation 1 is over"):
            group.submit(AllReduceMean(torch.ones(5)))
        messages = transport.attempt(lambda: transport.group([1, 0]).all_gather_bytes(b"%d" % worker), in_pairs=True)
        transport.close()
        return b"".join(messages).decode()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(3))) == ["10", "10", ""]


class _Script(ThreadConnection):
    """Forms one generation after the other from the waiting workers."""

    def __init__(self, *forms: GenerationView) -> None:
        super().__init__(ThreadCoordinator(2), 1)
        self._forms = iter(forms)

    def await_generation(self, report: ReadyReport) -> GenerationView:
        return next(self._forms)


class _Broken(InMemoryRendezvous):
    """Makes transports that are aborted immediately; raises for the generations in `never`."""

    def __init__(self, *never: int) -> None:
        super().__init__(ThreadCoordinator(2))
        self.never, self.formed = never, list[int]()

    def form(self, form: GenerationView, rank: int) -> AbortableInMemory:
        if form.generation in self.never:
            raise BrokenTransportError("a worker did not connect")
        self.formed.append(form.generation)
        wire = super().form(form, rank)
        wire.abort()
        return wire


def _generation(number: int, history: int) -> GenerationView:
    return GenerationView(
        number,
        [Member(0, 0, ReadyReport(history, 0, 0, False, "")), Member(1, 1, ReadyReport(1 - number, 0, 0, False, ""))],
    )


def test_a_joining_worker_is_evicted_if_no_member_has_the_state() -> None:
    """Workers that start together exchange messages that a joining worker does not."""
    former = _Broken()
    wire = ElasticTransport(1, _Script(_generation(2, history=1), _generation(3, history=0)), former)
    assert wire.arrives
    with pytest.raises(MemberOutError, match="no worker is left that has the state"):
        wire.receive_state(bytes)
    assert former.formed == [2]


def test_a_worker_that_requested_no_state_starts_with_the_others() -> None:
    former = _Broken(2)
    wire = ElasticTransport(1, _Script(_generation(2, history=1), _generation(3, history=0)), former)
    assert not wire.arrives
    assert wire.begins_again
    assert former.formed == [3]
