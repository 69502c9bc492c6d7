"""Properties of the coordinator: after any faults all running workers enter one generation."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from example_counts import examples
from hypothesis import example, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from stretto.membership.client_state import MembershipClientState
from stretto.membership.coordinator import MembershipCoordinator, Outgoing
from stretto.membership.coordinator_records import Started
from stretto.membership.messages import (
    Broken,
    Continue,
    GenerationView,
    Heartbeat,
    Leave,
    Quit,
    ReadyReport,
    Register,
    Shutdown,
    WorkerMessage,
)

FAILURE_TIMEOUT_S = 10.0
FAULTS = (*["kill", "begin"] * 3, "pause", "go on", "crash", "restart", "save", "quit", "leave")


@dataclass
class Worker:
    """One process of a worker: it trains in rounds, each of which needs all members, and pauses when it has to."""

    number: int
    incarnation: int
    world: World
    history: bool = False
    commits: int = 0
    global_step: int = 0
    is_exchanging: bool = False
    is_paused: bool = False
    is_ended: bool = False
    has_left: bool = False
    quits: bool = False
    form: GenerationView | None = None
    reports: set[ReadyReport] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.state = MembershipClientState(self.number, self.incarnation, lambda generation, why: None)
        self.pause(between_steps=False)

    @property
    def runs(self) -> bool:
        return not self.is_paused and not self.is_ended

    @property
    def is_waiting(self) -> bool:
        return self.state._report is not None

    def pause(self, between_steps: bool) -> None:
        self.is_exchanging = False
        generation = self.state.generation if self.history else 0
        self.state.pause(ReadyReport(generation, self.commits, self.global_step, between_steps))

    def periodic_messages(self) -> list[WorkerMessage]:
        """Return the messages that its membership client sends periodically."""
        state = self.state
        messages: list[WorkerMessage] = [] if state.asynchronous is not None else [Register("here", 1)]
        messages.append(Heartbeat(state.generation, "computing", 0.1, self.global_step))
        messages += [Quit()] if self.quits else []
        messages += [Leave()] if self.has_left else []
        return [*messages, *state.pending_messages()]

    def receive(self, post: Outgoing) -> None:
        if self.state.receive(post.message):
            self.world.send(self, self.state.pending_messages())

    def step(self) -> None:
        """Take the next action, if there is any."""
        state = self.state
        if state.evicted is not None or state.stopped is not None:
            self.is_ended = True
        elif state.reply is not None:
            self.take_reply()
        elif self.is_waiting or self.form is None:
            return
        elif state.aborted >= state.generation:
            self.pause(between_steps=False)
        elif not self.history:
            self.take()
        elif self.is_exchanging:
            self.exchange()
        elif state.pause_requested:
            self.pause(between_steps=True)
        else:
            self.global_step += 1
            self.is_exchanging = True
            self.world.entered[self.form.generation, self.commits].add(self.number)

    def take_reply(self) -> None:
        reply, self.state.reply = self.state.reply, None
        if isinstance(reply, Continue):
            if self.global_step < reply.global_step and not self.is_exchanging:
                self.global_step += 1
                self.is_exchanging = True
                assert self.form is not None
                self.world.entered[self.form.generation, self.commits].add(self.number)
            return
        assert isinstance(reply, GenerationView)
        if self.number not in reply.numbers:
            self.has_left = self.is_ended = True
            return
        self.form = reply
        self.world.arrived[reply.generation].add(self.number)
        if self.history:
            self.catch_up()

    def take(self) -> None:
        """Receive the state of a member that has it; if no member has state, all start from the beginning."""
        assert self.form is not None
        givers = {one.worker for one in self.form.members if one.report.generation > 0}
        if not givers or givers & self.world.arrived[self.form.generation]:
            self.history = True
            self.catch_up()

    def catch_up(self) -> None:
        """Receive the results that this worker lacks; its commits and global step become the largest of all members."""
        assert self.form is not None
        reports = [one.report for one in self.form.members]
        self.commits = max(one.commits for one in reports)
        self.global_step = max(one.global_step for one in reports)

    def exchange(self) -> None:
        assert self.form is not None
        if self.world.entered[self.form.generation, self.commits] >= {one.worker for one in self.form.members}:
            self.commits += 1
            self.is_exchanging = False


class World:
    """Coordinator, workers and network. `to_coordinator` and `to_workers` are messages under way, `disk` is the log."""

    def __init__(self, workers: int, least: int) -> None:
        self.least = min(least, workers)
        self.coordinator = MembershipCoordinator(Started(workers, FAILURE_TIMEOUT_S, self.least, return_s=1e9))
        self.now = 0.0
        self.disk: list[bytes] = self.coordinator.records()
        self.to_coordinator: list[tuple[int, int, WorkerMessage]] = []
        self.to_workers: list[Outgoing] = []
        self.entered: dict[tuple[int, int], set[int]] = defaultdict(set)
        self.arrived: dict[int, set[int]] = defaultdict(set)
        self.processes: list[Worker] = []
        self.forms: dict[int, GenerationView] = {}
        self.ended: set[tuple[int, int]] = set()
        self.lost: set[int] = set()
        """Workers that are not restarted."""
        self.stopped = False
        self.crash: int | None = None
        """Number of the next records that are on disk when the coordinator fails; None if it does not."""
        for number in range(workers):
            self.begin(number, 0)

    def begin(self, number: int, incarnation: int) -> None:
        self.processes.append(Worker(number, incarnation, self))

    def last(self, number: int) -> Worker:
        return max((one for one in self.processes if one.number == number), key=lambda one: one.incarnation)

    def running(self) -> list[Worker]:
        return [one for one in self.processes if one.runs]

    def send(self, worker: Worker, messages: list[WorkerMessage]) -> None:
        for one in messages:
            if isinstance(one, ReadyReport):
                worker.reports.add(one)
            self.to_coordinator.append((worker.number, worker.incarnation, one))

    # --- the coordinator ---------------------------------------------------------------------------------------------

    def follow(self, posts: list[Outgoing]) -> None:
        """Log and send the coordinator's messages, unless the coordinator fails before."""
        records = self.coordinator.records()
        for event in self.coordinator.events:
            if event["what"] in ("failed", "left"):
                self.ended.add((event["worker"], event["incarnation"]))
        self.coordinator.events.clear()
        if self.crash is not None:
            reached, self.crash = records[: self.crash], None
            self.disk += reached
            self.restart()
            return
        self.disk += records
        for post in posts:
            self.check(post)
        self.to_workers += posts

    def restart(self) -> None:
        self.coordinator = MembershipCoordinator.restored(self.disk, self.now)

    def receive(self, worker: int, incarnation: int, message: WorkerMessage) -> None:
        self.follow(self.coordinator.receive(worker, incarnation, message, self.now))

    def process_exited(self, worker: Worker, will_restart: bool) -> None:
        if not will_restart:
            self.lost.add(worker.number)
        self.follow(
            self.coordinator.process_exited(worker.number, worker.incarnation, self.now, will_restart, "killed")
        )

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.follow(self.coordinator.tick(self.now))

    # --- invariants --------------------------------------------------------------------------------------------------

    def check(self, post: Outgoing) -> None:
        if isinstance(post.message, Shutdown):
            self.stopped = True
            candidates = (
                {one.number for one in self.processes} - {one.number for one in self.processes if one.quits} - self.lost
            )
            assert len(candidates) < max(self.least, 1), (
                "the run stopped although enough workers run or will be restarted"
            )
        if not isinstance(post.message, GenerationView):
            return
        form = post.message
        last = self.forms.get(form.generation)
        if form == last:
            return
        if last is None:
            assert form.generation > max(self.forms, default=-1), "generation numbers increase"
            assert not form.save, "a new generation has no checkpoint request"
        else:
            assert [(one.worker, one.incarnation) for one in last.members] == [
                (one.worker, one.incarnation) for one in form.members
            ]
            assert all(one.report.between_steps and one.report.generation == form.generation for one in form.members)
        self.forms[form.generation] = form
        self.check_new(form)

    def check_new(self, form: GenerationView) -> None:
        reports = {one.worker: one.report for one in form.members}
        workers = {(one.number, one.incarnation): one for one in self.processes}
        for one in form.members:
            worker = workers[one.worker, one.incarnation]
            stands = worker.state._report
            assert stands is not None, "members of a new generation are paused"
            assert (stands.commits, stands.global_step, stands.between_steps) == (
                one.report.commits,
                one.report.global_step,
                one.report.between_steps,
            )
            assert max(stands.generation, 0) == one.report.generation
            assert abs(stands.generation) <= form.generation
            assert (one.report.generation > 0) == worker.history
        giving = [report for report in reports.values() if report.generation > 0]
        if not giving:
            candidates = [one for one in self.processes if one.history and one.runs and not one.has_left]
            candidates = [
                one for one in candidates if (one.number, one.incarnation) not in self.ended and not one.state.evicted
            ]
            assert not [one for one in candidates if one is self.last(one.number)], "a worker with state is a member"
        elif all(report.between_steps for report in giving):
            assert len({(report.global_step, report.commits) for report in giving}) == 1, (
                "all are paused at one global step"
            )
        else:
            assert not any(report.between_steps for report in giving)
            assert len(reports) == len(giving), "workers join between two steps only"
            assert max(report.commits for report in giving) - min(report.commits for report in giving) <= 1
        before = self.forms.get(form.generation - 1)
        if before is not None and giving and form.generation not in {report.generation for report in giving}:
            assert {report.generation for report in giving} == {before.generation}, (
                "their reports are for the previous generation"
            )

    # --- faults ------------------------------------------------------------------------------------------------------

    def storm(self, draw: random.Random, rounds: int, bad: float, faults: float) -> None:
        """Run rounds over a network that loses, duplicates and reorders messages, with late workers and faults."""
        for _ in range(rounds):
            while draw.random() < faults:
                self.inject_fault(draw)
            for one in self.running():
                self.send(one, one.periodic_messages())
            self.flow(draw, bad)
            for one in self.running():
                if draw.random() < 0.8:
                    one.step()
            self.tick(FAILURE_TIMEOUT_S * draw.choice((0.05, 0.05, 0.3)))

    def inject_fault(self, draw: random.Random) -> None:
        """Inject one random fault."""
        what = draw.choice(FAULTS)
        last = self.last(draw.choice(self.processes).number)
        if what == "kill" and not last.is_ended:
            last.is_ended = True
            if draw.random() < 0.7:
                self.process_exited(last, will_restart=draw.random() < 0.8)
        elif (
            what == "begin" and (last.is_ended or last.is_paused) and not last.has_left and last.number not in self.lost
        ):
            self.begin(last.number, last.incarnation + 1)
        elif what == "pause":
            last.is_paused = True
        elif what == "go on":
            for one in self.processes:
                one.is_paused = False
        elif what == "crash":
            self.crash = draw.randrange(4)
        elif what == "restart":
            self.restart()
        elif what == "save":
            self.follow(self.coordinator.save(self.now))
        elif what == "quit" and draw.random() < 0.5:
            last.quits = True
        elif what == "leave" and last.runs and last.commits > 3 and draw.random() < 0.3:
            last.has_left = last.is_ended = True
            self.send(last, [Leave()])

    # --- after the faults -------------------------------------------------------------------------------------------

    def calm(self, rounds: int) -> None:
        """Run rounds without faults: messages arrive once and in order, and failed workers are restarted."""
        for _ in range(rounds):
            for number in sorted({one.number for one in self.processes}):
                last = self.last(number)
                last.is_paused = False
                if last.is_ended and (last.has_left or number in self.lost):
                    self.process_exited(last, will_restart=False)  # in case the first report was lost
                elif last.is_ended and number not in self.lost and not last.state.stopped:
                    self.process_exited(last, will_restart=True)
                    self.begin(number, last.incarnation + 1)
            for one in self.running():
                self.send(one, one.periodic_messages())
            self.flow()
            for one in self.running():
                one.step()
            self.tick(FAILURE_TIMEOUT_S / 10)

    def flow(self, draw: random.Random | None = None, bad: float = 0.0) -> None:
        """Deliver all messages and their replies; with `bad` > 0 some are lost, duplicated or reordered."""
        for _ in range(200):
            to_coordinator, self.to_coordinator = self._through(self.to_coordinator, draw, bad)
            for message in to_coordinator:
                self.receive(*message)
            to_workers, self.to_workers = self._through(self.to_workers, draw, bad)
            for post in to_workers:
                self.deliver(post)
            if bad or not (self.to_coordinator or self.to_workers):
                return
        raise AssertionError("the exchange of messages does not end")

    def _through(self, waiting: list[Any], draw: random.Random | None, bad: float) -> tuple[list[Any], list[Any]]:
        """Return the messages that arrive, and those still under way."""
        if draw is None or not bad:
            return waiting, []
        arrives = [one for one in waiting if draw.random() > bad]
        draw.shuffle(arrives)
        return arrives, [one for one in waiting if draw.random() < bad][-20:]

    def deliver(self, post: Outgoing) -> None:
        for one in self.processes:
            if (one.number, one.incarnation) == (post.worker, post.incarnation) and not one.is_ended:
                one.receive(post)

    def check_calm(self) -> None:
        """Check that all running workers are in one generation and complete rounds."""
        there = [one for one in self.running() if not one.has_left]
        if not there:
            return
        assert not self.stopped
        assert {one.state.generation for one in there} == {self.coordinator.generation}, "all are in one generation"
        assert all(one.history and one.state.aborted < one.state.generation for one in there)
        assert len({one.number for one in there}) == len(there)
        before = [one.commits for one in there]
        self.calm(12)
        assert all(one.commits > was for one, was in zip(there, before, strict=True)), "rounds are completed"
        assert len({one.commits for one in there}) <= 2


class FaultMachine(RuleBasedStateMachine):
    """Faults at any point, in any order; the run recovers within 60 rounds without faults."""

    @initialize(workers=st.integers(1, 4), least=st.integers(1, 2))
    def begin(self, workers: int, least: int) -> None:
        self.world = World(workers, least)

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
            (one.number, one.incarnation) == (post.worker, post.incarnation) and one.is_paused
            for one in self.world.processes
        )

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        for waiting in (self.world.to_coordinator, self.world.to_workers):
            if waiting and data.draw(st.booleans()):
                del waiting[data.draw(st.integers(0, len(waiting) - 1)) :: data.draw(st.integers(1, 3))]

    @rule(number=st.integers(0, 3), seen=st.booleans(), again=st.booleans())
    def kill(self, number: int, seen: bool, again: bool) -> None:
        last = self.last(number)
        if last is None:
            return
        last.is_ended = True
        if seen:
            self.world.process_exited(last, will_restart=True)
        if again and last.number not in self.world.lost:
            self.world.begin(last.number, last.incarnation + 1)

    @rule(number=st.integers(0, 3))
    def pause(self, number: int) -> None:
        last = self.last(number)
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

    def last(self, number: int) -> Worker | None:
        """Return the newest process of a worker; None if it has ended."""
        last = self.world.last(number % len({one.number for one in self.world.processes}))
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
)
@example(
    seed=11790963, workers=4, least=1, bad=0.3, faults=0.2
)  # the furthest worker leaves after a Continue; an old ReadyReport arrives
@example(
    seed=12764344, workers=4, least=2, bad=0.0, faults=0.2
)  # a generation is aborted after a member has paused between two steps
@settings(max_examples=examples(1600))
def test_running_workers_form_one_generation_after_random_faults_and_losses(
    seed: int, workers: int, least: int, bad: float, faults: float
) -> None:
    world = World(workers, least)
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
    assert [(one["what"], one["worker"]) for one in coordinator.events if one["what"] == "slow"] == [("slow", 0)]
    assert len([one for one in coordinator.notices if "worker 0 has sent no heartbeat" in one]) == 1


def test_asynchronous_run_counts_started_workers_before_their_first_message() -> None:
    coordinator = MembershipCoordinator(Started(3, 5.0, 3, asynchronous=True))
    coordinator.receive(0, 0, Register("here", 1), 0.0)
    coordinator.receive(0, 0, ReadyReport(0), 0.0)
    assert coordinator.phase == "running"


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
