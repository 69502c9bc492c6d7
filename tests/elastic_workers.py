"""Elastic workers in threads, which tests can kill: an in-memory coordinator, and in-memory transports that abort."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from thread_pool import thread_pool

from stretto.api import abandon, close
from stretto.errors import BrokenTransportError, MemberOutError, TransportError
from stretto.membership.messages import Continue, GenerationView, Member, ReadyReport
from stretto.training.worker_context import WorkerContext, current_context
from stretto.transport import in_memory
from stretto.transport.elastic import ElasticTransport
from stretto.transport.interface import made

LIMIT_S = 30.0


class WorkerKilled(BaseException):
    """Raised in a worker's thread in place of the end of its process."""


@dataclass(frozen=True)
class KillInExchange:
    """Plan to kill worker `killed` once it has the result of operation `op`, which only `receiver` receives too."""

    op: in_memory.Key
    killed: int
    receiver: int
    generation: int = 1


class AbortableInMemory(in_memory.InMemoryTransport):
    """An in-memory transport whose operations can be aborted for all workers."""

    def __init__(self, rank: int, table: Table, plan: KillInExchange | None) -> None:
        super().__init__(rank, table)
        self._plan = plan

    def abort(self) -> None:
        self.table.abort_all()

    def close(self) -> None:
        pass

    def submit(self, op: Any) -> Any:
        handle = super().submit(op)
        return _AbortableHandle(self, handle.round_, handle)

    def all_gather_bytes(self, message: Any) -> list[bytes]:
        op = self._lay(made(message), 0)
        messages: list[bytes] = self.result_or_failure(op, lambda: self.table.take(op, list))
        return messages

    def broadcast_bytes(self, message: Any, root: int = 0) -> bytes:
        content = made(message) if self.worker == root else b""
        if self.table.gone:
            raise BrokenTransportError("aborted while the message was made")
        op = self._lay(content, 0)
        received: bytes = self.result_or_failure(op, lambda: self.table.take(op, lambda messages: messages[root]))
        return received

    def result_or_failure(self, op: in_memory.Key, act: Callable[[], Any]) -> Any:
        plan = self._plan if self._plan is not None and self._plan.op == op else None
        try:
            if plan is not None and self.worker not in (plan.killed, plan.receiver):
                self.table.await_results()
                raise TransportError("no result received")
            result = act()
        except TransportError as error:
            raise BrokenTransportError(str(error)) from None
        if plan is not None:
            self.table.note_result()
        if plan is not None and self.worker == plan.killed:
            raise WorkerKilled
        return result


class _AbortableHandle:
    def __init__(self, transport: AbortableInMemory, op: in_memory.Key, handle: Any) -> None:
        self._transport, self._op, self._handle = transport, op, handle

    def wait(self) -> Any:
        return self._transport.result_or_failure(self._op, self._handle.wait)


class Table(in_memory._Table):
    """Operations of one generation."""

    noted = 0
    """Number of workers that have the result of the planned operation."""

    def await_results(self) -> None:
        """Wait until both workers that receive the result have it."""
        with self._changed:
            self._changed.wait_for(lambda: self.noted >= 2 or self.gone, LIMIT_S)

    def note_result(self) -> None:
        with self._changed:
            self.noted += 1
            self._changed.notify_all()

    def abort_all(self) -> None:
        with self._changed:
            self.gone.update(range(self.workers))
            self._changed.notify_all()


class ThreadCoordinator:
    """A coordinator for threads: forms generations of the running workers; admits others when all are paused."""

    def __init__(self, workers: int, *plans: KillInExchange) -> None:
        self.plans = {plan.generation: plan for plan in plans}
        self.running = set(range(workers))
        self.incarnations = dict.fromkeys(range(workers), 0)
        self._changed = threading.Condition()
        self._reports: dict[int, ReadyReport] = {}
        self._form = GenerationView(0, [])
        self._tables: dict[int, Table] = {}
        self._hold = self._save = False
        self._quits: set[int] = set()
        self._replies: dict[int, GenerationView | Continue] = {}
        self.global_steps: dict[int, int] = {}
        self.aborted = 0
        self.generations: list[GenerationView] = []
        self.has_failed = False

    # --- calls of tests ---

    def fail(self, worker: int) -> None:
        with self._changed:
            self.running.discard(worker)
            self._reports.pop(worker, None)
            self._abort()

    def hold(self, save: bool = False) -> None:
        with self._changed:
            self._hold, self._save = True, save

    def quit(self, worker: int) -> None:
        with self._changed:
            self._hold = True
            self._quits.add(worker)

    def restart(self, worker: int) -> None:
        with self._changed:
            self.incarnations[worker] += 1
            self.running.add(worker)

    def table(self, generation: int, workers: int) -> Table:
        with self._changed:
            return self._tables.setdefault(generation, Table(workers, LIMIT_S))

    # --- calls of workers ---

    @property
    def members(self) -> set[int]:
        return {
            member.worker for member in self._form.members if member.incarnation == self.incarnations[member.worker]
        }

    def pause_requested(self, worker: int) -> bool:
        return self._hold and worker in self.members and self.aborted < self._form.generation

    def abort(self, generation: int) -> None:
        with self._changed:
            if generation == self._form.generation:
                self._abort()

    def await_generation(self, worker: int, report: ReadyReport) -> GenerationView | Continue:
        with self._changed:
            if report.generation > 0 and worker not in self.members:
                raise MemberOutError("this worker is no member any more")
            self._reports[worker] = report
            if report.generation <= 0 and self._form.generation and self.members & self.running:
                self._hold = True
            if report.generation > 0 and not report.between_steps:
                self._abort()
            self._settle()
            if (
                not self._changed.wait_for(lambda: worker in self._replies or self.has_failed, LIMIT_S)
                or self.has_failed
            ):
                raise TransportError(f"worker {worker} received no generation")
            return self._replies.pop(worker)

    def _abort(self) -> None:
        if self.aborted < self._form.generation:
            self.aborted = self._form.generation
            for worker, report in self._reports.items():
                if report.between_steps:
                    self._reports[worker] = ReadyReport(
                        report.generation, report.commits, report.global_step, False, report.address, report.rounds
                    )
            if (table := self._tables.get(self._form.generation)) is not None:
                table.abort_all()
        self._settle()

    def _settle(self) -> None:
        old = self.members & self.running
        reports = {worker: report for worker, report in self._reports.items() if worker in self.running}
        if not self._form.generation:
            if set(reports) == self.running:
                self._form_generation(reports, False)
        elif old and old <= {worker for worker, report in reports.items() if report.generation > 0}:
            of_members = {worker: reports[worker] for worker in old}
            if self.aborted >= self._form.generation:
                self._form_generation(of_members, False)
            elif not self._send_on(of_members):
                self._form_generation(
                    {worker: report for worker, report in reports.items() if worker not in self._quits}, True
                )
        elif self.aborted < self._form.generation:
            self._send_on(
                {worker: report for worker, report in reports.items() if worker in old and report.between_steps}
            )

    def _send_on(self, of_members: dict[int, ReadyReport]) -> bool:
        furthest = max((self.global_steps.get(worker, 0) for worker in self.members & self.running), default=0)
        late = [worker for worker, report in of_members.items() if report.global_step < furthest]
        for worker in late:
            self._replies[worker] = Continue(self._form.generation, furthest)
            del self._reports[worker]
        self._changed.notify_all()
        return bool(late)

    def _form_generation(self, reports: dict[int, ReadyReport], is_pause: bool) -> None:
        same = is_pause and set(reports) == self.members
        number = self._form.generation + (not same)
        members = [Member(worker, self.incarnations[worker], reports[worker]) for worker in sorted(reports)]
        departed = sorted(self.members - set(reports))
        saves = self._save and same
        view = GenerationView(number, members, departed, "", saves)
        for worker in [*reports, *(self._quits if is_pause else ())]:
            self._replies[worker] = view
            self._reports.pop(worker, None)
        if is_pause:
            self.running -= self._quits
            self._quits.clear()
            self._hold = self._save = self._save and not saves
        self._form = view
        self.generations.append(view)
        self._changed.notify_all()


class ThreadConnection:
    """One worker's connection to the coordinator."""

    def __init__(self, coordinator: ThreadCoordinator, worker: int) -> None:
        self._coordinator, self._worker = coordinator, worker

    def attach(self, observer: Any) -> None:
        pass

    @property
    def pause_requested(self) -> bool:
        return self._coordinator.pause_requested(self._worker)

    @property
    def aborted(self) -> int:
        return self._coordinator.aborted

    def await_generation(self, report: ReadyReport) -> GenerationView:
        found = self._coordinator.await_generation(self._worker, report)
        assert isinstance(found, GenerationView)
        return found

    def pause_between_steps(self, report: ReadyReport) -> GenerationView | Continue:
        return self._coordinator.await_generation(self._worker, report)

    def broken(self, generation: int, _why: str, forming: bool = False, unreached: Sequence[int] = ()) -> None:
        self._coordinator.abort(generation)

    def doing(self, _text: str, global_step: int, _waits: object = None) -> None:
        """Note the global step: no worker pauses at an earlier one than another worker has begun."""
        with self._coordinator._changed:
            self._coordinator.global_steps[self._worker] = global_step
            self._coordinator._settle()

    def checkpoint_took(self, seconds: float) -> None:
        pass

    def quit(self) -> None:
        self._coordinator.quit(self._worker)

    def leave(self) -> None:
        with self._coordinator._changed:
            self._coordinator.running.discard(self._worker)
            self._coordinator._settle()

    def close(self) -> None:
        pass


class InMemoryRendezvous:
    """Makes the in-memory transport of each generation."""

    address = "memory"

    def __init__(self, coordinator: ThreadCoordinator) -> None:
        self._coordinator = coordinator

    def form(self, form: GenerationView, rank: int) -> AbortableInMemory:
        table = self._coordinator.table(form.generation, len(form.members))
        return AbortableInMemory(rank, table, self._coordinator.plans.get(form.generation))

    def abort(self, generation: int) -> None:
        pass

    def close(self) -> None:
        pass


def run_elastic_workers(
    workers: int,
    work: Callable[[int], Any],
    recipe: str | None = None,
    run: Path | None = None,
    again: int = 0,
    coordinator: ThreadCoordinator | None = None,
    share_limits: Mapping[tuple[int, int], int] = MappingProxyType({}),
    **context: Any,
) -> tuple[list[Any], ThreadCoordinator]:
    """Return the coordinator and the result of `work(worker)` of each worker; None if the worker was killed.

    A killed worker is restarted, at most `again` times. `share_limits` are those of some incarnations of workers.
    """
    coordinator = coordinator or ThreadCoordinator(workers)
    if run is not None:
        run.mkdir(exist_ok=True)

    def run_incarnation(worker: int, incarnation: int) -> Any:
        meeting = ThreadConnection(coordinator, worker), InMemoryRendezvous(coordinator)
        transport = ElasticTransport(worker, *meeting, share_limit=share_limits.get((worker, incarnation), 0))
        current_context.set(
            WorkerContext(
                worker,
                workers,
                lambda _device: transport,
                recipe=recipe,
                run=run,
                incarnation=incarnation,
                **{"seed": 0} | context,
            )
        )
        try:
            result = work(worker)
            close()
            return result
        except WorkerKilled:
            coordinator.fail(worker)
            return None
        except SystemExit:
            close()
            return "left"
        except BaseException:
            coordinator.fail(worker)
            coordinator.has_failed = True
            abandon()
            raise

    def run_worker(worker: int) -> Any:
        for incarnation in range(again + 1):
            if incarnation:
                coordinator.restart(worker)
            result = contextvars.Context().run(run_incarnation, worker, incarnation)
            if result is not None:
                return result
        return None

    with thread_pool(workers) as pool:
        futures: list[Future[Any]] = [pool.submit(run_worker, worker) for worker in range(workers)]
        errors = [error for future in futures if (error := future.exception(timeout=3 * LIMIT_S)) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, TransportError))
    return [future.result() for future in futures], coordinator
