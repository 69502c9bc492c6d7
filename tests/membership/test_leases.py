"""Leases under any order of leasing, settling and leaving: every sample counts exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from stretto.data.leases import Audit, FirstCome, Lease, Ledger, RoundRobin, audit

SIZES = st.lists(st.integers(1, 9), max_size=40)


@given(SIZES, st.integers(1, 5))
def test_round_robin_leases_every_batch_once_and_evenly(sizes: list[int], workers: int) -> None:
    ledger = Ledger(sizes, RoundRobin(range(workers)))
    leases = {worker: list(iter(lambda worker=worker: ledger.lease(worker), None)) for worker in range(workers)}
    dealt = [len(mine) for mine in leases.values()]
    assert max(dealt) - min(dealt) <= 1
    for worker, mine in leases.items():
        assert [lease.batch for lease in mine] == list(range(worker, len(sizes), workers))
        for lease in mine:
            assert lease.samples == sizes[lease.batch]
            assert ledger.settle(lease)
    assert audit([ledger.counts()]) == Audit(once=sum(sizes), twice=0, never=0)


@given(SIZES, st.integers(2, 5))
def test_copies_with_the_same_plan_add_up(sizes: list[int], workers: int) -> None:
    """Each worker has its own copy and settles only its own batches."""
    ledgers = [Ledger(sizes, RoundRobin(range(workers))) for _ in range(workers)]
    for worker, ledger in enumerate(ledgers):
        while (lease := ledger.lease(worker)) is not None:
            ledger.settle(lease)
    assert audit([ledger.counts() for ledger in ledgers]) == Audit(once=sum(sizes), twice=0, never=0)


def test_the_audit_counts_samples_trained_once_twice_and_never() -> None:
    counts = [np.array([1, 1, 0, 0], np.uint8), np.array([1, 0, 0, 1], np.uint8)]
    assert audit(counts) == Audit(once=2, twice=1, never=1)


def test_a_returned_lease_does_not_count_while_another_worker_holds_its_batch() -> None:
    ledger = Ledger([2], FirstCome())
    returned = ledger.lease(0)
    ledger.give_back(0)
    held = ledger.lease(1)
    assert returned is not None
    assert held is not None
    assert not ledger.settle(returned)
    assert ledger.settle(held)
    assert ledger.trained_by == [1]


class Lives(RuleBasedStateMachine):
    """Workers lease, settle, settle again and fail, in any order."""

    plan: RoundRobin | FirstCome

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [3, 1, 4, 1, 5, 9, 2, 6]
        self.ledger = Ledger(self.sizes, self.plan)
        self.held: dict[int, list[Lease]] = {worker: [] for worker in range(3)}
        self.old: list[Lease] = []

    @rule(worker=st.integers(0, 2))
    def lease(self, worker: int) -> None:
        lease = self.ledger.lease(worker)
        if lease is not None:
            assert all(lease.batch != other.batch for mine in self.held.values() for other in mine)
            self.held[worker].append(lease)

    @rule(worker=st.integers(0, 2))
    def settle(self, worker: int) -> None:
        if self.held[worker]:
            lease = self.held[worker].pop(0)
            assert self.ledger.settle(lease)
            self.old.append(lease)

    @rule(worker=st.integers(0, 2))
    def die(self, worker: int) -> None:
        lost = self.held[worker]
        assert self.ledger.give_back(worker) == sum(lease.samples for lease in lost)
        self.old += lost
        self.held[worker] = []

    @rule(data=st.data())
    def settle_what_is_over(self, data: st.DataObject) -> None:
        gone = [one for one in self.old if all(one != other for mine in self.held.values() for other in mine)]
        if gone:
            before = self.ledger.counts().sum()
            assert not self.ledger.settle(data.draw(st.sampled_from(gone)))
            assert self.ledger.counts().sum() == before

    @invariant()
    def nothing_counts_twice(self) -> None:
        assert self.ledger.counts().max(initial=0) <= 1

    def teardown(self) -> None:
        """Finish the epoch with the remaining workers."""
        for worker in self.held:
            self.ledger.give_back(worker)
        for worker in range(3):
            while (lease := self.ledger.lease(worker)) is not None:
                assert self.ledger.settle(lease)
        assert audit([self.ledger.counts()]) == Audit(once=sum(self.sizes), twice=0, never=0)


@pytest.mark.parametrize("plan", [RoundRobin(range(3)), FirstCome()], ids=str)
def test_every_sample_counts_once_in_any_order(plan: RoundRobin | FirstCome) -> None:
    machine = type("Machine", (Lives,), {"plan": plan})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(240), stateful_step_count=30))
