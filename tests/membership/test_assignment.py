"""Batch assignment under failing, leaving and joining workers: all agree, and every sample counts exactly once."""

from __future__ import annotations

import copy
import tracemalloc
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from stretto.data.assignment import BatchAssignment, Ranges, RankBatch, Rule, bounds_of, step_bounds
from stretto.data.shares import SMALLEST_SHARE, Pace, Paces, of_members, step_s

RULES: list[Rule] = ["whole", "shares"]
SIZES = st.one_of(
    st.builds(lambda size, full, last: [size] * full + [last] * (last < size), *[st.integers(1, 9)] * 3),
    st.builds(lambda full, last: [4] * full + [last], st.integers(8, 24), st.integers(1, 4)),
    st.lists(st.integers(1, 9), min_size=1, max_size=24),
)


PACES = st.dictionaries(
    st.integers(0, 5), st.tuples(st.sampled_from([0.0, 1.0, 7.0]), st.sampled_from([0.2, 1.0, 5.0]))
)


def least_step_s(samples: int, paces: tuple[Pace, ...]) -> float:
    """Return the least time of a step: one sample after the other goes to the worker that has done it first."""
    sizes = [SMALLEST_SHARE] * len(paces)
    for _ in range(samples - sum(sizes)):
        ends = [fixed + each * (size + 1) for size, (fixed, each) in zip(sizes, paces, strict=True)]
        sizes[ends.index(min(ends))] += 1
    return step_s(sizes, paces)


def positions(ranges: Iterable[tuple[int, int]]) -> list[int]:
    return [at for start, stop in ranges for at in range(start, stop)]


def travelled(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as loaded from a checkpoint or received from another worker."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state))


def hands(deal: BatchAssignment, me: int) -> Iterator[RankBatch]:
    return iter(lambda: deal.next(me), None)


class Life(NamedTuple):
    """A worker, and the global step after which it joined."""

    worker: int
    came: int


class Change(NamedTuple):
    members: list[int]
    after: int
    committed: int


class Move(NamedTuple):
    """Paces that apply after a global step."""

    paces: Paces
    after: int


class Saved(NamedTuple):
    """A saved state, its members, the number of changes and moves before it, and the batches assigned until then."""

    state: dict[str, Any]
    members: list[int]
    changes: int
    moves: int
    table: dict[int, dict[Life, Ranges]]


class Seat:
    """A running worker: its assignment, its first global step, its committed global steps, and its expectations."""

    def __init__(self, life: Life, deal: BatchAssignment, begun: int, known: int) -> None:
        self.life, self.deal, self.begun, self.known = life, deal, begun, known
        self.expected: list[Ranges] | None = None


class Crew(RuleBasedStateMachine):
    """Workers with one assignment each; `table` holds the assigned samples that all remaining workers must agree on."""

    how: Rule

    @initialize(sizes=SIZES, workers=st.integers(1, 4), others=st.integers(0, 2), paces=PACES)
    def begin(self, sizes: list[int], workers: int, others: int, paces: Paces) -> None:
        self.sizes, self.base = sizes, workers + others
        self.bounds = bounds_of(sizes)
        self.batches = {(start, stop) for start, stop in zip(self.bounds, self.bounds[1:], strict=False)}
        members = list(range(workers))
        self.seats = {
            one: Seat(Life(one, 0), BatchAssignment(sizes, members, self.how, self.base, self.bounds, paces), 0, 0)
            for one in members
        }
        self.table: dict[int, dict[Life, Ranges]] = {}
        self.firsts: dict[int, Ranges] = {}
        self.changes: list[Change | Move] = []
        self.moves = [Move(paces, 0)]
        self.given_back = False
        self.saved = Saved(travelled(self.seats[0].deal.state()), members, 0, 1, {})

    @property
    def committed(self) -> int:
        return max(seat.known for seat in self.seats.values())

    @property
    def furthest(self) -> int:
        return max(seat.deal.global_step for seat in self.seats.values())

    @property
    def front(self) -> int:
        """Return the global step up to which the assignment is fixed, even if workers that reached it have failed."""
        return max([self.furthest, *(change.after for change in self.changes if isinstance(change, Change))])

    def some(self, data: st.DataObject) -> Seat:
        return self.seats[data.draw(st.sampled_from(sorted(self.seats)))]

    def is_level(self) -> bool:
        """True if all workers have been assigned, and know as committed, the same global steps."""
        return {(seat.deal.global_step, seat.known) for seat in self.seats.values()} == {(self.front, self.committed)}

    @rule(data=st.data(), times=st.integers(1, 3))
    def deal(self, data: st.DataObject, times: int) -> None:
        seat = self.some(data)
        for _ in range(times):
            if seat.deal.global_step - self.committed < 6:
                self.deal_one(seat)

    def deal_one(self, seat: Seat) -> bool:
        if seat.known < self.committed:
            seat.deal.commit()
            seat.known = seat.deal.global_step
        hands = {one: seat.deal.copied().next(one) for one in self.seats}
        seen: dict[int, Ranges] = {one: hand.ranges if hand is not None else () for one, hand in hands.items()}
        ahead = next(seat.deal.upcoming(seat.life.worker), None)
        portion = seat.deal.next(seat.life.worker)
        assert ahead == (portion.loaded if portion else None)
        assert (portion.ranges if portion else ()) == seen[seat.life.worker]
        if seat.expected is not None:
            assert (portion.loaded if portion else None) == next(iter(seat.expected), None)
            seat.expected = seat.expected[1:]
        if portion is None:
            assert seat.deal.global_step == self.front
            assert len(self.dealt()) == self.bounds[-1]
            return False
        number = seat.deal.global_step
        if number not in self.table:
            pieces = [seen[one] for one in sorted(self.seats)]
            self.check_shares(number, pieces) if self.how == "shares" else self.check_new(pieces)
            self.table[number] = {self.seats[one].life: seen[one] for one in self.seats}
        self.check_known(number, seat.life, seen, portion)
        return True

    def dealt(self) -> list[int]:
        return [at for hand in self.table.values() for piece in hand.values() for at in positions(piece)]

    def check_new(self, pieces: list[Ranges]) -> None:
        """Check that a global step follows the rule and consists of the lowest unassigned positions."""
        sizes = [len(positions(piece)) for piece in pieces]
        free = sorted(set(range(self.bounds[-1])).difference(self.dealt()))
        assert sorted(at for piece in pieces for at in positions(piece)) == free[: sum(sizes)]
        assert sum(sizes) > 0
        assert sizes == sorted(sizes, key=bool, reverse=True), "the first have the pieces"
        assert all(len(piece) <= 1 and set(piece) <= self.batches for piece in pieces)
        assert all(sizes) or sum(sizes) == len(free), "nobody is idle while there is something"

    def check_shares(self, number: int, pieces: list[Ranges]) -> None:
        """Check that a global step is a batch with its part of the returned positions, divided by the paces."""
        own = set(range(*self.bounds[number - 1 : number + 1])) if number <= len(self.sizes) else set()
        given = {at for piece in pieces for at in positions(piece)}
        before = self.bounds[min(number - 1, len(self.sizes))]
        returned = sorted(set(range(before)).difference(self.dealt()))
        extra, left = sorted(given - own), len(self.sizes) - number + 1
        assert own <= given
        assert extra == returned[: len(extra)]
        largest = max(*self.sizes, SMALLEST_SHARE)
        steps = left if left > 0 else -(-len(returned) // largest)
        spread = min(len(returned), steps * largest)
        assert spread // steps <= len(extra) <= -(-spread // steps) <= largest
        sizes = [len(positions(piece)) for piece in pieces]
        parts = min(max(sum(sizes) // SMALLEST_SHARE, 1), len(sizes))
        paces = of_members([move.paces for move in self.moves if move.after < number][-1], sorted(self.seats))
        if paces and sum(sizes) >= SMALLEST_SHARE * len(sizes):
            assert min(sizes) >= SMALLEST_SHARE
            assert step_s(sizes, paces) == pytest.approx(least_step_s(sum(sizes), paces))
            return
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[parts - 1] <= 1
        assert sizes[parts - 1] > 0 == sum(sizes[parts:])

    def check_known(self, number: int, life: Life, seen: dict[int, Ranges], portion: RankBatch) -> None:
        """Check that a repeated global step equals the recorded one; workers that joined later load nothing in it.

        All members without a part of their own load the same part.
        """
        hand = self.table[number]
        for one, seat in self.seats.items():
            assert seen[one] == hand.get(seat.life, ())
        assert portion.samples == len(positions(portion.ranges))
        assert portion.total == sum(len(positions(piece)) for piece in hand.values())
        if portion.ranges or life not in hand:
            assert portion.loaded == portion.ranges
        else:
            assert portion.loaded == self.firsts.setdefault(number, portion.loaded) != ()

    @precondition(lambda self: self.is_level() and self.front > self.committed)
    @rule(data=st.data())
    def exchange(self, data: st.DataObject) -> None:
        """Commit a global step: some workers know it immediately, others before the next step or generation."""
        for worker in data.draw(st.sets(st.sampled_from(sorted(self.seats)), min_size=1)):
            self.seats[worker].deal.commit()
            self.seats[worker].known = self.seats[worker].deal.global_step
        self.the_books_are_right()

    @rule(data=st.data())
    def change(self, data: st.DataObject) -> None:
        """Let workers fail, leave and join: with the newest state if all is committed, or with an older one."""
        gone = data.draw(st.sets(st.sampled_from(sorted(self.seats)), max_size=len(self.seats) - 1))
        absent = sorted(set(range(6)).difference(self.seats))
        new = data.draw(st.sets(st.sampled_from(absent), max_size=2) if absent else st.just(set()))
        for worker in gone:
            del self.seats[worker]
        after, told = self.front, Change(sorted({*self.seats, *new}), self.furthest, self.committed)
        saved = self.saved
        if self.is_level() and self.front == self.committed and data.draw(st.booleans()):
            state = travelled(self.some(data).deal.state())
            saved = Saved(state, told.members, len(self.changes) + 1, len(self.moves), {})
        self.take_back(after, told.committed)
        self.changes.append(told)
        for seat in self.seats.values():
            self.tell(seat, [told])
        for worker in new:
            deal = BatchAssignment.restored(saved.state, saved.members)
            self.seats[worker] = Seat(Life(worker, after), deal, deal.global_step, told.committed)
            self.tell(self.seats[worker], self.changes[saved.changes :])
        self.the_books_are_right()

    def take_back(self, after: int, committed: int) -> None:
        living = {seat.life for seat in self.seats.values()}
        self.table = {number: hand for number, hand in self.table.items() if number <= after}
        self.firsts = {number: first for number, first in self.firsts.items() if number <= after}
        for number in range(committed + 1, after + 1):
            kept = {life: piece for life, piece in self.table[number].items() if life in living}
            self.given_back |= any(positions(piece) for life, piece in self.table[number].items() if life not in kept)
            self.table[number] = kept

    def tell(self, seat: Seat, told: Sequence[Change | Move]) -> None:
        for one in told:
            if isinstance(one, Move):
                seat.deal.move(one.paces, one.after)
            else:
                seat.deal.change(one.members, one.after, one.committed)
                seat.known = one.committed
        seat.expected = None

    @precondition(lambda self: self.how == "shares" and self.is_level())
    @rule(paces=PACES, ahead=st.integers(0, 5))
    def move(self, paces: Paces, ahead: int) -> None:
        """Change the paces after what the loaders have loaded ahead; steps before are assigned as they were."""
        told = Move(paces, max(self.front + ahead, self.moves[-1].after))
        before = {one: [*islice(seat.deal.upcoming(one), ahead)] for one, seat in self.seats.items()}
        self.moves.append(told)
        self.changes.append(told)
        for seat in self.seats.values():
            self.tell(seat, [told])
        assert before == {one: [*islice(seat.deal.upcoming(one), ahead)] for one, seat in self.seats.items()}

    @precondition(lambda self: self.is_level() and self.front == self.committed)
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        state, moves = travelled(self.some(data).deal.state()), len(self.moves)
        self.saved = Saved(state, sorted(self.seats), len(self.changes), moves, copy.deepcopy(self.table))

    @rule(data=st.data(), workers=st.integers(1, 5))
    def restart(self, data: st.DataObject, workers: int) -> None:
        """Fail all workers; others resume from the saved state, without the batches assigned since."""
        if data.draw(st.integers(0, 3)):
            return
        self.table, self.firsts = copy.deepcopy(self.saved.table), {}
        hand, members = self.saved.state["global_step"], list(range(workers))
        self.seats = {
            one: Seat(Life(one, hand), BatchAssignment.restored(self.saved.state, members), hand, hand)
            for one in members
        }
        self.changes = []
        del self.moves[self.saved.moves :]
        self.saved = self.saved._replace(members=members, changes=0)

    @rule(data=st.data())
    def look_ahead(self, data: st.DataObject) -> None:
        seat = self.some(data)
        before = copy.deepcopy(vars(seat.deal))
        seat.expected = list(seat.deal.upcoming(seat.life.worker))
        assert vars(seat.deal) == before

    @invariant()
    def nothing_is_dealt_twice(self) -> None:
        assert len(set(self.dealt())) == len(self.dealt())

    def the_books_are_right(self) -> None:
        for seat in self.seats.values():
            everything = self.counts(seat, self.table_lives(), 0)
            for other in self.seats.values():
                own = self.counts(seat, {other.life}, max(seat.begun, other.life.came))
                assert np.array_equal(seat.deal.own_counts(other.life.worker), own)
                everything -= own
                ahead = range(seat.known + 1, seat.deal.global_step + 1)
                held = [self.table[number].get(other.life, ()) for number in ahead]
                assert seat.deal.uncommitted_samples(other.life.worker) == sum(len(positions(piece)) for piece in held)
            assert np.array_equal(seat.deal.counts_of_departed(), everything)

    def table_lives(self) -> set[Life]:
        return {life for hand in self.table.values() for life in hand}

    def counts(self, seat: Seat, lives: set[Life], after: int) -> NDArray[np.uint8]:
        """Return the global steps that these workers have committed after a step, as far as one worker knows."""
        found = np.zeros(self.bounds[-1], np.uint8)
        for number in range(after + 1, min(seat.known, seat.deal.global_step) + 1):
            for life in lives & self.table[number].keys():
                found[positions(self.table[number][life])] += 1
        return found

    @invariant()
    def what_is_uncommitted_is_not_saved(self) -> None:
        for seat in self.seats.values():
            if seat.deal.global_step != seat.known:
                with pytest.raises(ValueError, match="committed"):
                    seat.deal.state()

    def teardown(self) -> None:
        """Finish the epoch with the remaining workers; check that each sample counts once."""
        if not hasattr(self, "seats"):
            return
        for seat in self.seats.values():
            while self.deal_one(seat):
                pass
        for seat in self.seats.values():
            seat.deal.commit()
            seat.known = seat.deal.global_step
            assert seat.deal.global_step == self.front
        self.the_books_are_right()
        longest = min(self.seats.values(), key=lambda seat: seat.begun)
        owned = [seat.deal.own_counts(seat.life.worker) for seat in self.seats.values()]
        assert (sum(owned, longest.deal.counts_of_departed()) == 1).all()


@pytest.mark.parametrize("how", RULES)
def test_all_workers_agree_and_every_sample_counts_once_after_any_changes(how: Rule) -> None:
    machine = type("Machine", (Crew,), {"how": how})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(200), stateful_step_count=20))


@given(sizes=SIZES, workers=st.integers(1, 5))
def test_without_changes_each_of_n_workers_gets_every_nth_batch(sizes: list[int], workers: int) -> None:
    bounds = bounds_of(sizes)
    for me in range(workers):
        deal = BatchAssignment(sizes, range(workers))
        for hand, portion in enumerate(hands(deal, me)):
            dealt = sizes[hand * workers : (hand + 1) * workers]
            at = hand * workers + me
            assert portion.ranges == (((bounds[at], bounds[at + 1]),) if at < len(sizes) else ())
            assert portion.total == sum(dealt)
            assert portion.loaded == (portion.ranges or ((bounds[hand * workers], bounds[hand * workers + 1]),))
        assert deal.global_step == -(-len(sizes) // workers)


@given(st.integers(1, 400), st.integers(1, 9), st.integers(1, 6))
@settings(max_examples=examples(200))
def test_an_epoch_in_shares_has_equal_steps_that_are_divided_evenly(samples: int, batch: int, workers: int) -> None:
    """No share is larger than a batch of the script, and each has at least half of one if there are several steps."""
    bounds = step_bounds(samples, workers * batch)
    steps = [
        [one.samples for one in hands(BatchAssignment((), range(workers), "shares", bounds=bounds), me)]
        for me in range(workers)
    ]
    sizes = [sum(shares) for shares in zip(*steps, strict=True)]
    assert (sum(sizes), len(sizes)) == (samples, -(-samples // (workers * batch)))
    assert max(sizes) - min(sizes) <= 1
    for size, shares in zip(sizes, zip(*steps, strict=True), strict=True):
        parts = min(max(size // SMALLEST_SHARE, 1), workers)
        assert max(shares[:parts]) - min(shares[:parts]) <= 1
        assert max(shares) <= max(batch, SMALLEST_SHARE + 1)
        assert len(sizes) == 1 or batch < 4 or min(shares) >= batch // 2


@given(st.data(), st.integers(20, 300), st.integers(2, 8), st.integers(2, 5))
@settings(max_examples=examples(200))
def test_losses_leave_the_number_of_shared_steps_and_equal_sizes(
    data: st.DataObject, samples: int, batch: int, workers: int
) -> None:
    """Workers fail, join, and resume with other numbers; sizes differ by one sample from each change on."""
    bounds = step_bounds(samples, workers * batch)
    steps = 0
    deal = BatchAssignment((), range(workers), "shares", workers, bounds)
    plain, fits, sizes = len(bounds) - 1, True, list[int]()
    largest = max(deal.largest_step(), SMALLEST_SHARE)
    while (portion := deal.next(-1)) is not None:
        steps += 1
        sizes.append(portion.total)
        assert max(sizes) - min(sizes) <= 1
        event = data.draw(st.sampled_from(["nothing", "commit", "fail", "join", "resume"]))
        if event in ("commit", "resume"):
            deal.commit()
        if event == "resume":
            members = range(data.draw(st.integers(1, 6)))
            deal = BatchAssignment.restored(travelled(deal.state()), members)
        if event == "fail" and len(deal.members) > 1:
            gone = data.draw(st.sampled_from(deal.members))
            deal.change([one for one in deal.members if one != gone], steps, deal.committed)
            sizes = []
        if event == "join":
            deal.change(sorted({*deal.members, data.draw(st.integers(0, 9))}), steps, deal.committed)
        returned = sum(stop - start for start, stop in deal.returned_ranges())
        fits = fits and returned <= (plain - steps) * largest
        if not fits:
            sizes = []
    assert steps == plain if fits else steps > plain


def test_returned_samples_are_spread_over_the_remaining_steps() -> None:
    """46 samples in four steps of three workers; worker 2 fails when the first step is committed."""
    deal = BatchAssignment((), range(3), "shares", bounds=step_bounds(46, 12))
    deal.next(0)
    deal.commit()
    assert deal.next(2) == RankBatch(((20, 24),), 4, 12, ((20, 24),))
    deal.change([0, 1], after=2, committed=1)
    assert deal.remaining() == ((20, 24), (24, 28), (28, 32), (32, 35), (35, 39), (39, 43), (43, 46))
    assert deal.next(0) == RankBatch(((20, 22), (24, 29)), 7, 13, ((20, 22), (24, 29)))
    assert deal.next(1) == RankBatch(((40, 46),), 6, 13, ((40, 46),))
    assert deal.next(0) is None


def test_a_limit_holds_from_the_step_after_its_change() -> None:
    """48 samples in four steps of two workers; worker 1 has run out of memory, and returns at the third step."""
    deal = BatchAssignment((), range(2), "shares", bounds=step_bounds(48, 12))
    deal.next(0)
    deal.commit()
    deal.change([0], after=2, committed=1, limits={1: 3})
    deal.change([0, 1], after=2, committed=1)
    sizes = [[portion.samples for portion in hands(deal.copied(), me)] for me in (0, 1)]
    assert sizes == [[6, 12, 12], [0, 3, 3]]


def test_shares_returned_in_the_last_step_make_one_more() -> None:
    deal = BatchAssignment((), range(3), "shares", bounds=step_bounds(46, 12))
    while deal.global_step < 4:
        deal.commit()
        deal.next(0)
    deal.change([0, 1], after=4, committed=3)
    assert deal.next(0) == RankBatch(((43, 46),), 3, 3, ((43, 46),))
    assert deal.next(0) is None


@given(st.data(), st.integers(20, 300), st.integers(2, 8), st.integers(1, 5))
@settings(max_examples=examples(200))
def test_where_each_worker_keeps_its_batch_the_rest_is_divided_by_the_workers_of_now(
    data: st.DataObject, samples: int, batch: int, workers: int
) -> None:
    """After each failure, join or resume all that is left has the fewest steps without a share above a batch."""
    deal = BatchAssignment((), range(workers), "shares", workers, step_bounds(samples, workers * batch), share=batch)
    left, steps, sizes = samples, -(-samples // (workers * batch)), list[int]()
    while True:
        shares = [portion.samples if (portion := deal.copied().next(one)) is not None else 0 for one in deal.members]
        if (portion := deal.next(deal.members[0])) is None:
            break
        assert sum(shares) == portion.total
        assert max(shares) <= max(batch, SMALLEST_SHARE + 1)
        sizes, left, steps = [*sizes, portion.total], left - portion.total, steps - 1
        assert max(sizes) - min(sizes) <= 1
        event = data.draw(st.sampled_from(["nothing", "commit", "fail", "join", "resume"]))
        if event in ("commit", "resume"):
            deal.commit()
        before, number = deal.members, deal.global_step
        if event == "resume":
            members = range(data.draw(st.integers(1, 6)))
            deal = BatchAssignment.restored(travelled(deal.state()), members, batch)
        if event == "fail" and len(deal.members) > 1:
            gone = data.draw(st.sampled_from(deal.members))
            left += deal.uncommitted_samples(gone)
            deal.change([one for one in deal.members if one != gone], number, deal.committed)
        if event == "join":
            deal.change(sorted({*deal.members, data.draw(st.integers(0, 9))}), number, deal.committed)
        if len(deal.members) != len(before):
            steps, sizes = -(-left // (batch * len(deal.members))), []
    assert (left, steps) == (0, 0)


@given(
    st.data(),
    st.integers(20, 300),
    st.integers(2, 8),
    st.integers(1, 5),
    st.booleans(),
    st.dictionaries(st.integers(0, 6), st.integers(3, 12)),
)
@settings(max_examples=examples(200))
def test_no_share_is_above_the_limit_of_its_worker(
    data: st.DataObject, samples: int, batch: int, workers: int, keeps_share: bool, limits: dict[int, int]
) -> None:
    """Each sample is trained once, and a step is no larger than the others have room for."""
    share = batch if keeps_share else None
    deal = BatchAssignment(
        (), range(workers), "shares", workers, step_bounds(samples, workers * batch), None, share, limits
    )
    seen = list[int]()
    while True:
        portions = {one: deal.copied().next(one) for one in deal.members}
        if deal.next(-1) is None:
            break
        for one, portion in portions.items():
            assert portion is not None
            assert portion.samples <= limits.get(one, samples)
            seen += positions(portion.ranges)
        event, number = data.draw(st.sampled_from(["nothing", "move", "fail", "join", "resume"])), deal.global_step
        if event != "fail":
            deal.commit()
        if event == "move":
            deal.move(data.draw(PACES), number)
        if event == "resume":
            members = range(data.draw(st.integers(1, 6)))
            deal = BatchAssignment.restored(travelled(deal.state()), members, share, limits)
        if event == "fail" and len(deal.members) > 1:
            gone = data.draw(st.sampled_from(deal.members))
            deal.change([one for one in deal.members if one != gone], number, number - 1)
            returned = portions[gone]
            seen = [at for at in seen if returned is None or at not in positions(returned.ranges)]
        if event == "join":
            deal.change(sorted({*deal.members, data.draw(st.integers(0, 9))}), number, number)
    assert sorted(seen) == [*range(samples)]


def test_an_epoch_of_an_earlier_version_is_continued_in_whole_batches() -> None:
    """The state is of a rule that divided global batches of four batches evenly; the first step had been trained."""
    deal = BatchAssignment([10] * 12, range(4))
    deal.next(0)
    deal.commit()
    earlier = travelled(deal.state()) | {"rule": "global-batch", "returned": [14, 19]}
    del earlier["divided"]
    deals = [BatchAssignment.restored(earlier, range(3)) for _ in range(3)]
    seen = [at for me, deal in enumerate(deals) for portion in hands(deal, me) for at in positions(portion.ranges)]
    assert sorted(seen) == [*range(14, 19), *range(40, 120)]


def test_committed_steps_of_a_removed_worker_are_not_returned() -> None:
    """The change is known before the last committed step is assigned."""
    deal = BatchAssignment([1] * 5, range(2))
    deal.next(0)
    deal.change([0], after=2, committed=2)
    assert [portion.ranges for portion in hands(deal, 0)] == [((2, 3),), ((4, 5),)]


def test_a_restarted_worker_does_not_repeat_committed_steps_of_its_earlier_incarnation() -> None:
    deal = BatchAssignment.restored(BatchAssignment([1] * 4, range(2)).state(), range(2))
    for members in ([0], [0, 1]):
        deal.change(members, after=1, committed=1)
    assert [portion.ranges for portion in hands(deal, 1)] == [(), ((3, 4),)]


def test_inconsistent_states_are_refused() -> None:
    deal = BatchAssignment([1] * 9, range(3))
    deal.next(0), deal.next(0)
    deal.commit()
    for after, committed in ((1, 1), (2, 1), (2, 3)):
        with pytest.raises(ValueError, match="are assigned and"):
            deal.change([0, 1], after, committed)
    deal.change([0, 1], 3, 2)
    with pytest.raises(ValueError, match="a change is pending"):
        deal.state()


class Watched(array):  # type: ignore[type-arg]
    """An array that counts its reads."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("how", RULES)
@pytest.mark.parametrize("there", [range(300), range(299)], ids=["all", "one less"])
def test_assignment_without_changes_costs_the_same_with_many_workers_and_stores_nothing(
    how: Rule, there: range
) -> None:
    size = 1200 if how == "shares" else 4
    deal = BatchAssignment((), there, how, 300, Watched("q", range(0, 1_200_001, size)))
    deal.next(7)
    deal._bounds.reads = 0  # type: ignore[attr-defined]
    tracemalloc.start()
    assert sum(1 for _ in hands(deal, 7)) >= 999
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert deal._bounds.reads <= 10 * deal.global_step  # type: ignore[attr-defined]
    assert kept < 10_000


def test_a_state_is_small() -> None:
    deal = BatchAssignment([32] * 100_000 + [7], range(8))
    for _ in islice(hands(deal, 0), 1000):
        pass
    deal.commit()
    assert len(msgspec.msgpack.encode(deal.state())) < 200


@given(SIZES, st.sets(st.integers(0, 23)), st.integers(1, 4))
@settings(max_examples=examples(60))
def test_an_epoch_of_leased_batches_continues_as_an_assignment(sizes: list[int], some: set[int], members: int) -> None:
    """Settled batches are not assigned again, all others once; the number of remaining ones is known before."""
    settled = {batch for batch in some if batch < len(sizes)}
    bounds = bounds_of(sizes)
    done = {at for batch in settled for at in range(bounds[batch], bounds[batch + 1])}
    deal = BatchAssignment.restored(
        travelled(BatchAssignment.from_settled(bounds, settled, members).state()), range(members)
    )
    assert deal.assigned_samples == len(done)
    left = positions(deal.remaining())
    assert left == sorted(set(range(bounds[-1])) - done)
    twins = [copy.deepcopy(deal) for _ in range(members)]
    dealt = [at for me, twin in enumerate(twins) for one in hands(twin, me) for at in positions(one.ranges)]
    assert sorted(dealt) == left
    assert not twins[0].remaining()
    twins[0].commit()
    assert twins[0].counts_of_departed().tolist() == [int(at in done) for at in range(bounds[-1])]
