"""The ranks of one replica, connected for the life of the replica, and their waits for each other.

A generation may end while a rank waits for another rank of its replica, which itself waits for the next generation. So
the waiting rank reports that it is paused, and enters the next generation, in a thread of its own:

    rank 0                                  rank 1
    in an operation among workers           waits for the input of its stage, from rank 0
    AbortGeneration(g)                      AbortGeneration(g)
    ReadyReport(g)                          ReadyReport(g), by the thread
    GenerationView(g+1)                     GenerationView(g+1), by the thread
    repeats the operation
    sends the input of the next stage --->  continues
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from stretto.errors import BrokenTransportError, MemberOutError, NothingCameError, TransportError, explain
from stretto.membership.messages import GenerationView, Member, ReadyReport

if TYPE_CHECKING:
    from stretto.transport.elastic import AbortableTransport, Rendezvous


class Siblings:
    """One rank's end of the connection with the other ranks of its replica, made in its first generation."""

    def __init__(self, rank: int, ranks: int, rendezvous: Rendezvous) -> None:
        self.rank, self._ranks, self._rendezvous = rank, ranks, rendezvous
        self.group: AbortableTransport | None = None
        """The connected ranks; None before the first generation."""
        self._lock = threading.Lock()
        self._waits = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def address(self) -> str:
        """Address at which the other ranks reach this one; empty once they are connected."""
        return self._rendezvous.address if self.group is None else ""

    def connect(self, view: GenerationView, number: int) -> None:
        """Connect with the other ranks of worker `number`, once. Raise BrokenTransportError if one does not connect."""
        if self.group is not None:
            return
        own = view.ranks()[view.numbers.index(number)]
        ranks = [Member(rank, 0, ReadyReport(0, address=address)) for rank, address in enumerate(own.addresses)]
        self.group = self._rendezvous.form(GenerationView(view.generation, ranks), self.rank)

    def completed_in(self, generation: int) -> list[int]:
        """Return the generations in which the ranks have completed the operations of an attempt, this one included."""
        assert self.group is not None
        encoded = self.group.all_gather_bytes(msgspec.msgpack.encode(generation))
        return [msgspec.msgpack.decode(one, type=int) for one in encoded]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let `on_abort` act within. Raise MemberOutError if another rank has failed."""
        with self._lock:
            self._waits = True
        try:
            yield
        except NothingCameError as error:
            raise TransportError(ranks_apart(str(error))) from error
        except BrokenTransportError as error:
            raise MemberOutError(f"another rank of this worker has failed: {error}") from error
        finally:
            with self._lock:
                self._waits = False
                thread, self._thread = self._thread, None
            if thread is not None:
                thread.join()
            problem, self._error = self._error, None
            if problem is not None:
                raise problem

    def on_abort(self, act: Callable[[], None]) -> None:
        """Call a function in another thread if this rank waits for another one."""
        with self._lock:
            if self._waits and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._run, args=(act,), name="siblings", daemon=True)
                self._thread.start()

    def _run(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            self._error = error
            if self.group is not None:
                self.group.abort()

    def close(self) -> None:
        """Close the connections."""
        if self.group is not None:
            self.group.close()
        self._rendezvous.close()


def ranks_apart(why: str) -> str:
    """Return the error of ranks of one worker that run different operations."""
    return explain(
        f"the other ranks of this worker did not run what this one runs: {why}",
        got="a call of the model, of clip_grad_norm_ or of state_dict() in some processes of a worker only",
        expected="the same calls in all processes of a worker: stretto.rank() is equal in them, the loss may not be",
        to_type="evaluate= of stretto.distribute, or such calls outside of `if` on the process",
    )
