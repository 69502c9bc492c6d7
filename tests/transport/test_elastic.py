"""Results that some workers received before a failure reach the others, whichever workers remain."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stretto.collective_ops import AllReduceMean
from stretto.errors import BrokenTransportError, MemberOutError
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
        wire.receive_state()
    assert former.formed == [2]


def test_a_worker_that_requested_no_state_starts_with_the_others() -> None:
    former = _Broken(2)
    wire = ElasticTransport(1, _Script(_generation(2, history=1), _generation(3, history=0)), former)
    assert not wire.arrives
    assert wire.begins_again
    assert former.formed == [3]
