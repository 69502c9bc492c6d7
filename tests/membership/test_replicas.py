"""Properties of workers with several ranks: the ranks of a worker join, pause and fail together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import hypothesis.strategies as st
import pytest
from example_counts import examples
from hypothesis import given, settings

from stretto.membership.coordinator import MembershipCoordinator, Outgoing
from stretto.membership.coordinator_records import Started
from stretto.membership.loop_positions import LOOP, LoopPosition, Waits
from stretto.membership.messages import (
    AbortGeneration,
    Continue,
    Evicted,
    GenerationView,
    Heartbeat,
    Leave,
    PauseRequest,
    Quit,
    ReadyReport,
    Register,
    Registered,
    Shutdown,
    WorkerMessage,
)

FAILURE_TIMEOUT_S = 10.0
SIZES = st.lists(st.integers(1, 4), min_size=2, max_size=4)
"""Number of ranks of each worker."""


class Run:
    """A coordinator and workers, of which worker w has `sizes[w]` ranks."""

    def __init__(self, sizes: Sequence[int], asynchronous: bool = False) -> None:
        self.sizes = sizes
        self.coordinator = MembershipCoordinator(
            Started(len(sizes), FAILURE_TIMEOUT_S, asynchronous=asynchronous, return_s=1e9)
        )
        self.log: list[bytes] = self.coordinator.records()
        self.events: list[dict[str, object]] = []

    def ranks(self, workers: Sequence[int] | None = None) -> Iterator[tuple[int, int]]:
        for worker in range(len(self.sizes)) if workers is None else workers:
            yield from product([worker], range(self.sizes[worker]))

    def _take(self, posts: list[Outgoing]) -> list[Outgoing]:
        self.log += self.coordinator.records()
        self.events += self.coordinator.announcements.events
        self.coordinator.announcements.events.clear()
        return posts

    def tick(self, now: float) -> list[Outgoing]:
        return self._take(self.coordinator.tick(now))

    def restart(self) -> None:
        self.coordinator = MembershipCoordinator.restored(self.log, 0.0)
        self.tick(0.0)

    def send(self, worker: int, rank: int, message: WorkerMessage, now: float = 0.0, incarnation: int = 0):
        posts = self.coordinator.receive(worker, incarnation, message, now, rank, self.sizes[worker])
        return self._take(posts)

    def exit(self, worker: int, rank: int, will_restart: bool = True, now: float = 0.0, incarnation: int = 0):
        return self._take(self.coordinator.process_exited(worker, incarnation, now, will_restart, "killed", rank))

    def send_all(self, batch: list[tuple[int, int, ReadyReport]], incarnations: list[int]) -> None:
        for worker, rank, report in batch:
            self.send(worker, rank, report, incarnation=incarnations[worker])

    def pause(self, report: ReadyReport, workers: Sequence[int] | None = None) -> list[Outgoing]:
        """Send a report of each rank."""
        return [post for worker, rank in self.ranks(workers) for post in self.send(worker, rank, report)]

    def what(self, kind: str) -> list[dict[str, object]]:
        return [event for event in self.events if event["what"] == kind]


def formed(sizes: Sequence[int], **more: bool) -> Run:
    run = Run(sizes, **more)
    posts = run.pause(ReadyReport(0))
    views = [(post.worker, post.rank) for post in posts if isinstance(post.message, GenerationView)]
    assert views[-sum(sizes) :] == list(run.ranks())
    return run


def receivers(posts: list[Outgoing], kind: type) -> list[tuple[int, int]]:
    return [(post.worker, post.rank) for post in posts if isinstance(post.message, kind)]


@given(sizes=SIZES, data=st.data())
@settings(max_examples=examples(200))
def test_a_generation_forms_only_when_all_ranks_of_all_members_are_ready(sizes, data) -> None:
    run = Run(sizes)
    order = data.draw(st.permutations(list(run.ranks())))
    for worker, rank in order[:-1]:
        assert not receivers(run.send(worker, rank, ReadyReport(0)), GenerationView)
        assert run.coordinator.generation == 0
    posts = run.send(*order[-1], ReadyReport(0))
    assert receivers(posts, GenerationView) == list(run.ranks())
    assert all(post.ranks == sizes[post.worker] for post in posts)


@given(sizes=SIZES, data=st.data())
@settings(max_examples=examples(300))
def test_the_exit_of_any_ranks_is_one_failure_and_one_change_of_generation(sizes, data) -> None:
    run = formed(sizes)
    killed = data.draw(st.integers(0, len(sizes) - 1))
    first, *further = data.draw(st.lists(st.integers(0, sizes[killed] - 1), min_size=1, max_size=4))
    posts = run.exit(killed, first)
    others = [rank for rank in range(sizes[killed]) if rank != first]
    remaining = [worker for worker in range(len(sizes)) if worker != killed]
    assert receivers(posts, Evicted) == [(killed, rank) for rank in others]
    assert receivers(posts, AbortGeneration) == list(run.ranks(remaining))
    logged = len(run.log)
    for rank in further:
        assert run.exit(killed, rank) == [], "the other ranks exit too"
    assert len(run.log) == logged
    for rank in others:
        assert receivers(run.send(killed, rank, Heartbeat(1, "computing", 0.1, 1)), Evicted) == [(killed, rank)]
    reports = list(run.ranks(remaining))
    for worker, rank in data.draw(st.permutations(reports))[:-1]:
        assert not receivers(run.send(worker, rank, ReadyReport(1, 3, 3)), GenerationView)
    run.pause(ReadyReport(1, 3, 3), remaining)
    assert (run.coordinator.generation, list(run.coordinator.members)) == (2, remaining)
    assert run.coordinator.failures.failed == [(killed, 0, 1, first)]
    failed = [(event["worker"], event["process"], event.get("rank")) for event in run.what("failed")]
    assert failed == [(killed, f"worker {killed}", first if sizes[killed] > 1 else None)]
    assert len(run.what("formed")) == 2


@given(sizes=SIZES, data=st.data())
@settings(max_examples=examples(300))
def test_a_restored_coordinator_decides_as_one_that_was_never_restarted(sizes, data) -> None:
    """Messages are repeated, as clients do, after a moment at which one of two coordinators is restarted."""
    steady, restored = formed(sizes), formed(sizes)
    incarnations = [0] * len(sizes)
    for step in range(1, data.draw(st.integers(2, 4))):
        worker = data.draw(st.integers(0, len(sizes) - 1))
        failed, joins = data.draw(st.integers(0, sizes[worker] - 1)), data.draw(st.booleans())
        for run in (steady, restored):
            run.exit(worker, failed, incarnation=incarnations[worker])
        incarnations[worker] += 1
        others = [other for other in range(len(sizes)) if other != worker]
        generation = steady.coordinator.generation
        paused = [(*one, ReadyReport(generation, step, step)) for one in steady.ranks(others)]
        batches = [paused]
        if joins:
            rests = [(*one, ReadyReport(generation + 1, step, step + 1, True)) for one in steady.ranks(others)]
            batches.append([*[(*one, ReadyReport(0)) for one in steady.ranks([worker])], *rests])
        for batch in batches:
            before = batch[: data.draw(st.integers(0, len(batch) - 1))]
            for run in (steady, restored):
                run.send_all(before, incarnations)
                if run is restored:
                    run.restart()
                run.send_all(batch, incarnations)
        assert steady.coordinator.members == restored.coordinator.members
        assert steady.coordinator.failures == restored.coordinator.failures
        assert steady.coordinator.workers.formed == restored.coordinator.workers.formed
        if not joins:
            break
    assert steady.log == restored.log
    assert len(steady.what("failed")) == len(steady.coordinator.failures.failed) == sum(incarnations)


def test_the_log_restores_the_rank_that_failed_first() -> None:
    run = formed([2, 3])
    run.exit(1, 2)
    restored = MembershipCoordinator.restored(run.log, 1.0)
    assert restored.failures == run.coordinator.failures
    assert restored.failures.failed == [(1, 0, 1, 2)]
    posts = restored.receive(0, 0, Heartbeat(1, "computing", 0.1, 1), 1.0, 1, 2)
    assert [post.message.why for post in posts] == ["worker 1 rank 2 failed (killed)"] * len(posts) != []


def test_each_rank_sees_the_reports_of_the_ranks_of_its_number() -> None:
    run = Run([2, 1])
    run.send(0, 0, ReadyReport(0, address="here:0"))
    run.send(0, 1, ReadyReport(0, address="here:1"))
    posts = run.send(1, 0, ReadyReport(0, address="there:0"))
    stores = {(post.worker, post.rank): [member.report.address for member in post.message.members] for post in posts}
    assert stores == {
        (0, 0): ["here:0", "there:0"],
        (0, 1): ["here:1", "there:0"],
        (1, 0): ["here:0", "there:0"],
    }
    restored = MembershipCoordinator.restored(run.log, 1.0)
    assert restored.receive(0, 0, ReadyReport(0, address="here:1"), 1.0, 1, 2) == [posts[1]]


def test_a_silent_rank_ends_its_worker_and_a_rank_that_has_not_started_does_not() -> None:
    run = Run([3, 1])
    run.send(0, 0, Register("here", 1))
    for now in range(1, 30):
        run.send(0, 0, Heartbeat(0, "starting", 0.1, 0), float(now))
        assert run.tick(float(now)) == []
    run.send(0, 1, Heartbeat(0, "starting", 0.1, 0), 30.0)
    run.send(0, 0, Heartbeat(0, "starting", 0.1, 0), 36.0)
    run.tick(36.0)
    run.send(0, 0, Heartbeat(0, "starting", 0.1, 0), 41.0)
    posts = run.tick(41.0)
    assert receivers(posts, Evicted) == [(0, 0)]
    assert [(event["what"], event["process"], event["rank"]) for event in run.events] == [
        ("slow", "worker 0 rank 1", 1),
        ("failed", "worker 0", 1),
    ]
    assert run.coordinator.announcements.notices[0].startswith("worker 0 rank 1 has sent no heartbeat for 6.0 s")
    assert run.coordinator.announcements.notices[1].startswith("worker 0 rank 1 failed (no heartbeat for 11.0 s)")


@pytest.mark.parametrize(
    ("rank", "ranks", "why"),
    [
        (2, 2, "worker 0 was started with rank 2 of 2 ranks: ranks are numbered from 0"),
        (
            1,
            3,
            "rank 1 of worker 0 was started with 3 ranks, its other ranks with 2: "
            "all ranks of a worker are started with the same number",
        ),
    ],
)
def test_a_rank_that_contradicts_its_worker_is_refused_with_one_sentence(rank: int, ranks: int, why: str) -> None:
    run = Run([2])
    run.send(0, 0, Register("here", 1))
    posts = run.coordinator.receive(0, 0, Register("here", 2), 0.0, rank, ranks)
    assert posts == [Outgoing(0, 0, Shutdown(why), rank, ranks)]
    assert receivers(run.send(0, 1, Register("here", 2)), Registered) == [(0, 1)], "the others continue"


def test_all_ranks_are_paused_at_one_global_step() -> None:
    run = formed([2, 2])
    run.coordinator.save(1.0)
    steps = {(0, 0): 4, (0, 1): 5, (1, 0): 4, (1, 1): 4}
    posts = [post for one, step in steps.items() for post in run.send(*one, ReadyReport(1, step, step, True))]
    assert not receivers(posts, GenerationView)
    continued = [post for post in posts if isinstance(post.message, Continue)]
    assert {post.message.global_step for post in continued} == {5}
    assert {(post.worker, post.rank) for post in continued} == {(0, 0), (1, 0), (1, 1)}
    posts = run.pause(ReadyReport(1, 5, 5, True))
    assert receivers(posts, GenerationView)[:4] == list(run.ranks())


def test_a_joining_worker_is_admitted_once_all_its_ranks_wait() -> None:
    run = formed([2, 2])
    run.exit(1, 0)
    run.pause(ReadyReport(1, 3, 3), [0])
    assert run.send(1, 1, ReadyReport(0), incarnation=1) == []
    posts = run.send(1, 0, ReadyReport(0), incarnation=1)
    assert receivers(posts, PauseRequest) == [(0, 0), (0, 1)]
    posts = run.pause(ReadyReport(2, 4, 4, True), [0])
    assert receivers(posts, GenerationView) == list(run.ranks())


def test_a_worker_of_which_only_some_ranks_have_state_fails_as_a_whole() -> None:
    """Its rank 0 has received the state of the run, and its rank 1 has not."""
    run = formed([2, 2])
    run.send(0, 0, ReadyReport(1, 1, 1))
    run.send(0, 1, ReadyReport(1, 1, 1))
    run.send(1, 0, ReadyReport(1, 1, 1))
    posts = run.send(1, 1, ReadyReport(-1))
    assert receivers(posts, Evicted) == [(1, 0)]
    assert receivers(posts, GenerationView) == [(0, 0), (0, 1)]
    assert run.coordinator.failures.failed == [(1, 0, 1, 1)]
    assert receivers(run.send(1, 1, ReadyReport(-1)), Evicted) == [(1, 1)]


def test_a_worker_has_left_when_one_of_its_ranks_has_finished() -> None:
    run = formed([2, 1])
    run.send(0, 1, Leave())
    run.send(0, 0, Leave())
    assert [event["process"] for event in run.what("left")] == ["worker 0"]
    run.send(0, 0, Heartbeat(1, "ending", 0.1, 1))
    assert not run.what("failed")
    assert receivers(run.send(0, 0, ReadyReport(1, 2, 2)), Evicted) == [(0, 0)], "it waits for others in vain"


def test_a_worker_leaves_gracefully_with_all_its_ranks() -> None:
    run = formed([2, 2])
    posts = run.send(1, 0, Quit())
    assert receivers(posts, PauseRequest) == list(run.ranks())
    posts = run.pause(ReadyReport(1, 3, 3, True))
    assert sorted(receivers(posts, GenerationView)) == list(run.ranks())
    assert list(run.coordinator.members) == [0]


def test_ranks_compare_their_loops_with_the_ranks_of_their_number() -> None:
    run = formed([2, 2])
    in_loop, further = Waits(7, "tensors", LoopPosition(LOOP, 1, 4)), Waits(7, "tensors", LoopPosition(LOOP, 2, 0))
    for worker in (0, 1):
        run.send(worker, 0, Heartbeat(1, "exchanging", 0.1, 4, 7, in_loop))
        run.send(worker, 1, Heartbeat(1, "exchanging", 0.1, 5, 7, further))
    assert run.coordinator.uneven is None, "the ranks of a stage may be in another operation than those of the next"
    run.send(1, 1, Heartbeat(1, "exchanging", 0.1, 4, 7, in_loop))
    assert run.coordinator.uneven is not None


def test_in_an_asynchronous_run_a_worker_joins_once_all_its_ranks_wait() -> None:
    run = Run([2, 3], asynchronous=True)
    assert run.send(0, 0, ReadyReport(0)) == []
    assert receivers(run.send(0, 1, ReadyReport(0)), GenerationView) == [(0, 0), (0, 1)]
    posts = run.pause(ReadyReport(0), [1])
    assert receivers(posts, GenerationView) == list(run.ranks([1]))
    assert receivers(run.exit(0, 1), Evicted) == [(0, 0)]
    assert (run.coordinator.generation, list(run.coordinator.members)) == (2, [1])
