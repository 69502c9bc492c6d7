"""A shard of a parameter server under any order of messages: invariants, and its rules against references."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import Tensor

from stretto.parameter_server.shard import Reply, Shard, Update
from stretto.parameter_server.versioned_buffers import Version
from stretto.parameter_server.worker_record import Applied
from stretto.recipe.then import (
    Arrived,
    OnParameters,
    OuterState,
    Velocity,
    Weight,
    add,
    constant,
    delay_compensated,
    equal_share,
    exponential,
    inverse_staleness,
    outer,
    pull,
    replace,
)
from stretto.recipe.when import on_arrival

SEQS = 20
"""Updates of one worker in a run of the state machine."""
Mark = tuple[int, int]
"""Worker and number of an update."""


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def whole(version: Version) -> Tensor:
    return torch.cat([one.double() for one in version.ranges])


def update(
    worker: int, seq: int, version: int, flat: Tensor, samples: int = 1, lr: float = 0.0, cut: int = 0
) -> Update:
    """Return an update of a shard with one range, in two pieces."""
    return Update(worker, seq, version, samples, [[one for one in (flat[:cut], flat[cut:]) if one.numel()]], lr)


def shard_of(theta: Tensor, then: OnParameters, workers: int, when: on_arrival | None = None) -> Shard:
    return Shard([theta.clone()], when or on_arrival(), then, workers)


def say(shard: Shard, one: Update) -> Reply | None:
    """Push and request the reply as a worker does; return it and release its version, or None if the worker waits."""
    replies = [*shard.push(one), *shard.pull(one.worker)]
    for reply in replies:
        reply.version.release()
    return next((reply for reply in replies if reply.worker == one.worker), None)


# --- any order ------------------------------------------------------------------------------------------------------


@dataclass
class Said:
    """A message under way to a shard."""

    worker: int
    kind: str
    seq: int = 0
    version: int = 0
    meeting: int = 0


@dataclass
class Held:
    """Version that a reader received, and a copy of its values at that time."""

    version: Version
    number: int
    looked: Tensor


@dataclass
class Place:
    """One shard, the messages under way to it, and its expected state."""

    shard: Shard
    when: on_arrival
    live: set[int]
    cut: int
    queue: list[Said] = field(default_factory=list)
    streams: dict[int, tuple[Said, list[tuple[int, int, Tensor]]]] = field(default_factory=dict)
    rests: set[int] = field(default_factory=set)
    met: dict[int, int] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    heard: dict[int, int] = field(default_factory=dict)
    declared: dict[Mark, int] = field(default_factory=dict)
    reported: dict[Mark, Applied] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    looked: dict[int, Tensor] = field(default_factory=dict)
    flushed: bool = False
    known: set[Mark] | None = None

    def numbers(self, said: Said) -> list[list[Tensor]]:
        """Return an update that is 1 at the index of its worker and number, else 0, in two ranges of two pieces."""
        flat = torch.zeros(sum(one.numel() for one in self.shard.current.ranges), dtype=torch.float64)
        flat[said.worker * SEQS + said.seq - 1] = 1
        middle = (self.cut + flat.numel()) // 2
        return [[flat[: self.cut]], [flat[self.cut : middle], flat[middle:]]]

    def marks(self, flat: Tensor) -> set[Mark]:
        """Return the updates in these parameters; check that none is there twice or in part."""
        times = flat * self.when.collect
        assert bool(((times == 0) | ((times - 1).abs() < 1e-9)).all()), f"not applied exactly once: {times.tolist()}"
        return {(at // SEQS, at % SEQS + 1) for at in times.nonzero().flatten().tolist()}

    def applied(self) -> set[Mark]:
        return self.marks(whole(self.shard.current))

    def taken(self) -> set[Mark]:
        """Return the applied or collected updates, by flushing a copy of the shard."""
        if self.known is None:
            twin = copy.deepcopy(self.shard, {id(one.version): one.version for one in self.held})
            twin.flush()
            self.known = self.marks(whole(twin.current))
        return self.known

    def round(self, mark: Mark) -> int:
        return mark[1] - 1 - self.since[mark[0]]

    def clock(self, worker: int, taken: set[Mark]) -> int:
        done = next(seq for seq in itertools.count() if (worker, seq + 1) not in taken)
        return done - self.since[worker]

    def limit(self, taken: set[Mark]) -> float:
        """Return the last round that may be applied."""
        if self.when.bound is None:
            return math.inf
        clocks = [self.clock(one, taken) for one in self.live - self.rests]
        return min(clocks, default=math.inf) + self.when.bound

    def meet(self) -> None:
        all_met = min((self.met[one] for one in self.live), default=0)
        self.rests = {one for one in self.rests if self.met[one] > all_met}


class Crowd(RuleBasedStateMachine):
    """Workers push, stream, enter barriers, fail and read at several shards; messages are late, repeated, reordered."""

    places: list[Place]

    @initialize(
        workers=st.integers(1, 5),
        shards=st.integers(1, 3),
        collect=st.integers(1, 4),
        bound=st.sampled_from([None, 0, 1, 3]),
        overlap=st.booleans(),
        cut=st.integers(0, SEQS),
    )
    def begin(self, workers: int, shards: int, collect: int, bound: int | None, overlap: bool, cut: int) -> None:
        when = on_arrival(collect=collect, bound=bound, overlap=overlap)
        theta = torch.zeros(workers * SEQS, dtype=torch.float64)
        self.workers, self.live = workers, set(range(workers))
        self.sent, self.met = [0] * workers, [0] * workers
        seen = when if workers > 1 else on_arrival()
        self.places = [
            Place(Shard([theta[:cut].clone(), theta[cut:].clone()], when, add(), workers), seen, set(self.live), cut)
            for _ in range(shards)
        ]
        for place in self.places:
            place.since, place.met = dict.fromkeys(range(workers), 0), dict.fromkeys(range(workers), -1)

    # --- workers -----------

    @rule(worker=st.integers(0, 4))
    def send(self, worker: int) -> None:
        """Push whether the last push was replied to or not: a shard does not rely on it."""
        worker %= self.workers
        if worker in self.live and self.sent[worker] < SEQS - 8:
            self._send(worker)

    @rule(worker=st.integers(0, 4))
    def come_to_meeting(self, worker: int) -> None:
        worker %= self.workers
        if worker in self.live:
            self.met[worker] += 1
            self._tell(Said(worker, "rest", self.sent[worker], meeting=self.met[worker]))

    @rule(worker=st.integers(0, 4), luck=st.integers(0, 3))
    def die(self, worker: int, luck: int) -> None:
        worker %= self.workers
        if worker in self.live and len(self.live) > 1 and not luck:
            self.live.remove(worker)
            self._tell(Said(worker, "leave"))

    def _send(self, worker: int) -> None:
        self.sent[worker] += 1
        for place in self.places:
            version = place.heard.get(worker, 0)
            place.queue.append(Said(worker, "push", self.sent[worker], version))
            place.declared[worker, self.sent[worker]] = version

    def _tell(self, said: Said) -> None:
        for place in self.places:
            place.queue.append(said)

    # --- network -----------------

    @rule(which=st.integers(0, 40), again=st.booleans())
    def deliver(self, which: int, again: bool) -> None:
        """Deliver one message to each shard, not the same at each; sometimes a duplicate stays under way."""
        for place in [one for one in self.places if one.queue]:
            which = 7 * which + 1
            said = place.queue[which % len(place.queue)]
            if not again or said.kind != "push":
                place.queue.remove(said)
            self._deliver(place, said)

    @rule(at=st.integers(0, 2), which=st.integers(0, 40), now=st.integers(0, 3))
    def begin_to_deliver(self, at: int, which: int, now: int) -> None:
        """Stream an update piece by piece: some pieces now, the others later or never."""
        place = self.places[at % len(self.places)]
        pushes = [one for one in place.queue if one.kind == "push"]
        if pushes:
            said = pushes[which % len(pushes)]
            place.streams.pop(said.worker, None)
            if place.shard.draft(said.worker, said.seq, said.version):
                place.streams[said.worker] = said, list(self._pieces(place, said))
                self._stream(place, said.worker, now)

    @rule(at=st.integers(0, 2), worker=st.integers(0, 4), now=st.integers(0, 3))
    def deliver_more(self, at: int, worker: int, now: int) -> None:
        self._stream(self.places[at % len(self.places)], worker, now)

    @rule(at=st.integers(0, 2), worker=st.integers(0, 4))
    def ask_again(self, at: int, worker: int) -> None:
        place = self.places[at % len(self.places)]
        if worker in place.live:
            place.waiting.add(worker)
        self._call(place, lambda: place.shard.pull(worker))

    # --- readers -----------

    @rule(at=st.integers(0, 2), flush=st.booleans())
    def read(self, at: int, flush: bool) -> None:
        place = self.places[at % len(self.places)]
        if flush:
            place.flushed = True
            self._call(place, place.shard.flush)
        self._hold(place, place.shard.read())

    @rule(at=st.integers(0, 2), which=st.integers(0, 40))
    def have_read(self, at: int, which: int) -> None:
        held = self.places[at % len(self.places)].held
        if held:
            held.pop(which % len(held)).version.release()

    # --- invariants ----------

    @invariant()
    def what_is_held_never_changes(self) -> None:
        for place in getattr(self, "places", []):
            for one in place.held:
                assert one.version.number == one.number
                assert torch.equal(whole(one.version), one.looked)

    @invariant()
    def versions_count_what_was_applied(self) -> None:
        for place in getattr(self, "places", []):
            count, collect = len(place.applied()), place.when.collect
            if place.flushed:
                assert place.shard.version <= count <= place.shard.version * collect
            else:
                assert count == place.shard.version * collect

    @invariant()
    def nobody_waits_who_may_go_on(self) -> None:
        for place in getattr(self, "places", []):
            taken = place.taken()
            for worker in place.waiting & place.live:
                assert place.clock(worker, taken) + place.when.ahead > place.limit(taken)

    def teardown(self) -> None:
        """Check that all running workers reach a barrier, continue after it, and lose no update."""
        if not hasattr(self, "places"):
            return
        self._deliver_all()
        self._get_on(rounds=3)
        self._get_on(rounds=2)
        for place in self.places:
            place.flushed = True
            self._call(place, place.shard.flush)
            sent = {(worker, seq + 1) for worker in self.live for seq in range(self.sent[worker])}
            assert {mark for mark in place.applied() if mark[0] in self.live} == sent
            for worker in self.live:
                self._note(place, worker, place.shard.take_applied(worker))
            assert {mark for mark in place.reported if mark[0] in self.live} == sent
        self.what_is_held_never_changes()

    def _get_on(self, rounds: int) -> None:
        """Let all running workers push `rounds` times and enter a barrier; check that all reach it."""
        left = dict.fromkeys(sorted(self.live), rounds)
        self.met = [max(self.met) + 1] * self.workers
        for _ in range(SEQS):
            for worker in [one for one in left if not self._waits(one)]:
                if left[worker]:
                    self._send(worker)
                else:
                    self._tell(Said(worker, "rest", self.sent[worker], meeting=self.met[worker]))
                left[worker] = max(left[worker] - 1, 0)
            self._deliver_all()
        assert not any(left.values())
        assert not any(map(self._waits, left))

    def _waits(self, worker: int) -> bool:
        return any(worker in place.waiting for place in self.places)

    # --- helpers

    def _deliver_all(self) -> None:
        for place in self.places:
            while place.queue:
                self._deliver(place, place.queue.pop(0))

    def _deliver(self, place: Place, said: Said) -> None:
        place.streams.pop(said.worker, None)
        if said.kind == "push":
            self._push(place, said, place.numbers(said))
        elif said.kind == "rest":
            self._rest(place, said)
        else:
            self._leave(place, said.worker)

    def _pieces(self, place: Place, said: Said) -> Iterable[tuple[int, int, Tensor]]:
        for index, pieces in enumerate(place.numbers(said)):
            at = 0
            for piece in pieces:
                yield index, at, piece
                at += piece.numel()

    def _stream(self, place: Place, worker: int, now: int) -> None:
        if worker not in place.streams:
            return
        said, left = place.streams[worker]
        for index, at, piece in left[:now]:
            place.shard.write(worker, index, at, piece)
        del left[:now]
        if not left:
            del place.streams[worker]
            self._push(place, said, [[], []])

    def _push(self, place: Place, said: Said, pieces: Sequence[Sequence[Tensor]]) -> None:
        one = Update(said.worker, said.seq, said.version, 1, pieces)
        if (said.worker, said.seq) not in place.taken() and said.seq > place.since.get(said.worker, 0):
            place.rests.discard(said.worker)  # a worker that continues has passed the barrier
        self._call(place, lambda: place.shard.push(one), (said.worker, said.seq))
        if said.worker in place.live:
            place.waiting.add(said.worker)
        self._call(place, lambda: place.shard.pull(said.worker))

    def _rest(self, place: Place, said: Said) -> None:
        worker, seq, meeting = said.worker, said.seq, said.meeting
        if worker in place.live:
            place.rests.add(worker)
            place.since[worker] = max(place.since[worker], seq)
            place.met[worker] = max(place.met[worker], meeting)
        place.meet()
        self._call(place, lambda: place.shard.enter_barrier(worker, seq, meeting))

    def _leave(self, place: Place, worker: int) -> None:
        place.live.discard(worker)
        place.flushed = True  # fewer updates may remain to be collected
        place.rests.discard(worker)
        place.waiting.discard(worker)
        place.meet()
        self._call(place, lambda: place.shard.leave(worker))

    def _call(self, place: Place, act: Callable[[], list[Reply] | None], pushed: Mark | None = None) -> None:
        """Call the shard and check its replies."""
        number, before, limit = place.shard.version, place.taken(), place.limit(place.taken())
        replies = act() or []
        place.known = None
        taken = place.taken()
        assert before <= taken
        assert place.shard.version >= number
        for mark in taken - before:
            assert mark[0] in place.live
            assert place.round(mark) <= (limit if mark == pushed else place.limit(taken)), f"{mark} is beyond the bound"
        for reply in replies:
            assert place.clock(reply.worker, taken) + place.when.ahead <= place.limit(taken)
            self._take(place, reply)

    def _take(self, place: Place, reply: Reply) -> None:
        assert reply.worker in place.waiting
        assert reply.version is place.shard.current
        assert not reply.refused
        place.waiting.remove(reply.worker)
        place.heard[reply.worker] = reply.version.number
        self._hold(place, reply.version)
        self._note(place, reply.worker, reply.applied)

    def _hold(self, place: Place, version: Version) -> None:
        looked = place.looked.setdefault(version.number, whole(version).clone())
        assert torch.equal(whole(version), looked)
        place.held.append(Held(version, version.number, looked))

    def _note(self, place: Place, worker: int, applied: Sequence[Applied]) -> None:
        for one in applied:
            mark = (worker, one.seq)
            assert mark not in place.reported
            if one.version in place.looked:
                assert mark in place.marks(place.looked[one.version])
            if one.version - 1 in place.looked:
                assert mark not in place.marks(place.looked[one.version - 1])
            assert one.staleness == self._staleness(place, worker, one) or place.when.collect > 1
            place.reported[mark] = one

    def _staleness(self, place: Place, worker: int, one: Applied) -> int:
        """Return the number of other workers' versions between the version computed on and the one with the update."""
        declared = place.declared[worker, one.seq]
        own = [other.version for mark, other in place.reported.items() if mark[0] == worker]
        return one.version - 1 - declared - sum(declared < version < one.version for version in own)


def test_invariants_hold_in_any_order() -> None:
    run_state_machine_as_test(Crowd, settings=settings(max_examples=examples(160), stateful_step_count=50))


# --- sums of updates ------------------------------------------------------------------------------------------------

INTEGERS = st.lists(st.integers(-(2**40), 2**40), min_size=4, max_size=4)


@given(st.lists(st.tuples(st.integers(0, 3), INTEGERS, st.integers(0, 4)), max_size=30), st.randoms())
@settings(max_examples=examples(50))
def test_the_sum_of_applied_updates_is_the_sum_of_sent_updates(
    sent: list[tuple[int, list[int], int]], shuffle: random.Random
) -> None:
    seqs = [sum(before[0] == one[0] for before in sent[: at + 1]) for at, one in enumerate(sent)]
    updates = [update(one[0], seq, 0, numbers(*one[1]), cut=one[2]) for seq, one in zip(seqs, sent, strict=True)]
    expected = sum((numbers(*one[1]) for one in sent), numbers(0, 0, 0, 0))
    for _ in range(2):
        shard = shard_of(numbers(0, 0, 0, 0), add(), workers=4)
        for one in updates + shuffle.sample(updates, len(updates) // 2):
            shard.push(one)
        assert torch.equal(whole(shard.current), expected)
        assert shard.version == len(sent)
        shuffle.shuffle(updates)


@given(st.integers(1, 5), st.integers(0, 12), st.integers(1, 9))
@settings(max_examples=examples(50))
def test_collected_updates_are_weighted_by_their_share(s: int, pushes: int, samples: int) -> None:
    shard = shard_of(numbers(0, 0), add(), workers=3, when=on_arrival(collect=s))
    sent = [numbers(60 * (at + 1), -(at**2) * 60) for at in range(pushes)]
    total = numbers(0, 0)
    for at, one in enumerate(sent):
        say(shard, update(at % 3, at // 3 + 1, 0, one, samples=samples))
        if (at + 1) % s == 0:
            total = torch.stack(sent[: at + 1]).sum(0) / s
        torch.testing.assert_close(whole(shard.current), total, rtol=1e-12, atol=0)
        assert shard.version == (at + 1) // s
    shard.flush()
    shard.flush()
    torch.testing.assert_close(
        whole(shard.current), sum(sent, numbers(0, 0)) / s, rtol=1e-12, atol=0, msg="what was left over"
    )
    assert shard.version == -(-pushes // s)


def test_collected_updates_are_weighted_by_their_samples() -> None:
    shard = shard_of(numbers(1), add(), workers=2, when=on_arrival(collect=2))
    say(shard, update(0, 1, 0, numbers(8), samples=3))
    assert not shard._group[0][0].numbers, "they are in the sum, and kept there alone"
    say(shard, update(1, 1, 0, numbers(4), samples=1))
    assert whole(shard.current).tolist() == [1 + (3 * 8 + 1 * 4) / 4]


def test_collected_updates_of_a_failed_worker_count() -> None:
    shard = shard_of(numbers(0), add(), workers=3, when=on_arrival(collect=2))
    say(shard, update(0, 1, 0, numbers(8)))
    shard.leave(0)
    say(shard, update(0, 2, 0, numbers(100)))
    assert shard.version == 0
    say(shard, update(1, 1, 0, numbers(4)))
    assert whole(shard.current).tolist() == [6]


# --- NaN ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("then", "collect"),
    [(add(), 1), (add(), 2), (outer(), 1), (pull(0.5), 1), (add(delay_compensated()), 1), (replace(), 2)],
)
def test_updates_that_hold_nan_or_infinity_are_refused(
    then: OnParameters, collect: int, streamed: bool, bad: float
) -> None:
    shard = shard_of(numbers(1, 2, 3), then, workers=2, when=on_arrival(collect=collect))
    poisoned = update(0, 1, 0, numbers(5, 6, bad), lr=0.1, cut=1)
    if streamed and shard.draft(0, 1, 0):
        shard.write(0, 0, 0, poisoned.numbers[0][0])
        shard.write(0, 0, 1, poisoned.numbers[0][1])
        poisoned = update(0, 1, 0, numbers(), lr=0.1)
    reply = say(shard, poisoned)
    assert reply is not None
    assert reply.refused == (1,)
    assert reply.applied == ()
    shard.flush()
    assert whole(shard.current).tolist() == [1, 2, 3]
    assert shard.version == 0
    reply = say(shard, update(0, 2, 0, numbers(1, 2, 4), lr=0.1))
    assert reply is not None
    assert reply.refused == ()
    shard.flush()
    assert shard.version == 1
    assert bool(torch.isfinite(whole(shard.current)).all())


def test_finite_updates_whose_sum_is_infinite_are_not_refused() -> None:
    shard = shard_of(numbers(0, 0), add(), workers=2)
    say(shard, update(0, 1, 0, numbers(1.7e308, 1.7e308)))
    assert whole(shard.current).tolist() == [1.7e308, 1.7e308]


# --- streamed updates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [constant(0.5), inverse_staleness(), exponential(0.3), exponential(1e4)])
def test_a_streamed_update_equals_a_whole_one(weight: Weight) -> None:
    rng = np.random.default_rng(0)
    streamed, plain = (shard_of(numbers(*range(6)), add(weight), workers=3) for _ in range(2))
    for seq in range(1, 20):
        parts = [torch.from_numpy(rng.normal(size=6)) for _ in range(3)]
        assert all(streamed.draft(worker, seq, max(3 * seq - 6, 0)) for worker in (0, 1))
        for at in range(0, 6, 2):
            for worker in (0, 1):
                streamed.write(worker, 0, at, parts[worker][at : at + 2])
        for worker, numbers_now in ((2, parts[2]), (1, numbers()), (0, numbers())):
            say(streamed, update(worker, seq, max(3 * seq - 6, 0), numbers_now))
            say(plain, update(worker, seq, max(3 * seq - 6, 0), parts[worker]))
            torch.testing.assert_close(whole(streamed.current), whole(plain.current), rtol=1e-12, atol=1e-12)
    assert streamed.take_applied(0) == plain.take_applied(0)


def test_a_broken_stream_changes_nothing() -> None:
    shard = shard_of(numbers(0, 0, 0), add(), workers=2)
    assert shard.draft(0, 1, 0)
    shard.write(0, 0, 0, numbers(7))
    say(shard, update(0, 1, 0, numbers(1, 1, 1)))
    assert whole(shard.current).tolist() == [1, 1, 1]
    assert shard.draft(1, 1, 0)
    shard.write(1, 0, 0, numbers(7))
    shard.leave(1)
    say(shard, update(0, 2, 0, numbers(1, 1, 1)))
    assert whole(shard.current).tolist() == [2, 2, 2]


def test_a_stream_is_not_disturbed_by_another_update_that_is_refused() -> None:
    shard = shard_of(numbers(0), add(), workers=2)
    assert shard.draft(0, 1, 0)
    shard.push(update(0, 2, 0, numbers(math.nan)))
    shard.write(0, 0, 0, numbers(4))
    shard.push(update(0, 1, 0, numbers()))
    assert whole(shard.current).tolist() == [4]


def test_a_stream_that_became_early_by_a_barrier_is_not_lost() -> None:
    shard = shard_of(numbers(0), add(), workers=2, when=on_arrival(bound=0))
    shard.enter_barrier(0, 0, 1)
    shard.push(update(1, 1, 0, numbers(1)))
    second = numbers(2)
    if shard.draft(0, 2, 0):
        shard.write(0, 0, 0, second)
        second = numbers()
    shard.enter_barrier(1, 1, 1)
    shard.push(update(0, 2, 0, second))
    assert shard.draft(0, 1, 0)
    shard.write(0, 0, 0, numbers(4))
    shard.push(update(0, 1, 0, numbers()))
    shard.push(update(1, 2, 0, numbers(8)))
    assert whole(shard.current).tolist() == [15]


# --- duplicates and barriers ----------------------------------------------------------------------------------------


def test_a_reordered_and_repeated_update_is_applied_once() -> None:
    shard = shard_of(numbers(0), add(), workers=2)
    for seq in (2, 2, 1, 2, 1):
        shard.push(update(0, seq, 0, numbers(seq)))
    assert whole(shard.current).tolist() == [3]


def test_a_worker_at_a_barrier_blocks_no_other_and_the_bound_restarts_after_it() -> None:
    shard = shard_of(numbers(0), add(), workers=2, when=on_arrival(bound=1))
    assert say(shard, update(0, 1, 0, numbers(1))) is not None
    assert say(shard, update(0, 2, 0, numbers(1))) is None
    assert [one.worker for one in shard.enter_barrier(1, 0, 1)] == [0]
    for seq in range(3, 9):
        assert say(shard, update(0, seq, 0, numbers(1))) is not None
    shard.enter_barrier(0, 8, 1)
    assert say(shard, update(1, 1, 0, numbers(1))) is not None
    assert say(shard, update(1, 2, 0, numbers(1))) is None
    assert [one.worker for one in [*shard.push(update(0, 9, 0, numbers(1))), *shard.pull(0)]] == [1, 0]


def test_shards_agree_on_the_first_round_after_a_barrier_in_any_order_of_messages() -> None:
    """If they disagreed, each shard could block another worker, and both workers would wait forever."""
    shards = [shard_of(numbers(0), add(), workers=3, when=on_arrival(bound=0)) for _ in range(2)]
    first, second = shards
    first.push(update(0, 1, 0, numbers(1)))
    first.enter_barrier(0, 1, 1)
    first.enter_barrier(1, 0, 1)
    first.leave(2)
    second.leave(2)
    second.enter_barrier(0, 1, 1)
    second.enter_barrier(1, 0, 1)
    second.push(update(0, 1, 0, numbers(1)))
    assert [{worker: one.clock for worker, one in shard.members.items()} for shard in shards] == [{0: 0, 1: 0}] * 2
    for shard in shards:
        assert say(shard, update(0, 2, 0, numbers(1))) is None
        assert say(shard, update(1, 1, 0, numbers(1))) is not None


def test_a_worker_at_a_later_barrier_stays_there_when_another_enters_the_earlier_one() -> None:
    """After a rollback one worker may already be at the next barrier when the first message of another arrives."""
    shard = shard_of(numbers(0), add(), workers=2, when=on_arrival(bound=0))
    shard.exempt_all()
    shard.enter_barrier(0, 0, 1)
    shard.enter_barrier(0, 0, 2)
    shard.enter_barrier(1, 0, 1)
    assert say(shard, update(1, 1, 0, numbers(1))) is not None, "worker 0 waits for it, and holds nobody back"
    shard.enter_barrier(1, 1, 2)
    assert say(shard, update(1, 2, 0, numbers(1))) is None
    assert say(shard, update(0, 1, 0, numbers(1))) is not None


def test_a_barrier_opens_when_the_last_missing_worker_fails() -> None:
    shard = shard_of(numbers(0), add(), workers=3, when=on_arrival(bound=0))
    shard.push(update(0, 1, 0, numbers(1)))
    shard.enter_barrier(0, 1, 1)
    shard.enter_barrier(1, 0, 1)
    shard.leave(2)
    assert say(shard, update(0, 2, 0, numbers(1))) is None
    assert say(shard, update(1, 1, 0, numbers(1))) is not None


# --- the weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "factor"),
    [
        (constant(0.25), lambda t, workers: 0.25),
        (equal_share(), lambda t, workers: 1 / workers),
        (inverse_staleness(), lambda t, workers: 1.0 if t == 0 else 1 / t),
        (exponential(0.2), lambda t, workers: math.exp(-0.2 * t)),
    ],
)
@pytest.mark.parametrize("collect", [1, 3])
def test_weights_follow_their_formulas(weight: Weight, factor: Callable[[int, int], float], collect: int) -> None:
    """Worker 0 always computes on version 0; t - 1 versions of others precede its update."""
    for stale in range(5):
        shard = shard_of(numbers(0), add(weight), workers=4, when=on_arrival(collect=collect))
        for seq in range(stale * collect):
            say(shard, update(1 + seq % 3, seq // 3 + 1, shard.version, numbers(0)))
        reply = say(shard, update(0, 1, 0, numbers(12)))
        assert reply is not None
        shard.flush()
        assert whole(shard.current).item() == pytest.approx(12 * factor(stale, 4) / collect, rel=1e-12)
        assert (*reply.applied, *shard.take_applied(0)) == (Applied(1, stale + 1, stale, 1),)


def test_a_workers_own_versions_are_not_staleness() -> None:
    """A worker that began a round before its last one was applied knows its own last update."""
    shard = shard_of(numbers(0), add(), workers=2)
    for seq in range(1, 5):
        say(shard, update(0, seq, max(seq - 2, 0), numbers(1)))
    say(shard, update(1, 1, 0, numbers(1)))
    reply = say(shard, update(0, 5, 3, numbers(1)))
    assert reply is not None
    assert [one.staleness for one in reply.applied] == [1]
    told = shard.take_applied(1)
    assert [one.staleness for one in told] == []


# --- rules against references ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_outer_is_delayed_nesterov(workers: int, nesterov: bool) -> None:
    rng = random.Random(workers)
    then = outer(lr=0.7, momentum=0.9, nesterov=nesterov)
    shard = shard_of(numbers(1), then, workers)
    theta, v, since = 1.0, 0.0, 0.0
    for turn in range(1, 6 * workers + 1):
        sent = rng.gauss(0, 1)
        say(shard, update((turn - 1) % workers, -(-turn // workers), turn - 1, numbers(sent)))
        d = -sent
        since += d / workers
        if nesterov:
            theta -= 0.7 * d / workers
        if turn % workers == 0:
            v, since = 0.9 * v + since, 0.0
            theta -= 0.7 * (0.9 if nesterov else 1.0) * v
        assert whole(shard.current).item() == pytest.approx(theta, rel=1e-9)


def test_a_restored_shard_refreshes_its_momentum_with_the_same_update() -> None:
    shard, restored = (shard_of(numbers(one), outer(lr=0.7, momentum=0.9), 2) for one in (1, 0))
    say(shard, update(0, 1, 0, numbers(0.5)))
    restored.restore(*shard.state())
    for one in (shard, restored):
        say(one, update(1, 1, 1, numbers(-0.25)))
    assert torch.equal(whole(restored.current), whole(shard.current))


@pytest.mark.parametrize("nesterov", [True, False])
def test_outer_refreshed_with_every_application_equals_the_synchronous_rule(nesterov: bool) -> None:
    rng = np.random.default_rng(1)
    then = outer(lr=0.5, momentum=0.8, nesterov=nesterov)
    theta = torch.from_numpy(rng.normal(size=5))
    shard, alone = shard_of(theta, then, 3, on_arrival(collect=3)), (theta.clone(), Velocity(theta))
    state = OuterState(theta)
    for seq in range(1, 8):
        sent = [torch.from_numpy(rng.normal(size=5)) for _ in range(3)]
        for worker in range(3):
            say(shard, update(worker, seq, seq - 1, sent[worker]))
        mean = torch.stack(sent).mean(0)
        then.apply(theta, mean, state)
        torch.testing.assert_close(whole(shard.current), theta, rtol=1e-12, atol=1e-12)
        then.arrive(alone[0].clone(), mean, Arrived(1, 1, 1), alone[1], alone[0])
        torch.testing.assert_close(alone[0], theta, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("collect", [1, 2])
def test_delay_compensation_equals_its_reference(adaptive: bool, collect: int) -> None:
    """w_bak of a worker is the version last sent to it, at first the initial parameters."""
    rng = np.random.default_rng(2)
    lam, m, lr, workers = 1.5, 0.9, 0.1, 3
    w = rng.normal(size=4)
    ms, gathered = np.zeros(4), []
    w_bak, versions, seqs = [w] * workers, [0] * workers, [0] * workers
    then = add(delay_compensated(lam=lam, m=m, adaptive=adaptive))
    shard = shard_of(torch.from_numpy(w), then, workers, on_arrival(collect=collect))
    for turn in range(60):
        worker, g = int(rng.integers(workers)), rng.normal(size=4)
        seqs[worker] += 1
        sent = update(worker, seqs[worker], versions[worker], torch.from_numpy(-lr * g), lr=lr, cut=1)
        reply = say(shard, sent)
        assert reply is not None
        ms = m * ms + (1 - m) * g * g
        strength = lam / np.sqrt(ms + 1e-7) if adaptive else lam
        gathered.append(-lr * (g + strength * g * g * (w - w_bak[worker])))
        if len(gathered) == collect:
            w, gathered = w + sum(gathered) / collect, []
        np.testing.assert_allclose(whole(shard.current).numpy(), w, rtol=1e-9)
        if turn % 7 == 5:
            for one in range(workers):
                shard.read(one).release()
                w_bak[one], versions[one] = w, shard.version
        w_bak[worker], versions[worker] = w, reply.version.number


def test_elastic_averaging_moves_both_by_the_same_difference() -> None:
    rng = np.random.default_rng(3)
    alpha, workers = 0.3, 3
    c = rng.normal(size=4)
    x = [rng.normal(size=4) for _ in range(workers)]
    theirs = [torch.from_numpy(one.copy()) for one in x]
    shard = shard_of(torch.from_numpy(c), pull(alpha), workers)
    for turn in range(30):
        worker = int(rng.integers(workers))
        learned = rng.normal(size=4)
        before = x[worker] + learned
        difference = alpha * (before - c)
        x[worker], c = before - difference, c + difference
        theirs[worker] += torch.from_numpy(learned)
        reply = say(shard, update(worker, turn + 1, 0, theirs[worker].clone()))
        assert reply is not None
        theirs[worker] -= alpha * (theirs[worker] - whole(reply.version))
        np.testing.assert_allclose(theirs[worker].numpy(), x[worker], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(whole(shard.current).numpy(), c, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("then", "sends_parameters"),
    [
        (add(constant(0.1)), False),
        (add(inverse_staleness()), False),
        (add(exponential(0.5)), False),
        (add(equal_share()), False),
        (add(delay_compensated()), False),
        (outer(), False),
        (pull(0.1), True),
        (replace(), True),
    ],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_single_worker_ends_with_its_own_parameters(
    then: OnParameters, sends_parameters: bool, overlap: bool
) -> None:
    when = on_arrival(collect=3, bound=0, overlap=overlap)
    theta = numbers(1, 2)
    shard = shard_of(theta, then, 1, when)
    for seq in range(1, 7):
        learned = numbers(seq, -(seq**2))
        theta = theta + learned
        reply = say(shard, update(0, seq, seq - 1, theta.clone() if sends_parameters else learned, lr=0.1))
        assert reply is not None
        assert torch.equal(whole(reply.version), theta)
        assert reply.version.number == seq


def test_a_bound_of_0_is_a_barrier() -> None:
    """No worker gets a reply before all have pushed; the updates of all add up to their mean."""
    workers, rng = 4, random.Random(4)
    shard = shard_of(numbers(0), add(equal_share()), workers, on_arrival(bound=0))
    theta = 0
    for seq in range(1, 10):
        sent = [4 * rng.randrange(100) for _ in range(workers)]
        theta += sum(sent) // workers
        replies: list[Reply] = []
        for worker in rng.sample(range(workers), workers):
            assert replies == []
            replies += shard.push(update(worker, seq, shard.version, numbers(sent[worker])))
            replies += shard.pull(worker)
        assert sorted(one.worker for one in replies) == list(range(workers))
        assert {whole(one.version).item() for one in replies} == {theta}
        for one in replies:
            one.version.release()


def test_collecting_from_workers_of_equal_speed_is_synchronous_averaging() -> None:
    """All push at time t, then all request the reply: no update is stale, and each round applies the mean."""
    workers, rng = 5, np.random.default_rng(5)
    target = rng.normal(size=(workers, 3))
    theta = np.zeros(3)
    shard = shard_of(torch.zeros(3, dtype=torch.float64), add(), workers, on_arrival(collect=workers))
    theirs = [np.zeros(3)] * workers
    for seq in range(1, 20):
        for worker in rng.permutation(workers):
            step = -0.3 * (theirs[worker] - target[worker])
            assert shard.push(update(int(worker), seq, seq - 1, torch.from_numpy(step))) == []
        theta = theta + np.mean([-0.3 * (theta - one) for one in target], axis=0)
        for worker in range(workers):
            (reply,) = shard.pull(worker)
            theirs[worker] = whole(reply.version).numpy().copy()
            np.testing.assert_allclose(theirs[worker], theta, rtol=1e-12, atol=1e-12)
            assert [one.staleness for one in reply.applied] == [0]
            reply.version.release()


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collect", [1, 4])
@pytest.mark.parametrize("then", [add(), add(delay_compensated()), outer(), pull(0.5), replace()])
def test_buffers_of_old_versions_are_reused(then: OnParameters, collect: int) -> None:
    """The number of buffers is a few per worker after any number of updates, some of them refused."""
    shard, places = shard_of(numbers(1, 2), then, 3, on_arrival(collect=collect)), set()
    versions = [0] * 3
    for turn in range(300):
        worker, bad = turn % 3, turn % 7 == 0
        sent = numbers(math.nan, 0) if bad else numbers(1, 2)
        reply = say(shard, update(worker, turn // 3 + 1, versions[worker], sent, lr=0.1))
        assert reply is not None
        versions[worker] = reply.version.number
        places.add(shard.current.ranges[0].data_ptr())
    assert len(places) <= 2 + 2 * 3
