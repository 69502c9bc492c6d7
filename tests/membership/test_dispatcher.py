"""Batches dispatched one by one: each sample counts once in an epoch; workers are called to each barrier once."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from stretto.data.dispatcher import BatchDispatcher, DispatchReply
from stretto.data.leases import Audit, Lease, PlanName, audit

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=25)


class Passes(RuleBasedStateMachine):
    """Workers lease, settle (twice), request late and fail, over several epochs."""

    @initialize(workers=st.integers(1, 4), sizes=SIZES, meet=st.none() | st.integers(1, 6))
    def begin(self, workers: int, sizes: list[int], meet: int | None) -> None:
        self.dispatcher, self.live, self.meet = BatchDispatcher(workers), set(range(workers)), meet
        self.number = self.handed = 0
        self.meetings = dict.fromkeys(range(workers), 0)
        self._begin(sizes)

    def _begin(self, sizes: list[int]) -> None:
        self.number += 1
        self.sizes, self.free = sizes, set(range(len(sizes)))
        self.held: dict[int, list[int]] = {worker: [] for worker in self.meetings}
        self.settled: list[tuple[int, int]] = []
        for _ in range(2):
            self.dispatcher.begin(self.number, sizes, self.meet)

    @property
    def out(self) -> int:
        """Return the number of leased samples."""
        return sum(self.sizes) - sum(self.sizes[batch] for batch in self.free)

    @rule(worker=st.integers(0, 3))
    def lease(self, worker: int) -> None:
        if worker not in self.live:
            return
        due = self.handed // self.meet if self.meet else 0
        told = self.dispatcher.lease(worker, self.number)
        if self.meetings[worker] < due:
            assert told == DispatchReply(None, self.out, barrier=True)
            self.meetings[worker] += 1
        elif not self.free:
            assert told == DispatchReply(None, self.out)
        else:
            self._take(worker, told)

    def _take(self, worker: int, told: DispatchReply) -> None:
        assert told.lease is not None
        assert not told.barrier
        lease = told.lease
        assert (lease.worker, lease.batch) == (worker, min(self.free))
        assert (lease.start, lease.samples) == (sum(self.sizes[: lease.batch]), self.sizes[lease.batch])
        self.free.remove(lease.batch)
        self.held[worker].append(lease.batch)
        self.handed += 1
        assert told.samples == self.out

    @rule(worker=st.integers(0, 3), count=st.integers(0, 4))
    def settle(self, worker: int, count: int) -> None:
        """Settle some of its leases, settled batches again, and batches that were never leased."""
        if worker in self.live:
            now, self.held[worker] = self.held[worker][:count], self.held[worker][count:]
            old = [batch for _, batch in self.settled]
            assert self.dispatcher.settle(worker, self.number, [*now, *now, *old, len(self.sizes), -1]) == len(now)
            self.settled += [(worker, batch) for batch in now]

    @rule(worker=st.integers(0, 3), other=st.integers(0, 3))
    def settle_what_is_anothers(self, worker: int, other: int) -> None:
        if worker != other and self.held.get(other):
            assert self.dispatcher.settle(worker, self.number, self.held[other]) == 0

    @rule(worker=st.integers(0, 3), number=st.integers(-1, 9))
    def ask_of_another_pass(self, worker: int, number: int) -> None:
        if number != self.number:
            assert self.dispatcher.lease(worker, number) == DispatchReply(None, self.out)
            assert self.dispatcher.settle(worker, number, range(len(self.sizes))) == 0

    @rule(worker=st.integers(0, 3))
    def die(self, worker: int) -> None:
        if worker in self.live and len(self.live) > 1:
            back = self.held[worker]
            assert self.dispatcher.remove(worker) == sum(self.sizes[batch] for batch in back)
            assert self.dispatcher.settle(worker, self.number, back) == 0
            self.live.remove(worker)
            self.free |= set(back)
            self.held[worker] = []

    @rule(sizes=SIZES)
    def next_pass(self, sizes: list[int]) -> None:
        self._end()
        self._begin(sizes)

    @invariant()
    def what_counts_is_what_was_settled(self) -> None:
        if hasattr(self, "dispatcher"):
            batches = {batch for _, batch in self.settled}
            once = sum(self.sizes[batch] for batch in batches)
            missing = sum(self.sizes) - once
            assert audit([self.dispatcher.ledger.counts()]) == Audit(once=once, twice=0, never=missing)

    def _end(self) -> None:
        """Let all running workers train until no batch is left."""
        for _ in range(2 * len(self.sizes) + self.handed + 1):
            for worker in sorted(self.live):
                self.lease(worker)
                self.settle(worker, 4)
        assert not self.free
        if self.meet:
            assert {self.meetings[worker] for worker in self.live} == {self.handed // self.meet}
        assert audit([self.dispatcher.ledger.counts()]) == Audit(once=sum(self.sizes), twice=0, never=0)

    def teardown(self) -> None:
        if hasattr(self, "dispatcher"):
            for worker in self.live:
                self.settle(worker, len(self.sizes))
            self._end()


def test_every_sample_counts_once_in_any_order() -> None:
    run_state_machine_as_test(Passes, settings=settings(max_examples=examples(240), stateful_step_count=40))


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 10))
@settings(max_examples=examples(50))
def test_no_worker_gets_a_batch_after_a_barrier_it_was_not_called_to(workers: int, batches: int, meet: int) -> None:
    dispatcher = BatchDispatcher(workers)
    dispatcher.begin(1, [1] * batches, meet)
    got = 0
    told = [0] * workers
    worker = 0
    for _ in range(4 * (batches + workers * (batches // meet + 1))):
        handed = dispatcher.lease(worker, 1)
        if handed.barrier:
            told[worker] += 1
            assert handed.lease is None
        elif handed.lease:
            assert told[worker] == got // meet
            got += 1
        worker = (worker * 3 + 1 + got) % workers if got % 2 else (worker + 1) % workers
    for worker in range(workers):
        while dispatcher.lease(worker, 1).barrier:
            told[worker] += 1
    assert got == batches
    assert told == [batches // meet] * workers


def test_a_faster_worker_gets_more_batches() -> None:
    dispatcher = BatchDispatcher(2)
    dispatcher.begin(1, [2] * 12)
    counts = [0, 0]
    for turn in range(12):
        lease = dispatcher.lease(int(turn % 4 == 0), 1).lease
        assert lease is not None
        counts[lease.worker] += lease.samples
    assert counts == [18, 6]
    assert dispatcher.lease(0, 1) == DispatchReply(None, 24)


def test_beginning_an_epoch_again_or_late_changes_nothing() -> None:
    dispatcher = BatchDispatcher(2)
    assert dispatcher.lease(0, 1) == DispatchReply(None, 0)
    dispatcher.begin(2, [1, 2])
    first = dispatcher.lease(0, 2)
    for number in (2, 1, 0, -1):
        dispatcher.begin(number, [7])
    assert first.lease is not None
    assert dispatcher.lease(1, 2).samples == 3
    assert dispatcher.settle(0, 2, [first.lease.batch]) == 1


@given(SIZES, st.sets(st.integers(0, 24)), st.integers(1, 3), st.sampled_from(["first-come", "in-turn", "one-each"]))
@settings(max_examples=examples(40))
def test_an_epoch_begun_before_continues(sizes: list[int], some: set[int], workers: int, plan: PlanName) -> None:
    """Only unsettled batches are leased; a rollback to before the epoch leads to the state in which it was begun."""
    done = sorted(batch for batch in some if batch < len(sizes))
    before = sum(sizes[batch] for batch in done)
    dispatcher = BatchDispatcher(workers)
    earlier = dispatcher.settled_batches()
    dispatcher.begin(4, sizes, None, plan, done)
    for _ in range(2):
        found = []
        while (handed := first_lease(dispatcher, workers)) is not None:
            assert handed.lease is not None
            found.append(handed.lease.batch)
            assert handed.samples == before + sum(sizes[batch] for batch in found)
            dispatcher.settle(handed.lease.worker, 4, [handed.lease.batch])
        assert sorted([*found, *done]) == list(range(len(sizes)))
        assert audit([dispatcher.ledger.counts()]) == Audit(sum(sizes), 0, 0)
        dispatcher.roll_back(*earlier)


def first_lease(dispatcher: BatchDispatcher, workers: int) -> DispatchReply | None:
    """Return the reply to the first worker for which there is a batch in epoch 4."""
    replies = (dispatcher.lease(worker, 4) for worker in range(workers))
    return next((reply for reply in replies if reply.lease is not None), None)


@given(SIZES, st.integers(1, 4), st.integers(0, 24))
@settings(max_examples=examples(40))
def test_each_worker_has_one_batch_for_sure_though_another_asks_first(
    sizes: list[int], workers: int, done: int
) -> None:
    dispatcher = BatchDispatcher(workers)
    dispatcher.begin(1, sizes, None, "one-each", list(range(min(done, len(sizes)))))
    left = max(len(sizes) - done, 0)
    taken = 0
    while dispatcher.lease(0, 1).lease is not None:
        taken += 1
    each = [dispatcher.lease(worker, 1).lease is not None for worker in range(1, workers)]
    assert each == [worker < left for worker in range(1, workers)]
    assert taken + sum(each) == left


@given(SIZES, st.integers(1, 4), st.randoms())
@settings(max_examples=examples(40))
def test_assigned_batches_go_to_the_workers_in_turn_in_any_order_of_requests(
    sizes: list[int], workers: int, shuffle: random.Random
) -> None:
    dispatcher = BatchDispatcher(workers)
    dispatcher.begin(1, sizes, plan="in-turn")
    got: dict[int, list[int]] = {worker: [] for worker in range(workers)}
    asking = [worker for worker in range(workers) for _ in range(len(sizes) + 1)]
    shuffle.shuffle(asking)
    for worker in asking:
        if lease := dispatcher.lease(worker, 1).lease:
            got[worker].append(lease.batch)
            assert dispatcher.settle(worker, 1, [lease.batch]) == 1
    assert got == {worker: list(range(worker, len(sizes), workers)) for worker in range(workers)}
    assert audit([dispatcher.ledger.counts()]) == Audit(once=sum(sizes), twice=0, never=0)


def test_a_worker_that_joins_after_all_left_the_epoch_gets_no_batch_of_it() -> None:
    dispatcher = BatchDispatcher(2)
    dispatcher.begin(1, [2, 2, 2])
    assert dispatcher.lease(0, 1).lease is not None
    dispatcher.remove(1)
    dispatcher.settle(0, 1, [0])
    dispatcher.await_end(0, 1, left_early=True)
    assert dispatcher.pop_released() == {0: True}
    dispatcher.join(1, 0)
    assert dispatcher.lease(1, 1) == DispatchReply(None, 2)
    dispatcher.await_end(1, 1)
    assert dispatcher.pop_released() == {1: True}


def test_a_worker_that_joins_a_finished_epoch_gets_the_returned_batches() -> None:
    dispatcher = BatchDispatcher(2)
    dispatcher.begin(1, [2, 2])
    dispatcher.remove(1)
    before = dispatcher.settled_batches()
    for batch in range(2):
        assert dispatcher.lease(0, 1).lease is not None
        dispatcher.settle(0, 1, [batch])
    dispatcher.await_end(0, 1)
    assert dispatcher.pop_released() == {0: True}
    dispatcher.join(1, 0)
    dispatcher.roll_back(*before)
    dispatcher.remove(0)
    assert dispatcher.lease(1, 1).lease is not None


def test_a_batch_of_a_worker_that_left_the_epoch_is_leased_and_counted_again() -> None:
    dispatcher = BatchDispatcher(2)
    dispatcher.begin(1, [2, 3])
    assert [dispatcher.lease(worker, 1).samples for worker in range(2)] == [2, 5]
    dispatcher.await_end(0, 1, left_early=True)
    assert dispatcher.lease(1, 1) == DispatchReply(Lease(0, 1, 0, 2), 5)


def test_batches_that_a_worker_holds_at_the_end_count_if_it_trains_them_with_one_that_was_returned() -> None:
    """A worker accumulates the first of two batches when it comes to the end; then another worker fails."""
    dispatcher = BatchDispatcher(3)
    dispatcher.begin(1, [8] * 3)
    held, lost, other = (dispatcher.lease(worker, 1).lease for worker in (0, 1, 2))
    assert held is not None and lost is not None and other is not None
    dispatcher.settle(2, 1, [other.batch])
    for worker in (0, 2):
        dispatcher.await_end(worker, 1)
    assert dispatcher.pop_released() == {}
    dispatcher.remove(1)
    assert dispatcher.pop_released() == {0: False, 2: False}
    assert dispatcher.lease(0, 1).lease is not None
    assert dispatcher.settle(0, 1, [held.batch, lost.batch]) == 2
    assert dispatcher.ledger.counts().tolist() == [1] * 24


def test_batches_that_a_worker_holds_at_the_end_of_an_epoch_never_count_after_it() -> None:
    dispatcher = BatchDispatcher(2)
    dispatcher.begin(1, [8] * 2)
    held, other = (dispatcher.lease(worker, 1).lease for worker in (0, 1))
    assert held is not None and other is not None
    dispatcher.await_end(0, 1)
    dispatcher.settle(1, 1, [other.batch])
    dispatcher.await_end(1, 1)
    assert dispatcher.pop_released() == {0: True, 1: True}
    assert dispatcher.settle(0, 1, [held.batch]) == 0


def test_no_worker_is_called_to_a_snapshot_of_an_epoch_it_has_left() -> None:
    dispatcher = BatchDispatcher(1)
    dispatcher.begin(1, [2, 2])
    dispatcher.await_end(0, 1, left_early=True)
    dispatcher.announce_snapshot_barrier(0)
    assert not dispatcher.barriers_announced


EVENTS = st.lists(
    st.tuples(st.sampled_from(["lease", "settle", "fail", "end", "snapshot", "roll back"]), st.integers(0, 3))
)


@settings(max_examples=examples(200))
@given(EVENTS, st.integers(0, 40))
def test_each_piece_of_a_stream_counts_once_whatever_fails(events: list[tuple[str, int]], length: int) -> None:
    """The last worker trains all pieces that the server has not; a worker that has failed joins again when it asks."""
    dispatcher, held, trained = BatchDispatcher(4), defaultdict[int, list[int]](list), Counter[int]()
    dispatcher.begin(1, (), plan="stream")
    snapshot = dispatcher.settled_batches(), Counter[int]()

    def lease(worker: int) -> bool:
        if worker not in dispatcher.members:
            dispatcher.join(worker, 0)
        held[worker] += (pieces := dispatcher.lease_pieces(worker, 1))
        missing = [piece for piece in held[worker] if piece >= length]
        if missing:
            held[worker] = [piece for piece in held[worker] if piece < length]
            held[worker] += (pieces := dispatcher.lease_pieces(worker, 1, end=missing[0]))
            assert all(piece < length for piece in pieces)
        return bool(pieces)

    for event, worker in [*events, *((event, 0) for event in ["lease", "settle"] * (2 * length + 60))]:
        if event == "lease":
            lease(worker)
        elif event == "settle":
            pieces, held[worker] = held[worker], []
            assert dispatcher.settle(worker, 1, pieces, [5] * len(pieces)) == len(pieces)
            assert dispatcher.settle(worker, 1, pieces, [5] * len(pieces)) == 0
            trained.update(pieces)
        elif event == "fail":
            dispatcher.remove(worker)
            held.pop(worker, None)
        elif event == "snapshot":
            snapshot = dispatcher.settled_batches(), trained.copy()
        elif event == "roll back":
            (number, settled, trained_by, stream), trained = snapshot[0], snapshot[1].copy()
            dispatcher.roll_back(number, settled, trained_by, stream)
            held.clear()
        else:
            restored = BatchDispatcher(0)
            restored.load_state(dispatcher.state())
            assert restored.state() == dispatcher.state()
            dispatcher = restored
    for worker in (1, 2, 3):
        dispatcher.remove(worker)
    while lease(0):
        pass
    dispatcher.settle(0, 1, held[0], [5] * len(held[0]))
    trained.update(held[0])
    assert trained == dict.fromkeys(range(length), 1)
    assert dispatcher.stream is not None
    assert sum(dispatcher.stream.samples_by_worker().values()) == 5 * length


def test_workers_lease_few_pieces_of_a_stream_at_its_beginning_and_never_more_than_eight() -> None:
    dispatcher = BatchDispatcher(2)
    dispatcher.begin(1, (), plan="stream")
    counts = [len(dispatcher.lease_pieces(number % 2, 1)) for number in range(100)]
    assert counts[:16] == [1] * 16
    assert counts[-1] == 8


def test_own_shards_of_a_stream_count_by_worker() -> None:
    dispatcher = BatchDispatcher(2)
    dispatcher.begin(1, (), plan="own stream")
    assert [dispatcher.settle(worker, 1, [0, 1], [3, 4]) for worker in (0, 1, 1)] == [2, 2, 0]
    assert dispatcher.stream is not None
    assert dispatcher.stream.samples_by_worker() == {0: 7, 1: 7}


def test_pieces_of_an_iterator_that_an_epoch_leaves_are_those_of_the_next() -> None:
    """A rollback to the end of the epoch before returns what counts since, and the samples of this epoch."""
    dispatcher = BatchDispatcher(1)
    dispatcher.begin(1, (), plan="stream")
    assert dispatcher.lease_pieces(0, 1) == [0]
    dispatcher.settle(0, 1, [0], [2])
    assert dispatcher.lease_pieces(0, 1) == [1]
    before = dispatcher.settled_batches()
    dispatcher.begin(2, (), plan="same stream")
    dispatcher.settle(0, 2, [1], [3])
    assert dispatcher.stream is not None
    assert dispatcher.stream.samples_by_worker() == {0: 3}
    dispatcher.roll_back(*before)
    assert dispatcher.stream.samples_by_worker() == {}
    assert dispatcher.lease_pieces(0, 2) == [1]
