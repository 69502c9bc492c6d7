"""Who gets which batch when nobody waits, and when all meet after all. A plain state machine.

A pass begins when a worker says so; whoever is free gets the next batch. All workers meet at the end of the pass, and
after every so many batches if they are to: each is told so once, before it gets a batch beyond. A pass is over when
nobody holds a batch any more; so whoever has none left waits until that is so, or until one comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stretto.data.leases import Dealt, DealtAmong, Free, Lease, Ledger
from stretto.membership.epoch_numbers import section_of


@dataclass(frozen=True, slots=True)
class DispatchReply:
    """What a worker that asked is told: its lease, or to meet the others, or with neither that nothing is left.

    `samples` counts those handed out in the pass so far. `cut` says that the meeting is only for keeping what there is.
    """

    lease: Lease | None
    samples: int
    meet: bool = False
    cut: bool = False


class BatchDispatcher:
    """The batches of one pass after the other, handed to whoever is free."""

    def __init__(self, workers: int) -> None:
        self.members = set(range(workers))
        self.number = 0
        self._all = workers
        self._ledger = Ledger([], Free())
        self._before: Sequence[int] = ()
        """What was settled of the pass before it began here."""
        self._leases: dict[int, Lease] = {}
        self._meet: int | None = None
        self._handed = self._samples = 0
        self.called: list[bool] = []
        """The meetings that were called, over all passes: whether each is only a cut."""
        self.may_call = True
        """Whether more of them may be called: not while somebody waits at the end of the pass."""
        self._heard: dict[int, int] = {}
        """Of how many of them each worker has been told."""
        self._due = 0
        """How many of them come of the batches handed out."""
        self._waiting: set[int] = set()
        """Those that have nothing left, and wait for the end of the pass."""
        self._out: set[int] = set()
        """Those whose script has left the pass early: the others do what is left."""

    @property
    def ledger(self) -> Ledger:
        """The books of the pass."""
        return self._ledger

    def begin(
        self,
        number: int,
        sizes: Sequence[int],
        meet: int | None = None,
        dealt: bool = False,
        settled: Sequence[int] = (),
    ) -> None:
        """Pass `number` begins, with batches of these sizes; workers `meet` after so many. Said twice, done once.

        Batches that are `dealt` are not for whoever is free, but for the workers in turn. Those that are `settled` were
        done before: then the others are for whoever is free. Each section counts its own meetings.
        """
        if number <= self.number:
            return
        if section_of(number) != section_of(self.number):
            self._handed = self._due * (meet or 0)
        self.number, self._meet = number, meet
        among = Dealt(self._all) if len(self.members) == self._all else DealtAmong(sorted(self.members))
        self._ledger = Ledger(sizes, among if dealt else Free())
        self._before = settled
        if settled:
            self._ledger.go_back(settled)
        self._leases, self._samples = {}, self._ledger.settled_samples
        self._waiting.clear()
        self._out.clear()

    def lease(self, worker: int, number: int) -> DispatchReply:
        """A worker is free. What it asks of a pass that is over, it gets nothing for."""
        if number != self.number or worker not in self.members:
            return DispatchReply(None, self._samples)
        heard = self._heard.get(worker, 0)
        if heard < len(self.called):
            self._heard[worker] = heard + 1
            return DispatchReply(None, self._samples, meet=True, cut=self.called[heard])
        lease = self._ledger.lease(worker) if worker not in self._out else None
        if lease is not None:
            self._leases[lease.batch] = lease
            self._handed += 1
            self._samples += lease.samples
            self._call_due()
        return DispatchReply(lease, self._samples)

    def call(self, worker: int) -> None:
        """All are to meet for a cut, if there still is a batch for the worker that asks."""
        if self.may_call and self._has(worker):
            self.called.append(True)

    def settle(self, worker: int, number: int, batches: Sequence[int]) -> int:
        """Work on these batches is in the agreed state; returns how many counted."""
        if number != self.number:
            return 0
        found = [lease for batch in batches if (lease := self._leases.get(batch)) and lease.worker == worker]
        return sum(self._ledger.settle(lease) for lease in found)

    def wait(self, worker: int, number: int, left: bool = False) -> None:
        """A worker has nothing left, and waits for the end of the pass. What it has not settled it never will.

        What one that has `left` the pass has not settled is for others, and it gets nothing more.
        """
        if worker not in self.members or number != self.number:
            return
        self._waiting.add(worker)
        if left:
            self._out.add(worker)
            self._samples -= self._ledger.give_back(worker)
        else:
            self._ledger.drop(worker)

    def release(self, all_known: bool = True) -> dict[int, bool]:
        """Those that wait no more: whether the pass is over for them, or there are batches again.

        It is not over before `all_known`, for some may have been called to a meeting that is not known of.
        """
        again = {worker: False for worker in self._waiting if self._has(worker) or self._is_called(worker)}
        told = again or (dict.fromkeys(self._waiting, True) if self.is_over and all_known else {})
        self._waiting -= told.keys()
        return told

    @property
    def is_over(self) -> bool:
        """Whether nobody holds a batch of the pass, and none is left."""
        return not self._ledger.outstanding and not any(map(self._has, self.members))

    def _has(self, worker: int) -> bool:
        """Whether there is something for a worker."""
        return worker not in self._out and self._ledger.has(worker)

    def leave(self, worker: int) -> int:
        """A worker has left: its batches go back. Returns their samples."""
        self.members.discard(worker)
        self._waiting.discard(worker)
        self._out.discard(worker)
        self._heard.pop(worker, None)
        back = self._ledger.give_back(worker)
        self._samples -= back
        return back

    def join(self, worker: int, met: int) -> None:
        """A newcomer is there, which need not come to the first `met` meetings.

        It does nothing of a pass that all others have left, and that is over for them.
        """
        if self.members and self.is_over and self._ledger.has(worker):
            self._out.add(worker)
        self.members.add(worker)
        self.called_at_least(met, cut=False)  # those who knew what they had been to may be dead
        self._heard[worker] = met

    def called_at_least(self, count: int, cut: bool) -> None:
        """Somebody has come to the meeting of this number."""
        self.called += [cut] * (count - len(self.called))

    def heard(self, worker: int, called: Sequence[bool]) -> None:
        """A worker has been told of these meetings, perhaps by one that is no more, and has not read of others."""
        if len(called) > len(self.called):
            self.called = list(called)
            self._due = self.called.count(False)
            self._handed = max(self._handed, self._due * (self._meet or 0))
        self._heard[worker] = len(called)

    # --- going back ---------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What has to be known to come back to this moment."""
        ledger = self._ledger
        return {"number": self.number, "settled": ledger.settled, "trained_by": ledger.trained_by}

    def go_back(self, state: dict[str, Any]) -> None:
        """Back to such a moment: what was settled after it is not, and everybody's leases are void.

        A moment of a pass that is over is the end of it, before the first batch of this one.
        """
        if state["number"] == self.number:
            self._ledger.go_back(state["settled"], state["trained_by"])
        else:
            self._ledger.go_back(self._before)
        self._leases, self._samples = {}, self._ledger.settled_samples
        self._waiting.clear()

    def _is_called(self, worker: int) -> bool:
        return self._heard.get(worker, 0) < len(self.called)

    def _call_due(self) -> None:
        """Call the meetings that the batches handed out so far ask for."""
        while self._meet is not None and self._due < self._handed // self._meet:
            self._due += 1
            if self.may_call:
                self.called.append(False)
