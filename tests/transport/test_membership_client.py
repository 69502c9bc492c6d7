"""Membership clients and server over sockets: notifications, their timing, and refusals."""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from coordinator_process import CoordinatorProcess

from stretto.errors import MemberOutError, TransportError
from stretto.events import read_events
from stretto.interval import Interval
from stretto.membership.barriers import Arrive
from stretto.membership.client import MembershipClient
from stretto.membership.coordinator import MembershipCoordinator
from stretto.membership.coordinator_records import Started
from stretto.membership.event_lines import AppendEvents, EventAppender
from stretto.membership.messages import (
    Continue,
    CoordinatorMessage,
    EndRun,
    Evicted,
    Failures,
    GenerationView,
    Heartbeat,
    ProcessExited,
    ReadyReport,
    Register,
    RunEnded,
    Save,
    Shutdown,
    WatchFailures,
)
from stretto.membership.server import MembershipServer
from stretto.membership.write_ahead_log import WriteAheadLog, read
from stretto.parameter_server.rpc_channel import connect_client
from stretto.security import HEAD, RunKeys, WorkerKeys, role_of, use_keys

LIMIT_S = 60.0
START_S = 60.0
"""Seconds within which a process imports torch on a busy machine."""
KEYS = RunKeys.new()
DECODER = msgspec.msgpack.Decoder(CoordinatorMessage)
GOT = msgspec.msgpack.encode(Shutdown("nothing but that it was heard"))


def until(what: Callable[[], bool]) -> float:
    """Wait until it is so; returns how long that took."""
    start = time.monotonic()
    while not what():
        assert time.monotonic() < start + LIMIT_S, "waited in vain"
        time.sleep(0.001)
    return time.monotonic() - start


class _Observer:
    """Passes on the generations that end."""

    def __init__(self, note: Callable[[int], object]) -> None:
        self._note = note

    def generation_aborted(self, generation: int, _why: str) -> None:
        self._note(generation)

    def operations_begun(self) -> int:
        return -1


class Scene:
    """A membership server in a thread, and its clients."""

    def __init__(
        self,
        folder: Path,
        expected: int,
        failure_timeout_s: float = 5.0,
        save_every: Interval | None = None,
        **more: Any,
    ) -> None:
        self.folder, self.failure_timeout_s = folder, failure_timeout_s
        self.notices: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.aborts: list[tuple[int, int]] = []
        self.clients: list[MembershipClient] = []
        self.pool = ThreadPoolExecutor(16)
        self.context = zmq.Context()
        self.dealers: list[Any] = []
        self.stop = threading.Event()
        self.coordinator = MembershipCoordinator(Started(expected, failure_timeout_s, **more))
        listener = socket.create_server(("127.0.0.1", 0))
        self.call = MembershipServer(
            listener,
            self.coordinator,
            WriteAheadLog(folder / "journal"),
            KEYS,
            self.publish,
            [EventAppender(folder)],
            save_every,
        )
        self.thread = threading.Thread(target=self.call.run, args=(self.stop,))
        self.thread.start()

    def publish(self, notices: Any, events: Any) -> None:
        self.notices += notices
        self.events += events

    def client(
        self, worker: int, incarnation: int = 0, keys: WorkerKeys | None = None, rank: int = 0, ranks: int = 1
    ) -> MembershipClient:
        made = MembershipClient(
            worker,
            incarnation,
            self.call.address,
            keys or KEYS.client(b"worker %d" % worker),
            self.failure_timeout_s,
            LIMIT_S,
            rank,
            ranks,
        )
        made.attach(_Observer(lambda one: self.aborts.append((worker, one))))
        self.clients.append(made)
        return made

    def crew(self, workers: int) -> list[MembershipClient]:
        """Start this number of workers in their first generation."""
        crew = [self.client(worker) for worker in range(workers)]
        assert [form.generation for form in self.all_stand(crew, ReadyReport(0))] == [1] * workers
        return crew

    def all_stand(self, crew: list[MembershipClient], here: ReadyReport) -> list[GenerationView]:
        return [one.result(LIMIT_S) for one in [self.pool.submit(one.await_generation, here) for one in crew]]

    def launcher(self) -> Any:
        return self.dealer(HEAD)

    def dealer(self, name: bytes, role: bytes | None = None) -> Any:
        """A socket of an unknown client, by default with the key that belongs to its name."""
        made = self.context.socket(zmq.DEALER)
        use_keys(made, name, KEYS.client(role or role_of(name)))
        made.connect(self.call.address)
        self.dealers.append(made)
        return made

    def close(self) -> None:
        for one in self.clients:
            one.close()
        self.pool.shutdown()
        for one in self.dealers:
            one.close(linger=0)
        self.context.term()
        self.stop.set()
        self.thread.join(LIMIT_S)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(*args: Any, **more: Any) -> Scene:
        made.append(Scene(tmp_path, *args, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_all_workers_are_registered_and_receive_one_first_generation(scene) -> None:
    there = scene(3)
    crew = [there.client(worker) for worker in range(3)]
    assert [one.state.asynchronous for one in crew] == [False] * 3
    forms = there.all_stand(crew, ReadyReport(0, address="here:1"))
    assert forms[0] == forms[1] == forms[2]
    assert [(one.worker, one.incarnation, one.report.address) for one in forms[0].members] == [
        (n, 0, "here:1") for n in range(3)
    ]


def test_a_reported_exit_starts_a_new_generation_immediately(scene) -> None:
    there = scene(3, failure_timeout_s=LIMIT_S)
    crew = there.crew(3)
    there.launcher().send(msgspec.msgpack.encode(ProcessExited(2, 0, "killed by SIGKILL", True)))
    assert until(lambda: {(0, 1), (1, 1)} <= set(there.aborts)) < LIMIT_S / 2
    assert [one.aborted for one in crew[:2]] == [1, 1]
    forms = there.all_stand(crew[:2], ReadyReport(1, commits=4))
    assert [(form.generation, form.departed, len(form.members)) for form in forms] == [(2, [2], 2)] * 2
    assert "worker 2 failed (killed by SIGKILL) while starting" in there.notices[-1]
    assert there.notices[-1].endswith("continuing with 2 workers, worker 2 is restarted")
    with pytest.raises(MemberOutError, match="worker 2 is no member any more: killed by SIGKILL"):
        crew[2].await_generation(ReadyReport(1))


class AskedOnce(Interval):
    """An interval that has passed once, and says when the server first asked."""

    asked_at: int | None = None

    def due(self, now: float, rounds: int) -> bool:
        """Return True at the first call."""
        is_first, self.asked_at = self.asked_at is None, 1
        return is_first


def test_members_save_when_it_is_due_and_their_cost_reaches_the_interval(scene) -> None:
    interval = AskedOnce(600.0, follows_cost=True)
    there = scene(2, save_every=interval)
    lonely = there.client(0)
    with pytest.raises(TimeoutError):
        there.pool.submit(lonely.await_generation, ReadyReport(0)).result(0.3)
    assert interval.asked_at is None, "the interval begins with the first generation"
    other = there.client(1)
    other.await_generation(ReadyReport(0))
    until(lambda: lonely.pause_requested and other.pause_requested)
    here = ReadyReport(1, commits=1, global_step=1)
    replies = [
        one.result(LIMIT_S) for one in [there.pool.submit(each.pause_between_steps, here) for each in (lonely, other)]
    ]
    assert [reply.save for reply in replies] == [True, True]
    lonely.checkpoint_took(2.5)
    until(lambda: interval.cost_s == 2.5)
    lonely.checkpoint_took(math.inf)
    until(lambda: interval.cost_s == math.inf)


def test_the_ranks_of_a_worker_join_and_fail_together(scene) -> None:
    there = scene(2)
    crew = [there.client(0, rank=rank, ranks=2) for rank in range(2)] + [there.client(1)]

    def waits(number: int) -> Future[GenerationView]:
        return there.pool.submit(crew[number].await_generation, ReadyReport(0, address=f"0:{number}"))

    waiting = [waits(0), waits(2)]
    replicas = there.coordinator.workers.replicas
    until(lambda: replicas[0].is_any_ready and replicas[1].is_ready)
    assert not any(one.done() for one in waiting), "rank 1 of worker 0 is not ready"
    forms = [one.result(LIMIT_S) for one in (*waiting, waits(1))]
    assert [[one.report.address for one in form.members] for form in forms] == [["0:0", "0:2"]] * 2 + [["0:1", "0:2"]]

    launcher = there.launcher()
    launcher.send(msgspec.msgpack.encode(WatchFailures()))
    launcher.send(msgspec.msgpack.encode(ProcessExited(0, 0, "killed by SIGKILL", True, 1)))
    with pytest.raises(MemberOutError, match="worker 0 is no member any more: killed by SIGKILL"):
        crew[0].await_generation(ReadyReport(1, commits=4))
    assert crew[2].await_generation(ReadyReport(1, commits=4)).numbers == (1,)
    launcher.send(msgspec.msgpack.encode(ProcessExited(0, 0, "killed by SIGTERM", True, 0)))
    reply = None
    while reply is None or not reply.is_recovered(0, 0):
        assert launcher.poll(int(LIMIT_S * 1000))
        reply = msgspec.msgpack.decode(launcher.recv(), type=Failures)
    assert reply == Failures(2, [(0, 0, 1, 1)])
    until(lambda: [one["rank"] for one in there.events if one["what"] == "failed"] == [1])

    restarted = [there.client(0, 1, rank=rank, ranks=2) for rank in range(2)]
    joining = [there.pool.submit(one.await_generation, ReadyReport(0)) for one in restarted]
    until(lambda: crew[2].pause_requested)
    assert crew[2].pause_between_steps(ReadyReport(2, 5, 5)).numbers == (0, 1)
    assert [one.result(LIMIT_S).generation for one in joining] == [3, 3]
    until(lambda: [one["generation"] for one in there.events if one["what"] == "formed"] == [1, 2, 3])


def test_a_rank_that_contradicts_its_worker_ends_with_the_reason(scene) -> None:
    there = scene(1)
    there.client(0, rank=0, ranks=2)
    with pytest.raises(TransportError, match="rank 1 of worker 0 was started with 3 ranks, its other ranks with 2"):
        there.client(0, rank=1, ranks=3)
    with pytest.raises(TransportError, match="worker 0 was started with rank 2 of 2 ranks"):
        there.client(0, rank=2, ranks=2)


def test_launcher_is_notified_of_failures_and_of_the_next_generation(scene) -> None:
    there = scene(2, failure_timeout_s=2.0)
    crew, launcher = there.crew(2), there.launcher()

    def received() -> Failures:
        assert launcher.poll(int(LIMIT_S * 1000))
        return msgspec.msgpack.decode(launcher.recv(), type=Failures)

    launcher.send(msgspec.msgpack.encode(WatchFailures()))
    assert received() == Failures(1)
    there.dealer(b"worker 2.0").send(msgspec.msgpack.encode(Heartbeat(0, "starting", 0.0, 0)))
    while not (failures := received()).includes(2, 0):
        pass
    assert not failures.includes(2, 1) and not failures.is_recovered(2, 0)
    there.pool.submit(crew[0].await_generation, ReadyReport(1, 3))
    there.pool.submit(crew[1].await_generation, ReadyReport(1, 3))
    while not (failures := received()).is_recovered(2, 0):
        pass
    assert failures == Failures(2, [(2, 0, 1, 0)])


def test_a_broken_exchange_is_aborted_at_all_workers(scene) -> None:
    there = scene(2)
    crew = there.crew(2)
    crew[0].broken(1, "the other end closed")
    until(lambda: set(there.aborts) == {(0, 1), (1, 1)})
    forms = there.all_stand(crew, ReadyReport(1, commits=1))
    assert [form.generation for form in forms] == [2, 2]
    assert forms[0].why == "a collective operation of worker 0 broke off: the other end closed"


def test_a_silent_worker_is_declared_failed_and_evicted_when_it_returns(scene) -> None:
    there = scene(2, failure_timeout_s=2.0)
    crew = [there.client(0)]
    sleeper, began = there.dealer(b"worker 1.0"), time.monotonic()
    sleeper.send(msgspec.msgpack.encode(ReadyReport(0)))
    assert crew[0].await_generation(ReadyReport(0)).generation == 1
    until(lambda: (0, 1) in there.aborts)
    assert 2.0 < time.monotonic() - began < LIMIT_S / 2
    assert any("worker 1 has sent no heartbeat for" in one for one in there.notices)
    assert crew[0].await_generation(ReadyReport(1, commits=2)).generation == 2
    until(lambda: "worker 0 continues alone" in there.notices[-1])
    sleeper.send(msgspec.msgpack.encode(ReadyReport(1)))
    while not isinstance(told := DECODER.decode(sleeper.recv() or GOT), Evicted):
        pass
    assert "no heartbeat for" in told.why


def test_a_newcomer_joins_when_all_pause_at_one_global_step(scene) -> None:
    there = scene(2)
    crew = there.crew(2)
    newcomer = there.client(2)
    comes = there.pool.submit(newcomer.await_generation, ReadyReport(0))
    until(lambda: all(one.pause_requested for one in crew))
    crew[1].doing("computing", 5)  # it has passed its rest before it knew
    first = there.pool.submit(crew[0].pause_between_steps, ReadyReport(1, 4, 4)).result(LIMIT_S)
    assert first == Continue(1, 5)
    forms = [there.pool.submit(one.pause_between_steps, ReadyReport(1, 5, 5)) for one in crew]
    form = comes.result(LIMIT_S)
    assert [one.result(LIMIT_S) for one in forms] == [form, form]
    assert (form.generation, len(form.members), form.save) == (2, 3, False)
    assert [one.report.generation for one in form.members] == [1, 1, 0]
    assert not any(one.pause_requested for one in crew)


def test_a_checkpoint_is_requested_in_a_pause_and_the_generation_continues(scene) -> None:
    there = scene(2)
    crew = there.crew(2)
    there.launcher().send(msgspec.msgpack.encode(Save()))
    until(lambda: all(one.pause_requested for one in crew))
    forms = [there.pool.submit(one.pause_between_steps, ReadyReport(1, 3, 3)).result for one in crew]
    assert [(one(LIMIT_S).generation, one(LIMIT_S).save) for one in forms] == [(1, True)] * 2
    assert crew[0].pause_between_steps(ReadyReport(1, 3, 3)) == Continue(1, 4), "nobody saves twice at one rest"


def test_a_worker_that_quits_leaves_in_a_pause_and_the_others_continue(scene) -> None:
    there = scene(2)
    crew = there.crew(2)
    crew[1].quit()
    until(lambda: all(one.pause_requested for one in crew))
    forms = [there.pool.submit(one.pause_between_steps, ReadyReport(1, 3, 3)).result for one in crew]
    assert [[one.worker for one in form(LIMIT_S).members] for form in forms] == [[0], [0]]
    assert forms[0](LIMIT_S).departed == [1]


def test_workers_above_the_maximum_are_refused(scene) -> None:
    there = scene(1, max_workers=1)
    there.crew(1)
    with pytest.raises(MemberOutError, match="the run has its 1 workers"):
        there.client(1).await_generation(ReadyReport(0))


def test_below_the_minimum_of_workers_all_are_shut_down(scene) -> None:
    there = scene(2, min_workers=2)
    crew = there.crew(2)
    there.launcher().send(msgspec.msgpack.encode(ProcessExited(1, 0, "killed", False)))
    with pytest.raises(TransportError, match="the run cannot continue: one worker cannot continue, at least 2"):
        crew[0].await_generation(ReadyReport(1))


def test_in_an_asynchronous_run_no_worker_waits(scene) -> None:
    there = scene(2, asynchronous=True)
    crew = [there.client(0)]
    assert crew[0].await_generation(ReadyReport(0)).generation == 1
    crew.append(there.client(1))
    assert [one.worker for one in crew[1].await_generation(ReadyReport(0)).members] == [0, 1]
    there.launcher().send(msgspec.msgpack.encode(ProcessExited(1, 0, "killed", True)))
    until(lambda: any("worker 1 failed" in one for one in there.notices))
    form = there.client(1, incarnation=1).await_generation(ReadyReport(0))
    assert (form.generation, [(one.worker, one.incarnation) for one in form.members]) == (3, [(0, 0), (1, 1)])
    assert not there.aborts and not crew[0].pause_requested


def test_garbage_and_unknown_names_are_refused_and_counted(scene) -> None:
    there = scene(1)
    for name, frames in (
        (b"worker 0.0", [b"\xc1"]),
        (b"worker 0.0", [b"", b""]),
        (b"worker -1.0", [msgspec.msgpack.encode(ReadyReport(0))]),
        (b"somebody", [msgspec.msgpack.encode(ReadyReport(0))]),
        (HEAD, [msgspec.msgpack.encode(ReadyReport(0))]),
    ):
        before = there.call.refused
        there.dealer(name, HEAD if name == HEAD else b"worker 0").send_multipart(frames)
        until(lambda before=before: there.call.refused == before + 1)
    there.dealer(b"worker 9.9").send(bytes(1 << 17))
    assert there.crew(1)


def test_a_worker_cannot_speak_for_another_or_for_a_launcher(scene) -> None:
    there = scene(2)
    there.crew(2)
    for name, message in (
        (b"worker 1.0", Register("elsewhere", 1)),
        (b"worker 1.7", Register("elsewhere", 1)),
        (HEAD, ProcessExited(1, 0, "killed", False)),
        (b"launcher 1", ProcessExited(1, 0, "killed", False)),
        (b"events 1.0 rank 0 section 1", AppendEvents(0, b"{}\n")),
        (b"barrier 1.0", Arrive((0, 0))),
    ):
        before = there.call.refused
        there.dealer(name, b"worker 0").send(msgspec.msgpack.encode(message))
        until(lambda before=before: there.call.refused == before + 1)
        assert "not the key" in there.notices[-1]
    assert not [one for one in there.events if one["what"] == "failed"]
    assert there.coordinator.workers.members == {0: 0, 1: 0}


def test_a_copied_key_of_a_worker_takes_the_place_of_that_worker_alone_which_is_said(scene) -> None:
    there = scene(2)
    crew = there.crew(2)
    there.client(1, incarnation=1)
    until(lambda: (0, 1) in there.aborts)
    with pytest.raises(MemberOutError, match="a later process of worker 1 has taken its place"):
        crew[1].await_generation(ReadyReport(1, commits=1))
    assert there.pool.submit(crew[0].await_generation, ReadyReport(1, commits=1)).result(LIMIT_S).generation == 2
    (failed,) = [one for one in there.events if one["what"] == "failed"]
    assert (failed["worker"], failed["incarnation"]) == (1, 0)


def test_a_launcher_that_has_joined_reports_exits_of_its_own_workers_only(scene) -> None:
    there = scene(2)
    there.crew(2)
    numbers = there.coordinator.give_numbers("joining 0", 2)
    assert numbers == (2, 3)
    before = there.call.refused
    for name, worker in ((b"launcher 2", 1), (HEAD, 2), (b"launcher 9", 2)):
        there.dealer(name).send(msgspec.msgpack.encode(ProcessExited(worker, 0, "killed", False)))
    until(lambda: there.call.refused == before + 3)
    assert all("is not its own" in notice for notice in there.notices[-3:])
    launcher = there.dealer(b"launcher 2")
    for end in (EndRun(), RunEnded("now")):
        launcher.send(msgspec.msgpack.encode(end))
    until(lambda: there.call.refused == before + 5)
    assert all("only the launcher of the run may end it" in notice for notice in there.notices[-2:])
    assert not [one for one in there.events if one["what"] == "failed"]


def test_another_key_is_refused_by_name(scene) -> None:
    there = scene(1)
    others = RunKeys.new().client(b"worker 0")
    with pytest.raises(TransportError, match="refused this worker's key"):
        there.client(0, keys=replace(others, servers=KEYS.public))


def test_a_computing_worker_is_not_declared_failed_and_is_notified_immediately(scene) -> None:
    there = scene(2, failure_timeout_s=2.0)
    crew = there.crew(2)
    told: list[float] = []
    crew[0].attach(_Observer(lambda _generation: told.append(time.monotonic())))
    matrix, end, limit = torch.rand(1500, 1500), time.monotonic() + 3.0, time.monotonic() + LIMIT_S
    there.pool.submit(lambda: (time.sleep(1.8), crew[1].broken(1, "gone")))
    while time.monotonic() < end or (not told and time.monotonic() < limit):
        torch.linalg.svd(matrix[:400, :400])  # one call of C++ after the other
    assert not [one for one in there.events if one["what"] == "failed"]
    assert told and told[0] < limit, "notified while it computed"


def test_a_partitioned_single_worker_stops_before_others_can_start(scene) -> None:
    there = scene(1, failure_timeout_s=8.0)
    there.crew(1)
    there.stop.set()
    there.thread.join(LIMIT_S)
    assert until(lambda: there.aborts == [(0, 1)] * len(there.aborts) != []) < 8.0


def test_a_partitioned_worker_aborts_its_wait_and_a_computing_one_continues(scene) -> None:
    there = scene(2, failure_timeout_s=1.0)
    crew = there.crew(2)
    crew[0].doing("exchanging", 3)
    crew[1].doing("computing", 3)
    began = time.monotonic()
    there.stop.set()
    there.thread.join(LIMIT_S)
    until(lambda: (0, 1) in there.aborts)
    assert time.monotonic() - began > 0.7
    assert (1, 1) not in there.aborts


def test_a_worker_without_coordinator_stops() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as nobody,
        pytest.raises(TransportError, match="no coordinator answered"),
    ):
        MembershipClient(0, 0, "{}:{}".format(*nobody.getsockname()), KEYS.client(b"worker 0"), 1.0, limit_s=0.5)


def formed_of(folder: Path) -> list[int]:
    """The generations that the log of a run tells of."""
    return [event["generation"] for event in read_events(folder / "events.jsonl") if event["what"] == "formed"]


def test_a_coordinator_killed_during_a_rendezvous_resumes_from_its_log(tmp_path) -> None:
    place = CoordinatorProcess(tmp_path, 3, KEYS)
    pool = ThreadPoolExecutor(4)
    aborts: list[int] = []
    crew: list[MembershipClient] = []

    def all_stand(here: ReadyReport) -> list[Any]:
        return [pool.submit(one.await_generation, here) for one in crew]

    try:
        for worker in range(3):
            crew.append(
                MembershipClient(worker, 0, place.address, KEYS.client(b"worker %d" % worker), START_S, START_S)
            )
            crew[-1].attach(_Observer(aborts.append))
        assert {one.result(START_S).generation for one in all_stand(ReadyReport(0))} == {1}
        crew[0].broken(1, "closed")
        until(lambda: len(aborts) >= 3)
        waiting = [pool.submit(one.await_generation, ReadyReport(1, commits=2)) for one in crew[:2]]
        time.sleep(0.1)  # so that it has heard some of them, or not
        place.kill()
        waiting.append(pool.submit(crew[2].await_generation, ReadyReport(1, commits=2)))
        place.start()
        forms = [one.result(START_S) for one in waiting]
        assert forms[0] == forms[1] == forms[2]
        assert forms[0].generation == 2
        assert len(read(tmp_path / "coordinator.wal")) == 3, "the rules and two generations"
        late = MembershipClient(
            0, 1, place.address, KEYS.client(b"worker 0"), START_S, START_S
        )  # it is a greater life: the old one is over
        crew.append(late)
        until(lambda: 2 in aborts)
        with pytest.raises(MemberOutError, match="a later process of worker 0 has taken its place"):
            crew[0].await_generation(ReadyReport(2))
        forms = [
            one.result(START_S)
            for one in [pool.submit(one.await_generation, ReadyReport(2, commits=3)) for one in crew[1:3]]
        ]
        assert [one.worker for one in forms[0].members] == [1, 2]
        until(lambda: formed_of(tmp_path) == [1, 2, 3])
        assert all(event["t"] > 0 for event in read_events(tmp_path / "events.jsonl"))
    finally:
        for one in crew:
            one.close()
        pool.shutdown()
        place.close()


@pytest.mark.long
@pytest.mark.plain_processes
def test_the_division_of_a_model_survives_a_dispatcher_that_is_killed_before_it_reads_it(tmp_path: Path) -> None:
    place = CoordinatorProcess(tmp_path, 1, KEYS, has_dispatcher=True)
    log = tmp_path / "dispatcher.wal"
    address = "tcp://{}:{}".format(*place.dispatcher.getsockname())
    keys = KEYS.client(b"worker 0")
    try:
        client = connect_client(0, 1, [address], keys, START_S, failure_timeout_s=START_S)
        with contextlib.closing(client), ThreadPoolExecutor(1) as pool:
            client.all_gather_bytes(b"here")
            place.process.send_signal(signal.SIGSTOP)
            stored = pool.submit(client.store_facts, b"stages from blocks.1")
            with contextlib.suppress(TimeoutError):
                stored.result(0.2)
            place.kill()
            place.start()
            stored.result(START_S)
            assert any(b"stages from blocks.1" in record for record in read(log))
    finally:
        place.close()


@pytest.mark.plain_processes
def test_a_coordinator_killed_before_its_dispatcher_has_begun_is_restarted(tmp_path: Path) -> None:
    """The dispatcher takes longer to begin than membership, so there is a record of members before its first."""
    place = CoordinatorProcess(tmp_path, 1, KEYS, has_dispatcher=True)
    log = tmp_path / "dispatcher.wal"
    try:
        with contextlib.closing(MembershipClient(0, 0, place.address, KEYS.client(b"worker 0"), START_S, START_S)):
            until(lambda: bool(read(tmp_path / "coordinator.wal")))
            place.kill()
            place.start()
            until(lambda: log.stat().st_size > 0 or place.process.poll() is not None)
            assert place.process.poll() is None
    finally:
        place.close()
