"""Properties of the coordinator: after any faults all running workers enter one generation."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from example_counts import examples
from hypothesis import example, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from membership_world import FAILURE_TIMEOUT_S, Worker, World

from stretto.membership.coordinator import MembershipCoordinator, Outgoing
from stretto.membership.coordinator_records import Started, StartedWithOthers
from stretto.membership.messages import (
    Broken,
    Evicted,
    GenerationView,
    Heartbeat,
    Leave,
    Quit,
    ReadyReport,
    Register,
)

RANKS = st.sampled_from([1, 1, 2, 3, 4])
"""Numbers of ranks of each worker."""


class FaultMachine(RuleBasedStateMachine):
    """Faults of any rank at any point, in any order; the run recovers within 60 rounds without faults."""

    @initialize(workers=st.integers(1, 4), least=st.integers(1, 2), ranks=RANKS)
    def begin(self, workers: int, least: int, ranks: int) -> None:
        self.world = World(workers, least, ranks)

    @rule(seed=st.integers(0, 1 << 20), rounds=st.integers(1, 12), bad=st.sampled_from([0.0, 0.1, 0.4]))
    def train(self, seed: int, rounds: int, bad: float) -> None:
        self.world.storm(random.Random(seed), rounds, bad, faults=0.0)

    @rule(rounds=st.integers(1, 12))
    def train_well(self, rounds: int) -> None:
        self.world.storm(random.Random(0), rounds, bad=0.0, faults=0.0)

    @rule(pick=st.integers(0, 30))
    def speak(self, pick: int) -> None:
        if running := self.world.running():
            one = running[pick % len(running)]
            self.world.send(one, one.periodic_messages())

    @rule(pick=st.integers(0, 30))
    def step(self, pick: int) -> None:
        if running := self.world.running():
            running[pick % len(running)].step()

    @rule(pick=st.integers(0, 1000), keep=st.booleans())
    def reach_coordinator(self, pick: int, keep: bool) -> None:
        """Deliver any message under way; with `keep` it is delivered again later."""
        if waiting := self.world.to_coordinator:
            at = pick % len(waiting)
            self.world.receive(*(waiting[at] if keep else waiting.pop(at)))

    @rule(pick=st.integers(0, 1000), keep=st.booleans())
    def reach_worker(self, pick: int, keep: bool) -> None:
        waiting = [post for post in self.world.to_workers if self.is_awake(post)]
        if waiting:
            post = waiting[pick % len(waiting)]
            if not keep:
                self.world.to_workers.remove(post)
            self.world.deliver(post)

    def is_awake(self, post) -> bool:
        return not any(
            one.rank == post.rank and one.is_paused for one in self.world.replica(post.worker, post.incarnation)
        )

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        for waiting in (self.world.to_coordinator, self.world.to_workers):
            if waiting and data.draw(st.booleans()):
                del waiting[data.draw(st.integers(0, len(waiting) - 1)) :: data.draw(st.integers(1, 3))]

    @rule(number=st.integers(0, 3), rank=st.integers(0, 3), seen=st.booleans(), again=st.booleans())
    def kill(self, number: int, rank: int, seen: bool, again: bool) -> None:
        last = self.last(number, rank)
        if last is None:
            return
        last.is_ended = True
        if seen:
            self.world.process_exited(last, will_restart=True)
        if again and last.number not in self.world.lost:
            self.world.begin(last.number, last.incarnation + 1)

    @rule(number=st.integers(0, 3), rank=st.integers(0, 3))
    def pause(self, number: int, rank: int) -> None:
        last = self.last(number, rank)
        if last is not None:
            last.is_paused = not last.is_paused

    @rule(number=st.integers(0, 3))
    def restart_beside_a_paused_process(self, number: int) -> None:
        last = self.last(number)
        if last is not None and last.is_paused:
            self.world.begin(last.number, last.incarnation + 1)

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        for one in self.world.running():
            self.world.send(one, one.periodic_messages())
        self.world.tick(seconds)

    @rule()
    def save(self) -> None:
        self.world.follow(self.world.coordinator.save(self.world.now))

    @rule(number=st.integers(0, 3))
    def quit(self, number: int) -> None:
        last = self.last(number)
        if last is not None:
            last.quits = True

    @rule(records=st.integers(0, 3))
    def crash_coordinator(self, records: int) -> None:
        self.world.crash = records

    @rule()
    def restart_coordinator(self) -> None:
        self.world.restart()

    def last(self, number: int, rank: int = 0) -> Worker | None:
        """Return the newest process of a worker's rank; None if it has ended."""
        last = self.world.last(number % len({one.number for one in self.world.processes}), rank % self.world.ranks)
        return None if last.is_ended else last

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.crash = None
            self.world.calm(60)
            self.world.check_calm()


def test_running_workers_form_one_generation_after_any_faults() -> None:
    run_state_machine_as_test(FaultMachine, settings=settings(max_examples=examples(600), stateful_step_count=40))


@given(
    seed=st.integers(0, 1 << 40),
    workers=st.integers(1, 4),
    least=st.integers(1, 2),
    bad=st.sampled_from([0.0, 0.0, 0.1, 0.3]),
    faults=st.sampled_from([0.05, 0.2]),
    ranks=RANKS,
)
@example(
    seed=11790963, workers=4, least=1, bad=0.3, faults=0.2, ranks=1
)  # the furthest worker leaves after a Continue; an old ReadyReport arrives
@example(
    seed=12764344, workers=4, least=2, bad=0.0, faults=0.2, ranks=1
)  # a generation is aborted after a member has paused between two steps
@settings(max_examples=examples(1600))
def test_running_workers_form_one_generation_after_random_faults_and_losses(
    seed: int, workers: int, least: int, bad: float, faults: float, ranks: int
) -> None:
    world = World(workers, least, ranks)
    world.storm(random.Random(seed), 80, bad, faults)
    world.crash = None
    world.calm(60)
    world.check_calm()


def kinds(posts: list[Outgoing]) -> list[tuple[int, str]]:
    """Return the receiver and the kind of each message."""
    return [(post.worker, type(post.message).__name__) for post in posts]


def formed(workers: int, **more: Any) -> MembershipCoordinator:
    """Return a coordinator with its first generation formed."""
    coordinator = MembershipCoordinator(Started(workers, FAILURE_TIMEOUT_S, **more))
    posts = [post for number in range(workers) for post in coordinator.receive(number, 0, ReadyReport(0), 0.0)]
    assert kinds(posts)[-workers:] == [(number, "GenerationView") for number in range(workers)]
    return coordinator


def test_a_report_of_an_earlier_pause_does_not_count_for_a_later_one() -> None:
    coordinator = formed(2)
    coordinator.save(1.0)
    early, late = ReadyReport(1, 2, 2, True), ReadyReport(1, 3, 3, True)
    coordinator.receive(0, 0, early, 1.0)
    assert (0, "Continue") in kinds(coordinator.receive(1, 0, late, 1.0))
    assert kinds(coordinator.receive(0, 0, late, 1.0)) == [(0, "GenerationView"), (1, "GenerationView")]
    coordinator.save(2.0)
    coordinator.receive(1, 0, Leave(), 2.0)
    assert kinds(coordinator.receive(0, 0, early, 2.0)) == [(0, "Continue")]
    assert kinds(coordinator.receive(0, 0, late, 2.0)) == [(0, "GenerationView")], "the same reply, in case it was lost"
    assert coordinator.generation == 1


@pytest.mark.parametrize("ends", [False, True], ids=["asked one by one", "ended by the launcher"])
def test_last_workers_write_a_checkpoint_before_they_leave(ends: bool) -> None:
    coordinator = formed(2, saves=True)
    if ends:
        coordinator.end_run(1.0)
    for worker in () if ends else range(2):
        coordinator.receive(worker, 0, Quit(), 1.0)

    def pause(step: int) -> GenerationView:
        posts = [
            post
            for worker in range(2)
            for post in coordinator.receive(worker, 0, ReadyReport(1, step, step, True), 1.0)
        ]
        views = [post.message for post in posts if isinstance(post.message, GenerationView)]
        assert len(views) == 2
        return views[0]

    saving = pause(4)
    assert (saving.save, saving.numbers) == (True, (0, 1))
    leaving = pause(5)
    assert (leaving.save, leaving.numbers) == (False, ())


def test_workers_that_leave_others_or_a_run_without_checkpoints_write_none() -> None:
    for coordinator, leaving in ((formed(2, saves=True), [1]), (formed(2), [0, 1])):
        for worker in leaving:
            coordinator.receive(worker, 0, Quit(), 1.0)
        posts = [post for one in range(2) for post in coordinator.receive(one, 0, ReadyReport(1, 4, 4, True), 1.0)]
        (view, *_) = [post.message for post in posts if isinstance(post.message, GenerationView)]
        assert (view.save, set(view.numbers)) == (False, {0, 1} - {*leaving})


def test_a_heartbeat_of_an_earlier_generation_does_not_count() -> None:
    coordinator = formed(3)
    coordinator.process_exited(2, 0, 1.0)
    for worker in range(2):
        coordinator.receive(worker, 0, ReadyReport(1, 5, 5), 1.0)
    assert coordinator.receive(0, 0, Heartbeat(1, "computing", 0.1, 9), 2.0) == []
    coordinator.save(2.0)
    posts = [post for one in range(2) for post in coordinator.receive(one, 0, ReadyReport(2, 6, 6, True), 2.0)]
    assert kinds(posts) == [(0, "GenerationView"), (1, "GenerationView")]


def test_a_pause_of_the_coordinator_does_not_fail_workers() -> None:
    coordinator = formed(2)
    coordinator.extend_timeouts(3 * FAILURE_TIMEOUT_S)
    assert coordinator.tick(3 * FAILURE_TIMEOUT_S) == []
    assert kinds(coordinator.tick(4.1 * FAILURE_TIMEOUT_S)) == []
    assert coordinator.members == {}


def test_a_late_heartbeat_is_reported_once() -> None:
    coordinator = formed(2)
    for now in (6.0, 7.0, 8.0):
        coordinator.receive(1, 0, Heartbeat(1, "computing", 0.2, 3), now)
        coordinator.tick(now)
    assert [(one["what"], one["worker"]) for one in coordinator.announcements.events if one["what"] == "slow"] == [
        ("slow", 0)
    ]
    assert len([one for one in coordinator.announcements.notices if "worker 0 has sent no heartbeat" in one]) == 1


def test_asynchronous_run_counts_started_workers_before_their_first_message() -> None:
    coordinator = MembershipCoordinator(Started(3, 5.0, 3, asynchronous=True))
    coordinator.receive(0, 0, Register("here", 1), 0.0)
    coordinator.receive(0, 0, ReadyReport(0), 0.0)
    assert coordinator.phase == "running"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("expected", [0, 1, 2])
def test_a_run_begins_when_as_many_workers_as_it_waits_for_are_ready(expected: int, asynchronous: bool) -> None:
    coordinator = MembershipCoordinator(
        StartedWithOthers(expected, FAILURE_TIMEOUT_S, asynchronous=asynchronous, first_members=4)
    )
    for worker in range(3):
        coordinator.receive(worker, 0, ReadyReport(0), 0.0)
    coordinator.process_exited(2, 0, 0.0)  # it has joined, and counts no more
    for worker in (3, 4):
        assert (coordinator.generation, coordinator.members) == (0, {})
        coordinator.receive(worker, 0, ReadyReport(0), 1.0)
    assert coordinator.members == {0: 0, 1: 0, 3: 0, 4: 0}
    assert coordinator.give_numbers("joining", 1) == (expected,)


def test_asynchronous_run_is_not_paused_by_failures_and_restarts() -> None:
    coordinator = formed(1, asynchronous=True)
    disk = coordinator.records()
    posts = coordinator.receive(1, 0, ReadyReport(0), 1.0)
    assert kinds(posts) == [(1, "GenerationView")]
    assert coordinator.receive(1, 0, ReadyReport(0), 1.0) == posts, "the same reply, in case it was lost"
    assert coordinator.process_exited(0, 0, 2.0, will_restart=True) == []
    coordinator = MembershipCoordinator.restored([*disk, *coordinator.records()], 2.0)
    assert coordinator.receive(1, 0, ReadyReport(0), 2.0) == posts
    assert kinds(coordinator.receive(0, 1, ReadyReport(0), 3.0)) == [(0, "GenerationView")]
    assert (coordinator.generation, coordinator.members) == (3, {0: 1, 1: 0})
    assert kinds(coordinator.receive(1, 0, Quit(), 4.0)) == [(1, "GenerationView")]
    assert (coordinator.generation, coordinator.members) == (4, {0: 1})
    assert coordinator.receive(0, 1, Leave(), 5.0) == []
    assert coordinator.phase == "running"


def test_a_worker_that_does_not_pause_after_an_abort_fails_after_the_failure_timeout() -> None:
    coordinator = formed(3)
    assert kinds(coordinator.receive(0, 0, Broken(1, "closed"), 1.0)) == [
        (0, "AbortGeneration"),
        (1, "AbortGeneration"),
        (2, "AbortGeneration"),
    ]
    for worker in (0, 1):
        coordinator.receive(worker, 0, ReadyReport(1, 5, 5), 1.0)
    for now in range(1, 12):
        for worker in range(3):
            posts = coordinator.receive(worker, 0, Heartbeat(1, "hanging", 1.0, 5), float(now))
        posts = coordinator.tick(float(now))
        assert posts == [] or now > 10
    coordinator.receive(2, 0, Heartbeat(1, "hanging", 1.0, 5), 11.4)
    posts = coordinator.tick(11.5)
    assert coordinator.generation == 2 and coordinator.members == {0: 0, 1: 0}
    assert kinds(coordinator.receive(2, 0, ReadyReport(1, 5, 5), 12.0)) == [(2, "Evicted")]


def test_a_member_of_a_generation_missing_in_a_damaged_log_is_evicted() -> None:
    """The coordinator does not know its state, so the worker would wait forever."""
    coordinator = formed(3)
    disk = coordinator.records()
    coordinator.process_exited(2, 0, 1.0)
    for worker in (0, 1):
        posts = coordinator.receive(worker, 0, ReadyReport(1, 5, 5), 1.0)
    assert kinds(posts) == [(0, "GenerationView"), (1, "GenerationView")]
    assert coordinator.generation == 2
    coordinator = MembershipCoordinator.restored(disk, 2.0)
    assert kinds(coordinator.receive(0, 0, ReadyReport(2, 6, 6), 2.0))[0] == (0, "Evicted")
    assert 0 not in coordinator.members or coordinator.phase != "running"


def unconnected(apart: set[tuple[int, int]], workers: int, with_state: bool, rounds: int = 40) -> MembershipCoordinator:
    """Return the coordinator after generations in which these pairs of workers have not connected."""
    coordinator = MembershipCoordinator(Started(workers, FAILURE_TIMEOUT_S))

    def report(worker: int) -> ReadyReport:
        generation = coordinator.generation
        return ReadyReport(generation if with_state else -generation, address=f"10.0.0.{worker}:7000 key")

    for now in range(rounds):
        for worker in sorted({*coordinator.members} or {*range(workers)}):
            coordinator.receive(worker, 0, report(worker), float(now))
        pairs = [pair for pair in apart if {*pair} <= coordinator.members.keys()]
        if coordinator.phase == "stopped" or not pairs:
            break
        for worker in coordinator.members:
            others = tuple(other for pair in pairs if worker in pair for other in pair if other != worker)
            if others:
                broken = Broken(coordinator.generation, "no connection", True, others)
                coordinator.receive(worker, 0, broken, float(now))
    return coordinator


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(
    ("apart", "workers", "left"),
    [
        ({(0, 1)}, 2, {0}),
        ({(0, 1), (0, 2)}, 3, {1, 2}),
        ({(1, 2), (0, 2)}, 3, {0, 1}),
        ({(0, 1), (2, 3)}, 4, {0, 2}),
    ],
)
def test_the_worker_that_the_most_others_cannot_reach_in_three_generations_ends_and_the_others_continue(
    apart: set[tuple[int, int]], workers: int, left: set[int], with_state: bool
) -> None:
    coordinator = unconnected(apart, workers, with_state)
    assert coordinator.members.keys() == left
    assert coordinator.phase == "running"
    assert coordinator.generation == 4, "three generations, and the one without the worker"
    for ended in set(range(workers)) - left:
        (post,) = coordinator.receive(ended, 0, ReadyReport(0), 99.0)
        assert isinstance(post.message, Evicted) and post.message.unreachable
        places = [f"worker {one} at 10.0.0.{one}:7000" for one in sorted({ended, *left})]
        assert sum(place in post.message.why for place in places) == 2, post.message.why


def test_workers_that_connect_now_and_then_are_not_ended() -> None:
    coordinator = formed(2)
    for now in range(1, 30):
        coordinator.receive(0, 0, Broken(now, "no connection", now % 3 > 0, (1,) if now % 3 else ()), float(now))
        for worker in range(2):
            coordinator.receive(worker, 0, ReadyReport(now, now, now), float(now))
        assert coordinator.generation == now + 1
    assert coordinator.members == {0: 0, 1: 0}


def test_a_run_ends_if_no_generation_forms_and_nobody_knows_which_worker_is_out_of_reach() -> None:
    coordinator = MembershipCoordinator(Started(2, FAILURE_TIMEOUT_S))
    for now in range(20):
        for worker in range(2):
            coordinator.receive(worker, 0, ReadyReport(-coordinator.generation), float(now))
        coordinator.receive(1, 0, Broken(coordinator.generation, "no store", forming=True), float(now))
    assert coordinator.phase == "stopped"
    assert any("no store" in notice for notice in coordinator.announcements.notices)
