"""Workers in threads that can die: a coordinator in memory, and memory wires that break, for the laws of survival."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.api import abandon, close
from stretto.errors import BrokenTransportError, MemberOutError, TransportError
from stretto.membership.messages import Continue, GenerationView, Member, ReadyReport
from stretto.training.worker_context import WorkerContext, given_seat
from stretto.transport import in_memory
from stretto.transport.elastic import ElasticTransport
from stretto.transport.interface import made

LIMIT_S = 30.0


class Killed(BaseException):
    """A worker's process is gone."""


@dataclass(frozen=True)
class Cut:
    """In exchange `op` of a generation worker `dies` dies when it has its answer; only `ahead` gets it too."""

    op: int
    dies: int
    ahead: int
    generation: int = 1


class Breakable(in_memory.InMemoryTransport):
    """A memory wire that can be broken off for all."""

    def __init__(self, rank: int, table: Table, cut: Cut | None) -> None:
        super().__init__(rank, table)
        self._cut = cut

    def abort(self) -> None:
        self.table.break_off()

    def close(self) -> None:
        pass

    def submit(self, op: Any) -> Any:
        ticket = super().submit(op)
        return _Ticket(self, self._round, ticket)

    def all_gather_bytes(self, message: Any) -> list[bytes]:
        op = self._lay(made(message), 0)
        found: list[bytes] = self.or_broken(op, lambda: self.table.take(op, list))
        return found

    def broadcast_bytes(self, message: Any, root: int = 0) -> bytes:
        said = made(message) if self.worker == root else b""
        if self.table.gone:
            raise BrokenTransportError("it was broken off while the message was made")
        op = self._lay(said, 0)
        found: bytes = self.or_broken(op, lambda: self.table.take(op, lambda messages: messages[root]))
        return found

    def or_broken(self, op: int, act: Callable[[], Any]) -> Any:
        cut = self._cut if self._cut is not None and self._cut.op == op else None
        try:
            if cut is not None and self.worker not in (cut.dies, cut.ahead):
                self.table.await_cut()
                raise TransportError("the answer has not come")
            found = act()
        except TransportError as error:
            raise BrokenTransportError(str(error)) from None
        if cut is not None:
            self.table.note_cut()
        if cut is not None and self.worker == cut.dies:
            raise Killed
        return found


class _Ticket:
    def __init__(self, wire: Breakable, op: int, ticket: Any) -> None:
        self._wire, self._op, self._ticket = wire, op, ticket

    def wait(self) -> Any:
        return self._wire.or_broken(self._op, self._ticket.wait)


class Table(in_memory._Table):
    """Where a generation meets."""

    noted = 0

    def await_cut(self) -> None:
        """Until those that get the answer have it."""
        with self._changed:
            self._changed.wait_for(lambda: self.noted >= 2 or self.gone, LIMIT_S)

    def note_cut(self) -> None:
        with self._changed:
            self.noted += 1
            self._changed.notify_all()

    def break_off(self) -> None:
        with self._changed:
            self.gone.update(range(self.workers))
            self._changed.notify_all()


class Hall:
    """A coordinator for threads: forms generations of who is alive, and lets newcomers in when all are at rest."""

    def __init__(self, workers: int, *cuts: Cut) -> None:
        self.cuts = {one.generation: one for one in cuts}
        self.alive = set(range(workers))
        self.lives = dict.fromkeys(range(workers), 0)
        self._turn = threading.Condition()
        self._here: dict[int, ReadyReport] = {}
        self._form = GenerationView(0, [])
        self._tables: dict[int, Table] = {}
        self._hold = self._save = False
        self._quits: set[int] = set()
        self._replies: dict[int, GenerationView | Continue] = {}
        self.hands: dict[int, int] = {}
        self.aborted = 0
        self.ends: list[Callable[[int, str], None]] = []
        self.forms: list[GenerationView] = []
        self.fails = False

    # --- what a test does ---

    def die(self, worker: int) -> None:
        with self._turn:
            self.alive.discard(worker)
            self._here.pop(worker, None)
            self._abort()

    def hold(self, save: bool = False) -> None:
        with self._turn:
            self._hold, self._save = True, save

    def quit(self, worker: int) -> None:
        with self._turn:
            self._hold = True
            self._quits.add(worker)

    def come(self, worker: int) -> None:
        with self._turn:
            self.lives[worker] += 1
            self.alive.add(worker)

    def table(self, generation: int, workers: int) -> Table:
        with self._turn:
            return self._tables.setdefault(generation, Table(workers, LIMIT_S))

    # --- what workers say ---

    @property
    def members(self) -> set[int]:
        return {one.worker for one in self._form.members if one.life == self.lives[one.worker]}

    def held(self, worker: int) -> bool:
        return self._hold and worker in self.members and self.aborted < self._form.generation

    def abort(self, generation: int) -> None:
        with self._turn:
            if generation == self._form.generation:
                self._abort()

    def stand(self, worker: int, here: ReadyReport) -> GenerationView | Continue:
        with self._turn:
            if here.generation > 0 and worker not in self.members:
                raise MemberOutError("you are out")
            self._here[worker] = here
            if here.generation <= 0 and self._form.generation and self.members & self.alive:
                self._hold = True
            if here.generation > 0 and not here.at_rest:
                self._abort()
            self._settle()
            if not self._turn.wait_for(lambda: worker in self._replies or self.fails, LIMIT_S) or self.fails:
                raise TransportError(f"worker {worker} waited for a generation in vain")
            return self._replies.pop(worker)

    def _abort(self) -> None:
        if self.aborted < self._form.generation:
            self.aborted = self._form.generation
            for worker, one in self._here.items():
                if one.at_rest:
                    self._here[worker] = ReadyReport(
                        one.generation, one.commits, one.hand, False, one.store, one.rounds
                    )
            if (table := self._tables.get(self._form.generation)) is not None:
                table.break_off()
        self._settle()

    def _settle(self) -> None:
        old = self.members & self.alive
        here = {worker: one for worker, one in self._here.items() if worker in self.alive}
        if not self._form.generation:
            if set(here) == self.alive:
                self._tell(here, False)
        elif old and old <= {worker for worker, one in here.items() if one.generation > 0}:
            mine = {worker: here[worker] for worker in old}
            if self.aborted >= self._form.generation:
                self._tell(mine, False)
            elif not self._sends_on(mine):
                self._tell({worker: one for worker, one in here.items() if worker not in self._quits}, True)
        elif self.aborted < self._form.generation:
            self._sends_on({worker: one for worker, one in here.items() if worker in old and one.at_rest})

    def _sends_on(self, mine: dict[int, ReadyReport]) -> bool:
        furthest = max((self.hands.get(worker, 0) for worker in self.members & self.alive), default=0)
        late = [worker for worker, one in mine.items() if one.hand < furthest]
        for worker in late:
            self._replies[worker] = Continue(self._form.generation, furthest)
            del self._here[worker]
        self._turn.notify_all()
        return bool(late)

    def _tell(self, here: dict[int, ReadyReport], rested: bool) -> None:
        same = rested and set(here) == self.members
        number = self._form.generation + (not same)
        members = [Member(worker, self.lives[worker], here[worker]) for worker in sorted(here)]
        gone = sorted(self.members - set(here))
        saves = self._save and same
        form = GenerationView(number, members, gone, "", saves)
        for worker in [*here, *(self._quits if rested else ())]:
            self._replies[worker] = form
            self._here.pop(worker, None)
        if rested:
            self.alive -= self._quits
            self._quits.clear()
            self._hold = self._save = self._save and not saves
        self._form = form
        self.forms.append(form)
        self._turn.notify_all()


class Standing:
    """One worker's side of the hall."""

    def __init__(self, hall: Hall, worker: int) -> None:
        self._hall, self._worker = hall, worker
        self.on_abort: Callable[[int, str], None] = lambda _generation, _why: None

    @property
    def held(self) -> bool:
        return self._hall.held(self._worker)

    @property
    def aborted(self) -> int:
        return self._hall.aborted

    def stand(self, here: ReadyReport) -> GenerationView:
        found = self._hall.stand(self._worker, here)
        assert isinstance(found, GenerationView)
        return found

    def at_rest(self, here: ReadyReport) -> GenerationView | Continue:
        return self._hall.stand(self._worker, here)

    def broken(self, generation: int, _why: str, forming: bool = False) -> None:
        self._hall.abort(generation)

    def doing(self, _text: str, hand: int, _waits: object = None) -> None:
        """A hold must not wait for one who has come further: nobody rests before a hand that another has begun."""
        with self._hall._turn:
            self._hall.hands[self._worker] = hand
            self._hall._settle()

    def quit(self) -> None:
        self._hall.quit(self._worker)

    def leave(self) -> None:
        with self._hall._turn:
            self._hall.alive.discard(self._worker)
            self._hall._settle()

    def close(self) -> None:
        pass


class Former:
    """Makes memory wires of generations."""

    address = "memory"

    def __init__(self, hall: Hall) -> None:
        self._hall = hall

    def form(self, form: GenerationView, rank: int) -> Breakable:
        table = self._hall.table(form.generation, len(form.members))
        return Breakable(rank, table, self._hall.cuts.get(form.generation))

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


def crew(
    workers: int,
    work: Callable[[int], Any],
    recipe: str | None = None,
    run: Path | None = None,
    again: int = 0,
    hall: Hall | None = None,
    **seat: Any,
) -> tuple[list[Any], Hall]:
    """What `work(worker)` returns at each worker, None for the killed; these are started `again` so often."""
    hall = hall or Hall(workers)
    if run is not None:
        run.mkdir(exist_ok=True)

    def sit(worker: int, life: int) -> Any:
        wire = ElasticTransport(worker, Standing(hall, worker), Former(hall))
        given_seat.set(
            WorkerContext(
                worker, workers, lambda _device: wire, recipe=recipe, run=run, life=life, **{"seed": 0} | seat
            )
        )
        try:
            found = work(worker)
            close()
            return found
        except Killed:
            hall.die(worker)
            return None
        except SystemExit:
            close()
            return "left"
        except BaseException:
            hall.die(worker)
            hall.fails = True
            abandon()
            raise

    def live(worker: int) -> Any:
        for life in range(again + 1):
            if life:
                hall.come(worker)
            found = contextvars.Context().run(sit, worker, life)
            if found is not None:
                return found
        return None

    with ThreadPoolExecutor(workers) as pool:
        done: list[Future[Any]] = [pool.submit(live, worker) for worker in range(workers)]
        errors = [error for one in done if (error := one.exception(timeout=3 * LIMIT_S)) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, TransportError))
    return [one.result() for one in done], hall
