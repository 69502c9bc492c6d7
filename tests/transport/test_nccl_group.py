"""Groups of GPUs end each wait within a limit, return whole results of their generation or none, and abort safely."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transport.fake_communicator import FakeCommunicator, Faults, Network

from stretto.transport.nccl_group import CONNECTING, NcclGroup, NcclWork, State

TIMEOUT_S, FAILURE_S = 0.15, 0.3
LONG_S = 60.0
"""Limit of a test that waits for something that always comes."""
NEVER_S = 2 * LONG_S
SIZE = 6


@contextmanager
def group_of(*faults: Faults, timeout_s: float = NEVER_S, failure_s: float = NEVER_S) -> Iterator[list[NcclGroup]]:
    network = Network(len(faults))
    groups = [NcclGroup(one, timeout_s, failure_s) for one in network.ends(faults)]
    yield groups
    network.stopped.set()
    for one in groups:
        one.abort()


def end_of(group: NcclGroup) -> FakeCommunicator:
    found = group._communicator
    assert isinstance(found, FakeCommunicator)
    return found


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end, "a condition has not come true"
        time.sleep(0.001)


def start(groups: list[NcclGroup], value: float = 1.0) -> tuple[list[Tensor], list[NcclWork]]:
    tensors = [torch.full((SIZE,), value + rank) for rank in range(len(groups))]
    return tensors, [group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True)]


# --- without faults -----------------------------------------------------------------------------------------------


def test_a_sum_and_a_gather_have_the_numbers_of_all_ranks() -> None:
    with group_of(*[Faults()] * 3) as groups:
        tensors, works = start(groups)
        for work in works:
            work.wait()
        assert all(torch.equal(one, torch.full((SIZE,), 6.0)) for one in tensors)
        found = [[torch.empty(SIZE) for _ in range(3)] for _ in groups]
        for group, mine, into in zip(groups, tensors, found, strict=True):
            group.allgather([into], [mine])
        for work in start(groups)[1]:
            work.wait()
        assert all(torch.equal(one, torch.full((SIZE,), 6.0)) for into in found for one in into)


def test_an_ended_operation_holds_no_tensors() -> None:
    """A transport keeps the last operations; their tensors would fill the memory of the GPU."""
    with group_of(Faults()) as (group,):
        work = group.allreduce([torch.ones(SIZE)])
        work.wait()
        assert (work.arguments, work.operation) == ((), None)


def test_a_wait_with_a_limit_leaves_the_group_alone() -> None:
    with group_of(Faults(), Faults()) as (first, second):
        until(lambda: first.state is second.state is State.READY)
        work = first.allreduce([torch.ones(SIZE)])
        with pytest.raises(RuntimeError, match="after 0.01 s"):
            work.wait(timedelta(seconds=0.01))
        assert not work.is_completed()
        second.allreduce([torch.ones(SIZE)]).wait()
        work.wait()


def test_a_healthy_group_is_shut_down_and_not_aborted() -> None:
    with group_of(Faults(), Faults()) as groups:
        for work in start(groups)[1]:
            work.wait()
        ends = [end_of(one) for one in groups]
        assert all(group.close() and group.close() for group in groups)
        assert all(end.is_shut.is_set() and not end.aborts for end in ends)
        assert {group.state for group in groups} == {State.CLOSED}
        until(lambda: all(end.releases == 1 for end in ends))
        with pytest.raises(RuntimeError, match="closed"):
            groups[0].allreduce([torch.ones(1)])


# --- each fault ------------------------------------------------------------------------------------------------------

ENDING = {
    "a rank is missing while connecting": (Faults(hangs_connecting=True), "did not connect"),
    "connecting fails": (Faults(fails_connecting=True), "network is down"),
    "beginning hangs": (Faults(hangs_beginning=0), "no result of allreduce"),
    "an operation hangs": (Faults(hangs_in=0), "no result of allreduce"),
    "an operation fails": (Faults(fails_in=0), "connection to another GPU"),
    "an operation fails late": (Faults(fails_late_in=0), "connection to another GPU"),
}


@pytest.mark.parametrize("case", ENDING)
def test_a_fault_of_one_rank_ends_its_wait_with_the_reason(case: str) -> None:
    faults, why = ENDING[case]
    hangs = "hangs" in case or "missing" in case
    with group_of(faults, Faults(), timeout_s=TIMEOUT_S if hangs else NEVER_S) as groups:
        if "no result" in why:
            until(lambda: groups[0].state is groups[1].state is State.READY)
        with pytest.raises(RuntimeError, match=why):
            start(groups)[1][0].wait()
        assert groups[0].settle()
        assert groups[0].state is State.ABORTED


def test_a_group_that_does_not_connect_ends_before_the_limit_of_its_operations() -> None:
    with group_of(Faults(hangs_connecting=True), failure_s=FAILURE_S) as (group,):
        work, began = group.allreduce([torch.ones(1)]), time.monotonic()
        with pytest.raises(RuntimeError, match="did not connect"):
            work.wait()
        assert time.monotonic() - began >= CONNECTING * FAILURE_S - 0.05


@pytest.mark.parametrize("state", [State.FORMING, State.READY])
def test_an_abort_from_another_thread_ends_a_wait(state: State) -> None:
    with group_of(Faults(hangs_connecting=state is State.FORMING, hangs_in=0), Faults()) as groups:
        _, (work, _) = start(groups)
        until(lambda: groups[0].state is state)
        threading.Timer(0.02, groups[0].abort, ["a worker failed"]).start()
        with pytest.raises(RuntimeError, match="a worker failed"):
            work.wait()


def test_an_abort_while_connecting_also_ends_the_connection_that_comes_later() -> None:
    """The communicator may not exist yet at the first abort."""
    with group_of(Faults(), Faults(hangs_connecting=True)) as (first, second):
        end = end_of(first)
        first.abort()
        assert first.settle()
        assert end.aborts == 2
        assert second.state is State.FORMING


def test_aborts_are_idempotent_in_every_state() -> None:
    with group_of(Faults()) as (group,):
        end = end_of(group)
        for _ in range(3):
            group.abort("first")
            group.abort("second")
            assert group.settle()
        assert end.aborts == 2
        with pytest.raises(RuntimeError, match="first"):
            group.allreduce([torch.ones(1)])
        assert group.close()
        group.abort()
        assert group.state is State.ABORTED


@pytest.mark.parametrize("faults", [Faults(hangs_in=0, hangs_aborting=True), Faults(hangs_in=0, fails_aborting=True)])
def test_a_wait_ends_although_the_abort_hangs_and_the_group_says_so(faults: Faults) -> None:
    with group_of(faults, timeout_s=TIMEOUT_S, failure_s=FAILURE_S) as (group,):
        until(lambda: group.state is State.READY)
        work = group.allreduce([torch.ones(1)])
        with pytest.raises(RuntimeError, match="no result"):
            work.wait()
        assert not group.settle()
        assert not group.close()
        assert work.is_completed()


def test_a_shutdown_that_hangs_becomes_an_abort() -> None:
    with group_of(Faults(hangs_shutting_down=True), failure_s=0.5) as (group,):
        group.allreduce([torch.ones(1)]).wait()
        assert group.close()
        assert group.state is State.ABORTED


def test_an_aborted_operation_that_looks_complete_has_no_result() -> None:
    """Such an operation of NCCL ends without an error, and with half of its numbers."""
    with group_of(Faults(hangs_in=0), Faults()) as groups:
        _, (work, _) = start(groups)
        until(lambda: groups[0].state is State.READY and end_of(groups[0]).begun)
        operation = end_of(groups[0]).begun[0]
        groups[0].abort()
        assert groups[0].settle()
        assert operation.is_completed()
        operation.wait()
        with pytest.raises(RuntimeError, match="aborted"):
            work.wait()


def test_a_result_that_no_wait_has_returned_is_lost_by_an_abort() -> None:
    with group_of(Faults()) as (group,):
        work = group.allreduce([torch.ones(1)])
        until(work.is_completed)
        group.abort()
        with pytest.raises(RuntimeError, match="aborted"):
            work.wait()
        assert group.settle()
        with pytest.raises(RuntimeError, match="aborted"):
            work.wait()


def test_a_wait_raises_once_nothing_writes_to_its_tensor() -> None:
    with group_of(Faults(writes_after_abort=True), Faults()) as groups:
        tensors, (work, _) = start(groups)
        end = end_of(groups[0])
        until(lambda: groups[0].state is State.READY and end.begun)
        if not work.is_completed():
            groups[0].abort()
            with pytest.raises(RuntimeError, match="aborted"):
                work.wait()
        then = tensors[0].clone()
        assert groups[0].close()
        assert torch.equal(tensors[0], then)


# --- properties ------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Result of a wait, in the order in which things happened at its rank."""

    value: Tensor | None
    began_after_abort: bool


@dataclass
class Rank:
    """One rank's thread through generations, and what it saw."""

    number: int
    aborted: threading.Event = field(default_factory=threading.Event)
    left: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Tensors without a result, and their values when the wait raised."""
    outcomes: list[Outcome] = field(default_factory=list)

    def operate(self, group: NcclGroup, generation: int, operations: int, ahead: int) -> None:
        pending: list[tuple[Tensor, NcclWork]] = []
        for number in range(operations):
            tensor = torch.full((SIZE,), float(contribution(generation, number, self.number)))
            try:
                pending.append((tensor, group.allreduce([tensor])))
            except RuntimeError:
                break
            while len(pending) > ahead:
                self.finish(*pending.pop(0))
        for one in pending:
            self.finish(*one)

    def finish(self, tensor: Tensor, work: NcclWork) -> None:
        began_after_abort = self.aborted.is_set()
        try:
            work.wait()
        except RuntimeError:
            self.outcomes.append(Outcome(None, began_after_abort))
            self.left.append((tensor, tensor.clone()))
        else:
            self.outcomes.append(Outcome(tensor.clone(), began_after_abort))


def contribution(generation: int, number: int, rank: int) -> int:
    return 1000 * generation + 10 * number + rank + 1


FAULTS = st.one_of(
    st.just(Faults()),
    st.builds(
        Faults,
        hangs_connecting=st.booleans(),
        fails_connecting=st.booleans(),
        hangs_beginning=st.integers(-1, 2),
        hangs_in=st.integers(-1, 2),
        fails_in=st.integers(-1, 2),
        fails_late_in=st.integers(-1, 2),
        writes_after_abort=st.booleans(),
    ),
)


@dataclass(frozen=True)
class Plan:
    """One generation: faults of each rank, and the moments of aborts from another thread in seconds; -1 is none."""

    faults: tuple[Faults, ...]
    aborts: tuple[float, ...]
    operations: int
    ahead: int


@st.composite
def plans(draw: st.DrawFn) -> list[Plan]:
    """Draw generations of two or three ranks."""
    ranks = draw(st.integers(2, 3))
    times = st.sampled_from([-1.0, 0.0, 0.001, 0.003, 0.01])
    return [
        Plan(
            tuple(draw(st.lists(FAULTS, min_size=ranks, max_size=ranks))),
            tuple(draw(st.lists(times, min_size=ranks, max_size=ranks))),
            draw(st.integers(1, 4)),
            draw(st.integers(0, 2)),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]


def abort_later(rank: Rank, group: NcclGroup, after_s: float) -> threading.Timer:
    def abort() -> None:
        group.abort()
        rank.aborted.set()
        group.abort()

    timer = threading.Timer(max(after_s, 0), abort)
    if after_s >= 0:
        timer.start()
    return timer


def run_generation(generation: int, plan: Plan, ranks: list[Rank], pool: ThreadPoolExecutor) -> Network:
    network = Network(len(ranks))
    groups = [NcclGroup(one, TIMEOUT_S, LONG_S) for one in network.ends(plan.faults)]
    timers = [abort_later(*one) for one in zip(ranks, groups, plan.aborts, strict=True)]
    futures = [
        pool.submit(rank.operate, group, generation, plan.operations, plan.ahead)
        for rank, group in zip(ranks, groups, strict=True)
    ]
    for future in futures:
        future.result(LONG_S)  # no wait is without a limit
    for timer, after_s in zip(timers, plan.aborts, strict=True):
        if after_s >= 0:
            timer.join(LONG_S)
    assert [group.close() for group in groups] == [True] * len(groups)
    for rank in ranks:
        rank.aborted.clear()
    return network


@given(plans())
def test_waits_end_with_whole_results_of_their_generation_or_none(drawn: list[Plan]) -> None:
    ranks = [Rank(number) for number in range(len(drawn[0].faults))]
    networks = []
    with ThreadPoolExecutor(len(ranks)) as pool:
        for generation, plan in enumerate(drawn, 1):
            for rank in ranks:
                rank.outcomes.clear()
            networks.append(run_generation(generation, plan, ranks, pool))
            check_results(generation, ranks)
    for network in networks:
        network.stopped.set()
    for rank in ranks:
        assert all(torch.equal(tensor, then) for tensor, then in rank.left), "a tensor was written to after its wait"


def check_results(generation: int, ranks: list[Rank]) -> None:
    for rank in ranks:
        for number, outcome in enumerate(rank.outcomes):
            if outcome.value is not None:
                assert not outcome.began_after_abort, "a wait has returned after an abort"
                expected = sum(contribution(generation, number, one) for one in range(len(ranks)))
                assert torch.equal(outcome.value, torch.full((SIZE,), float(expected))), (generation, number, outcome)


@given(plans())
def test_generations_without_a_fault_have_all_results(drawn: list[Plan]) -> None:
    ranks = [Rank(number) for number in range(len(drawn[0].faults))]
    with ThreadPoolExecutor(len(ranks)) as pool:
        for generation, plan in enumerate(drawn, 1):
            for rank in ranks:
                rank.outcomes.clear()
            healthy = replace(plan, faults=(Faults(),) * len(ranks), aborts=(-1.0,) * len(ranks))
            network = Network(len(ranks))
            groups = [NcclGroup(one, LONG_S, LONG_S) for one in network.ends(healthy.faults)]
            for future in [
                pool.submit(rank.operate, group, generation, plan.operations, plan.ahead)
                for rank, group in zip(ranks, groups, strict=True)
            ]:
                future.result(LONG_S)
            assert [one.close() for one in groups] == [True] * len(groups)
            check_results(generation, ranks)
            assert all(one.value is not None for rank in ranks for one in rank.outcomes)
