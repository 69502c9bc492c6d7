"""A coordinator, workers and a network that loses and reorders messages, without sockets and without a clock."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from stretto.membership.client_state import MembershipClientState
from stretto.membership.coordinator import MembershipCoordinator, Outgoing
from stretto.membership.coordinator_records import Started
from stretto.membership.messages import (
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
    """One rank of a worker: it trains in rounds, each of which needs this rank of all members, and pauses when it has
    to."""

    number: int
    incarnation: int
    world: World
    rank: int = 0
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
            self.enter_exchange()

    def take_reply(self) -> None:
        reply, self.state.reply = self.state.reply, None
        if isinstance(reply, Continue):
            if self.global_step < reply.global_step and not self.is_exchanging:
                self.global_step += 1
                self.is_exchanging = True
                self.enter_exchange()
            return
        assert isinstance(reply, GenerationView)
        if self.number not in reply.numbers:
            self.has_left = self.is_ended = True
            return
        self.form = reply
        self.world.arrived[reply.generation, self.rank].add(self.number)
        if self.history:
            self.catch_up()

    def take(self) -> None:
        """Receive the state of a member that has it; if no member has state, all start from the beginning."""
        assert self.form is not None
        givers = {one.worker for one in self.form.members if one.report.generation > 0}
        if not givers or givers & self.world.arrived[self.form.generation, self.rank]:
            self.history = True
            self.catch_up()

    def catch_up(self) -> None:
        """Receive the results that this worker lacks; its commits and global step become the largest of all members."""
        assert self.form is not None
        reports = [one.report for one in self.form.members]
        self.commits = max(one.commits for one in reports)
        self.global_step = max(one.global_step for one in reports)

    def enter_exchange(self) -> None:
        assert self.form is not None
        self.world.entered[self.form.generation, self.commits, self.rank].add(self.number)

    def exchange(self) -> None:
        assert self.form is not None
        entered = self.world.entered[self.form.generation, self.commits, self.rank]
        if entered >= {one.worker for one in self.form.members}:
            self.commits += 1
            self.is_exchanging = False


class World:
    """Coordinator, workers of this number of ranks, and network. `to_coordinator` and `to_workers` are messages under
    way, `disk` is the log."""

    def __init__(self, workers: int, least: int, ranks: int = 1) -> None:
        self.least, self.ranks = min(least, workers), ranks
        self.coordinator = MembershipCoordinator(Started(workers, FAILURE_TIMEOUT_S, self.least, return_s=1e9))
        self.now = 0.0
        self.disk: list[bytes] = self.coordinator.records()
        self.to_coordinator: list[tuple[Worker, WorkerMessage]] = []
        self.to_workers: list[Outgoing] = []
        self.entered: dict[tuple[int, int, int], set[int]] = defaultdict(set)
        self.arrived: dict[tuple[int, int], set[int]] = defaultdict(set)
        self.processes: list[Worker] = []
        self.forms: dict[tuple[int, int], GenerationView] = {}
        """Views by generation and rank."""
        self.ended: set[tuple[int, int]] = set()
        self.lost: set[int] = set()
        """Workers that are not restarted."""
        self.stopped = False
        self.crash: int | None = None
        """Number of the next records that are on disk when the coordinator fails; None if it does not."""
        for number in range(workers):
            self.begin(number, 0)

    def begin(self, number: int, incarnation: int) -> None:
        self.processes += [Worker(number, incarnation, self, rank) for rank in range(self.ranks)]

    def last(self, number: int, rank: int = 0) -> Worker:
        mine = (one for one in self.processes if (one.number, one.rank) == (number, rank))
        return max(mine, key=lambda one: one.incarnation)

    def replica(self, number: int, incarnation: int) -> list[Worker]:
        return [one for one in self.processes if (one.number, one.incarnation) == (number, incarnation)]

    def running(self) -> list[Worker]:
        return [one for one in self.processes if one.runs]

    def send(self, worker: Worker, messages: list[WorkerMessage]) -> None:
        for one in messages:
            if isinstance(one, ReadyReport):
                worker.reports.add(one)
            self.to_coordinator.append((worker, one))

    # --- the coordinator ---------------------------------------------------------------------------------------------

    def follow(self, posts: list[Outgoing]) -> None:
        """Log and send the coordinator's messages, unless the coordinator fails before."""
        records = self.coordinator.records()
        for event in self.coordinator.announcements.events:
            if event["what"] in ("failed", "left"):
                self.ended.add((event["worker"], event["incarnation"]))
        self.coordinator.announcements.events.clear()
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

    def receive(self, worker: Worker, message: WorkerMessage) -> None:
        number, incarnation, rank = worker.number, worker.incarnation, worker.rank
        self.follow(self.coordinator.receive(number, incarnation, message, self.now, rank, self.ranks))

    def process_exited(self, worker: Worker, will_restart: bool) -> None:
        if not will_restart:
            self.lost.add(worker.number)
        number, incarnation, rank = worker.number, worker.incarnation, worker.rank
        self.follow(self.coordinator.process_exited(number, incarnation, self.now, will_restart, "killed", rank))

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
        last = self.forms.get((form.generation, post.rank))
        if form == last:
            return
        if last is None:
            of_rank = [generation for generation, rank in self.forms if rank == post.rank]
            assert form.generation > max(of_rank, default=-1), "generation numbers increase"
            assert not form.save, "a new generation has no checkpoint request"
        else:
            assert [(one.worker, one.incarnation) for one in last.members] == [
                (one.worker, one.incarnation) for one in form.members
            ]
            assert all(one.report.between_steps and one.report.generation == form.generation for one in form.members)
        is_first = not any(generation == form.generation for generation, _ in self.forms)
        self.forms[form.generation, post.rank] = form
        self.check_new(form, post.rank, is_first)

    def check_new(self, form: GenerationView, rank: int, is_first: bool) -> None:
        reports = {one.worker: one.report for one in form.members}
        workers = {(one.number, one.incarnation): one for one in self.processes if one.rank == rank}
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
            if is_first:
                replica = self.replica(one.worker, one.incarnation)
                assert all(each.state._report is not None for each in replica), "no part of a replica is a member"
                assert len({each.history for each in replica}) == 1, "no part of a replica has state"
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
        before = self.forms.get((form.generation - 1, rank))
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
        last = self.last(draw.choice(self.processes).number, draw.randrange(self.ranks) if self.ranks > 1 else 0)
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
                replica = self.replica(number, self.last(number).incarnation)
                for one in replica:
                    one.is_paused = False
                last = next((one for one in replica if one.is_ended), None)
                if last is None:
                    continue
                for one in replica:
                    one.is_ended = True  # the launcher ends the other ranks
                if any(one.has_left for one in replica) or number in self.lost:
                    self.process_exited(last, will_restart=False)  # in case the first report was lost
                elif not any(one.state.stopped for one in replica):
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
        assert post.ranks == self.ranks
        for one in self.replica(post.worker, post.incarnation):
            if one.rank == post.rank and not one.is_ended:
                one.receive(post)

    def check_calm(self) -> None:
        """Check that all running workers are in one generation and complete rounds."""
        there = [one for one in self.running() if not one.has_left]
        if not there:
            return
        assert not self.stopped
        assert {one.state.generation for one in there} == {self.coordinator.generation}, "all are in one generation"
        assert all(one.history and one.state.aborted < one.state.generation for one in there)
        assert len({(one.number, one.rank) for one in there}) == len(there)
        assert len({one.number for one in there}) * self.ranks == len(there), "no part of a replica runs"
        before = [one.commits for one in there]
        self.calm(12)
        assert all(one.commits > was for one, was in zip(there, before, strict=True)), "rounds are completed"
        for rank in range(self.ranks):
            assert len({one.commits for one in there if one.rank == rank}) <= 2
