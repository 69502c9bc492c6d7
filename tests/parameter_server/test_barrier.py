"""Collective operations at a server: the result does not depend on the order of the contributions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.collective_ops import AllGather, AllReduceMean, Answer, CollectiveOp, answer
from stretto.parameter_server.barrier import KeyedBarrier, MemberResult


def over(combine: Callable[[Sequence[Any]], Any]) -> Callable[[Mapping[int, Any]], Any]:
    """Combine any set of contributions."""
    return lambda laid: combine(list(laid.values()))


def contributions(workers: int, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return contributions to a mean weighted by samples, and this mean in double precision."""
    rng = random.Random(seed)
    values = [torch.tensor([rng.gauss(0, 10 ** rng.randrange(-3, 4)) for _ in range(7)]) for _ in range(workers)]
    samples = [rng.randrange(1, 50) for _ in range(workers)]
    mean = sum(n * one.double() for n, one in zip(samples, values, strict=True)) / sum(samples)
    assert isinstance(mean, torch.Tensor)
    return [one * (n / sum(samples)) for n, one in zip(samples, values, strict=True)], mean


@given(st.integers(1, 6), st.integers(0, 1000), st.randoms())
@settings(max_examples=examples(60))
def test_the_weighted_mean_is_bitwise_equal_in_any_order(workers: int, seed: int, shuffle: random.Random) -> None:
    given_, mean = contributions(workers, seed)
    found: list[torch.Tensor] = []
    for _ in range(3):
        meeting: KeyedBarrier[CollectiveOp, Answer] = KeyedBarrier(range(workers), over(answer))
        said = list(range(workers)) + [shuffle.randrange(workers) for _ in range(3)]
        shuffle.shuffle(said)
        told = [one for worker in said for one in meeting.contribute(worker, 1, AllReduceMean(given_[worker].clone()))]
        assert [one.worker for one in told] == list(range(workers))
        found += [one.result for one in told if isinstance(one.result, torch.Tensor)]
    assert len(found) == 3 * workers
    assert all(torch.equal(one, found[0]) for one in found)
    torch.testing.assert_close(found[0].double(), mean, rtol=1e-5, atol=1e-4)


@given(st.integers(1, 5), st.permutations(range(5)))
@settings(max_examples=examples(40))
def test_gathered_messages_are_in_the_order_of_the_workers(workers: int, order: Sequence[int]) -> None:
    meeting: KeyedBarrier[CollectiveOp, Answer] = KeyedBarrier(range(workers), over(answer))
    here = [worker for worker in order if worker < workers]
    told = [one for worker in here for one in meeting.contribute(worker, 3, AllGather(torch.arange(worker + 1)))]
    assert len(told) == workers
    for one in told:
        assert isinstance(one.result, list)
        assert [message.tolist() for message in one.result] == [list(range(worker + 1)) for worker in range(workers)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=60), st.integers(0, 60), st.integers(0, 3))
@settings(max_examples=examples(80))
def test_each_operation_is_replied_to_once_per_worker_in_any_order(
    laid: list[tuple[int, int]], dies: int, victim: int
) -> None:
    """Concurrent operations, repeated contributions and a failure: each contributor gets one reply, or waits."""
    meeting: KeyedBarrier[int, int] = KeyedBarrier(range(4), over(sum))
    told: list[MemberResult[int]] = []
    first: dict[tuple[int, int], int] = {}
    for at, (worker, op) in enumerate(laid):
        if at == dies:
            told += meeting.leave(victim)
        if at < dies or worker != victim:
            first.setdefault((worker, op), at)
        told += meeting.contribute(worker, op, at)
    if dies >= len(laid):
        told += meeting.leave(victim)
    assert len({(one.worker, one.op) for one in told}) == len(told)
    for op in range(1, 5):
        here = {worker for worker, of in first if of == op}
        answers = {one.worker: one for one in told if one.op == op}
        if len(here) == 4:
            total = sum(first[worker, op] for worker in range(4))
            assert {worker: one.result for worker, one in answers.items()} == dict.fromkeys(range(4), total)
        elif victim in here:
            assert answers == {}
        else:
            assert set(answers) == here
            for one in answers.values():
                assert one.result is None
                assert one.problem == f"worker {victim} left (exchange {op})"


def test_all_workers_that_left_are_named() -> None:
    meeting: KeyedBarrier[int, int] = KeyedBarrier(range(4), over(sum))
    meeting.leave(3)
    meeting.leave(1)
    (told,) = meeting.contribute(0, 1, 5)
    assert told == MemberResult(0, 1, None, "worker 1, 3 left (exchange 1)")


def test_a_worker_is_notified_once_that_another_left() -> None:
    meeting: KeyedBarrier[int, int] = KeyedBarrier(range(3), lambda laid: sum(laid.values()))
    assert meeting.contribute(0, 1, 10) == []
    assert [(one.worker, one.result) for one in meeting.leave(1)] == [(0, None)]
    assert [(one.worker, one.result) for one in meeting.contribute(2, 1, 20)] == [(2, None)]
    assert meeting.remove(1) == []


def test_different_operations_are_refused_to_all_and_the_next_one_succeeds() -> None:
    meeting: KeyedBarrier[CollectiveOp, Answer] = KeyedBarrier(range(2), over(answer))
    asks = [
        (AllReduceMean(torch.ones(2)), AllGather(torch.ones(2)), "submit different operations"),
        (AllReduceMean(torch.ones(2)), AllReduceMean(torch.ones(3)), "differ in shape"),
        (AllReduceMean(torch.ones(2)), AllReduceMean(torch.ones(2).double()), "submit different operations"),
    ]
    for op, (one, other, problem) in enumerate(asks):
        meeting.contribute(0, op, one)
        told = meeting.contribute(1, op, other)
        assert [each.worker for each in told] == [0, 1]
        assert all(each.result is None and problem in each.problem for each in told)
    meeting.contribute(0, 9, AllReduceMean(torch.ones(2)))
    assert torch.equal(meeting.contribute(1, 9, AllReduceMean(torch.ones(2)))[0].result, 2 * torch.ones(2))  # type: ignore[arg-type]


def test_a_programming_error_is_raised() -> None:
    def broken(things: Sequence[int]) -> int:
        raise KeyError("a mistake")

    meeting: KeyedBarrier[int, int] = KeyedBarrier(range(1), over(broken))
    with pytest.raises(KeyError, match="a mistake"):
        meeting.contribute(0, 1, 1)


def test_the_first_of_two_contributions_counts() -> None:
    meeting: KeyedBarrier[int, int] = KeyedBarrier(range(2), over(sum))
    assert [meeting.contribute(0, 1, thing) for thing in (5, 7)] == [[], []]
    assert [one.result for one in meeting.contribute(1, 1, 6)] == [11, 11]


def test_a_contribution_of_an_unknown_worker_is_refused() -> None:
    meeting: KeyedBarrier[int, int] = KeyedBarrier(range(2), over(sum))
    meeting.contribute(0, 1, 5)
    for nobody, op in itertools.product((-1, 2, 99), (1, 2)):
        assert meeting.contribute(nobody, op, 100) == []
    assert [one.result for one in meeting.contribute(1, 1, 6)] == [11, 11]


def test_finished_operations_take_no_memory() -> None:
    """Late duplicates of recent operations are recognised; a million operations take no more memory than a thousand."""
    meeting: KeyedBarrier[int, int] = KeyedBarrier(range(1), over(sum))
    for op in range(5000):
        assert meeting.contribute(0, op, op)[0].result == op
        assert meeting.contribute(0, op, op) == []
    assert meeting.contribute(0, 4200, 0) == []
    kept = [value for value in vars(meeting).values() if isinstance(value, set | dict)]
    assert sum(map(len, kept)) < 1100
