"""The desk of who deals batches: it lets workers tell each other bytes, and newcomers in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from stretto.data.dispatcher import BatchDispatcher
from stretto.data.leases import FirstCome, Ledger
from stretto.errors import UnevenLoopsError
from stretto.membership.loop_positions import LoopPosition, are_apart, explained
from stretto.parameter_server import messages as m
from stretto.parameter_server.framing import DTYPES, Chunks, FramingError, whole
from stretto.parameter_server.handler import Asked, CollectiveHandler, OutgoingMessage, shown
from stretto.parameter_server.snapshots import SnapshotStore

SKIPPED = 1000
"""Nobody knows how far the dead had come; the exchanges of those who come after them have numbers far beyond."""
NOBODY: list[Tensor] = []
"""What is answered when the root was lost."""


class DispatcherHandler:
    """Hands out batches, lets workers tell each other bytes, and lets newcomers in when nobody is in a meeting."""

    def __init__(
        self,
        workers: int,
        clock: Callable[[], float],
        shelf: SnapshotStore | None = None,
        cut_every_s: float | None = None,
        ends: SnapshotStore | None = None,
    ) -> None:
        self._clock, self._shelf, self._cut_every_s = clock, shelf, cut_every_s
        self._ends = ends
        """Keeps who has come to an end, and the last answer that those who are left may lack."""
        self._together = CollectiveHandler(workers, _gathered, Asked(clock))
        self.dispatcher = BatchDispatcher(workers)
        self._age = -1 if shelf is not None and shelf.cuts() else 0
        if self._age < 0:
            self._together.tell_anew()
        self._begun = m.RolledBack(0, -1, [])
        """How the age began."""
        self._is_torn = False
        """Whether all have to go back, for only some shards have an update."""
        self._cut_at, self._called_at = -1, clock()
        self._is_over = False
        """Whether the pass was over at the last cut."""
        self._order: tuple[int, Tensor] = 0, torch.empty(0, dtype=torch.uint8)
        """The order of a pass, as it was told, and which pass that is."""
        self._begin_said: tuple[int, list[int], int | None, bool] = 0, [], None, False
        self._seen = set(range(workers)) if self._age == 0 else set()
        """The members that this process has heard of: the others may have been called to a meeting."""
        self._ending: set[int] = set()
        """The members that are in the meeting at the end of the pass, or on their way to it."""
        self._apart: dict[int, tuple[int, int]] = {}
        """The members that are in no meeting: at which exchange they are, and how often they were called to one."""
        self._op = self._met = 0
        self._joining: dict[int, int] = {}
        self._closing: dict[int, int] = {}
        self._last: dict[int, tuple[int, m.Leased]] = {}
        """The last lease of each worker, which may be asked for again."""
        self._ended: dict[int, bool] = {}
        """The workers that have come to an end, and whether they quit: the others go on, and others may come."""
        self._take_up_ends()
        self._take_up_order()

    def expects(self, worker: int, head: m.Header) -> None:
        """Anything: what it brings is all the memory that it takes."""

    def streams(self, worker: int, head: m.Header) -> bool:
        """Nothing is of use before it is whole."""
        return False

    def write(self, worker: int, index: int, at: int, piece: Tensor) -> None:
        """Never asked for."""

    def take(self, worker: int, head: m.Header, tensors: list[Chunks]) -> list[OutgoingMessage]:
        """A whole parcel."""
        body, number = head.body, head.number
        if isinstance(body, m.Lease | m.Close | m.Snapshot | m.Count) and (self._is_torn or body.age != self._age):
            return [OutgoingMessage(worker, number, m.StaleRequest(self._age))]
        if isinstance(body, m.Lease):
            return [OutgoingMessage(worker, number, self._lease(worker, number, body)), *self._release()]
        if isinstance(body, m.Settle):
            if body.age == self._age:
                self.dispatcher.settle(worker, body.number, body.batches)
            return self._release()
        if isinstance(body, m.Gather | m.Keep | m.Barrier):
            return self._meet(worker, head, tensors)
        if isinstance(body, m.Heard):
            return self._heard(
                worker, body, [whole(one, kind) for one, (kind, _) in zip(tensors, head.tensors, strict=True)]
            )
        if isinstance(body, m.Begin):
            return self._begin(worker, head, body, tensors)
        if isinstance(body, m.Close) and body.number != self.dispatcher.epoch_number:
            return [OutgoingMessage(worker, number, m.Closed(True))]
        if isinstance(body, m.Close):
            self._closing[worker] = number
            self.dispatcher.wait(worker, body.number, body.left)
            return self._release()
        return [*self._of_members(worker, head, tensors), *self._admit()]

    def _of_members(self, worker: int, head: m.Header, tensors: list[Chunks]) -> list[OutgoingMessage]:
        """What is said of who is there, and of going back."""
        body, number = head.body, head.number
        if isinstance(body, m.LeaveBarrier):
            self._apart[worker] = body.op, body.met
            self._op, self._met = max(self._op, body.op), max(self._met, body.met)
            return []
        if isinstance(body, m.ReplayResult):
            self._keep(body.number, _flat(head, tensors, torch.uint8))
            return []
        if isinstance(body, m.Group):
            self._together.group(body.generation, body.members)
            return []
        if isinstance(body, m.Join):
            before = self.gone(worker) if worker in self._together.members else []
            self._joining[worker] = number
            return before
        if isinstance(body, m.Finish | m.Quit):
            self._note_end(worker, isinstance(body, m.Quit))
            return [OutgoingMessage(worker, number, m.Result()), *self._go_without(worker)]
        if isinstance(body, m.Count):
            ledger = self.dispatcher.ledger if body.number == self.dispatcher.epoch_number else Ledger([], FirstCome())
            trained = torch.tensor([*ledger.samples_by_worker().items()], dtype=torch.int64).reshape(-1)
            return [
                OutgoingMessage(worker, number, m.Result(), [torch.tensor(ledger.counts(), dtype=torch.uint8), trained])
            ]
        if isinstance(body, m.Snapshot):
            self._cut(body.op, body.kept)
            return [OutgoingMessage(worker, number, m.Closed(self._is_over))]
        if isinstance(body, m.ListSnapshots):
            return [OutgoingMessage(worker, number, m.Has(self._shelf.cuts() if self._shelf else [], 0, self._age))]
        if isinstance(body, m.Rollback):
            return self._back(worker, number, body)
        raise FramingError(f"the coordinator was told {type(body).__name__}")

    def leave(self, worker: int) -> list[OutgoingMessage]:
        """A worker has left: its batches go back."""
        self.dispatcher.leave(worker)
        for kept in (self._closing, self._apart):
            kept.pop(worker, None)
        return [*self._together.leave(worker), *self._release(), *self._admit()]

    def gone(
        self, worker: int, number: int = 0, batches: Sequence[int] = (), torn: bool = False
    ) -> list[OutgoingMessage]:
        """A worker is gone: what it did counts, what it had not done goes back, and the others go on without it.

        Where some shards have its last update and others do not, all go back to the last cut: there all have the same.
        """
        self._is_torn = self._is_torn or (torn and self._shelf is not None)
        self.dispatcher.settle(worker, number, batches)
        self.dispatcher.leave(worker)
        for kept in (self._closing, self._joining, self._last, self._apart):
            kept.pop(worker, None)
        self._ending.discard(worker)
        return [*self._together.gone(worker), *self._release(), *self._admit()]

    def work_of(self, worker: int) -> m.Left:
        """Nothing is worked on here."""
        return m.Left(0, [])

    # --- batches ------------------------------------------------------------------------------------------------

    def _lease(self, worker: int, number: int, body: m.Lease) -> m.Leased:
        asked, leased = self._last.get(worker, (0, None))
        if leased is not None and asked == number:
            return leased
        self._ending.discard(worker)
        self.dispatcher.may_call_barrier = not self._ending and self._together.members <= self._seen
        self._call_due(worker)
        handed = self.dispatcher.lease(worker, body.number)
        leased = m.Leased(handed.lease.batch if handed.lease else None, handed.samples, handed.barrier, handed.snapshot)
        self._last[worker] = number, leased
        return leased

    def _call_due(self, worker: int) -> None:
        """Call all to a cut, when it is time and no other meeting makes one."""
        if self._shelf is None or self._cut_every_s is None or self._begin_said[2] is not None:
            return
        if self._clock() - self._called_at >= self._cut_every_s:
            self._called_at = self._clock()
            self.dispatcher.call_snapshot_barrier(worker)

    def _release(self) -> list[OutgoingMessage]:
        """Answer those that wait for the end of the pass, if it has come, or if there are batches again."""
        told = self.dispatcher.release(self._together.members <= self._seen)
        self._ending |= {one for one, over in told.items() if over}
        return [
            OutgoingMessage(one, self._closing.pop(one), m.Closed(over))
            for one, over in told.items()
            if one in self._closing
        ]

    def _begin(self, worker: int, head: m.Header, body: m.Begin, tensors: list[Chunks]) -> list[OutgoingMessage]:
        if body.meet is not None and body.meet < 1:
            raise FramingError(f"a meeting after every {body.meet} batches")
        sizes = _flat(head, tensors, torch.int64).tolist()
        if body.number > self.dispatcher.epoch_number:
            self.dispatcher.begin(body.number, sizes, body.meet, body.dealt, body.settled)
            self._begin_said = body.number, sizes, body.meet, body.dealt
        return [OutgoingMessage(worker, head.number, m.Result())]

    # --- meetings, and who may come -----------------------------------------------------------------------------

    def _meet(self, worker: int, head: m.Header, tensors: list[Chunks]) -> list[OutgoingMessage]:
        """Everyone's bytes, or the root's."""
        body = head.body
        assert isinstance(body, m.Gather | m.Keep | m.Barrier)
        self._op = max(self._op, body.op)
        self._apart.pop(worker, None)
        self._ending.discard(worker)
        self._ending |= {worker} if isinstance(body, m.Barrier) and not body.call else set()
        if isinstance(body, m.Barrier):
            self._seen.add(worker)  # it says which call has led to it
            self.dispatcher.note_barriers(body.call, body.cut)
            self._met = max(self._met, body.call)
            posts = self._together.lay(worker, body.op, head.number, (None, torch.empty(0, dtype=torch.uint8), None))
            return [*[OutgoingMessage(one.worker, one.number, one.body) for one in posts], *self._release()]
        flat, posts = _flat(head, tensors, torch.uint8), []
        if isinstance(body, m.Keep) and body.number == self._order[0]:  # whoever has heard it may be dead
            posts = self._together.know(worker, body.op, sorted(self._together.members), [self._order[1]])
        posts += self._together.lay(worker, body.op, head.number, (body.root, flat, body.at))
        if isinstance(body, m.Keep) and posts and posts[0].tensors:
            self._keep(body.number, posts[0].tensors[0])
        return posts

    def _heard(self, worker: int, body: m.Heard, found: list[Tensor]) -> list[OutgoingMessage]:
        """What an exchange came to that this process may not know of; it does not say where the worker stands now."""
        self._op, self._met = max(self._op, body.op), max(self._met, body.call)
        self.dispatcher.note_barriers(body.call, body.cut)
        return [*self._together.know(worker, body.op, body.members, found), *self._release()]

    def _keep(self, number: int, order: Tensor) -> None:
        if number > self._order[0]:
            self._order = number, order.clone()

    def _admit(self) -> list[OutgoingMessage]:
        """Let newcomers in while no member is in a meeting, so that all are at the same exchange.

        That is where the members are: one that is dead may have come to a meeting which they are still to come to.
        """
        members, left = self._together.members, self._together.left
        is_over = False in self._ended.values() or (bool(members) and members <= left)
        if not self._joining or (members and not is_over and (self._age < 0 or members - left - self._apart.keys())):
            return []
        joining, self._joining = self._joining, {}
        if is_over or self._age < 0:  # if nobody is left to say that a server was lost those who come do
            body: m.Body = m.Refused(m.OVER) if is_over else m.StaleRequest(self._age)
            return [OutgoingMessage(one, parcel, body) for one, parcel in joining.items()]
        number, order = self._order
        if not members:
            self._op += SKIPPED
        op, met = max(self._apart.values(), default=(self._op, self._met))
        for worker in joining:
            self._together.join(worker)
            self.dispatcher.join(worker, met)
            self._last.pop(worker, None)
            self._seen.add(worker)
            if number:
                self._apart[worker] = op, met
        if self._ended.keys() & joining:
            self._ended = {worker: quits for worker, quits in self._ended.items() if worker not in joining}
            self._keep_ends()
        here = sorted(self._together.members)
        self._together.tell_anew()
        joined = m.Joined(self._age, number, op, met, here, self.dispatcher.barriers_called[:met])
        return [OutgoingMessage(worker, parcel, joined, [order]) for worker, parcel in joining.items()]

    # --- who has come to an end ---------------------------------------------------------------------------------

    def _note_end(self, worker: int, quits: bool) -> None:
        """A worker has come to an end: it says nothing again to a process that is started after this one."""
        self._ended.setdefault(worker, quits)
        self._keep_ends()

    def _keep_ends(self) -> None:
        """Keep who has come to an end, and the last answer of all."""
        if self._ends is None:
            return
        op, body, found = self._together.last
        gave = body.members if isinstance(body, m.Among) else None
        number = max(self._ends.cuts(), default=0) + 1
        self._ends.put(number, {"ended": sorted(self._ended.items()), "op": op, "gave": gave}, found)

    def _go_without(self, worker: int) -> list[OutgoingMessage]:
        """A worker has come to an end."""
        return self.gone(worker) if self._ended[worker] else self.leave(worker)

    def _take_up_ends(self) -> None:
        """What was kept of them by another process."""
        kept = self._ends.get(max(self._ends.cuts(), default=0)) if self._ends is not None else None
        if kept is None:
            return
        facts, found = kept
        self._ended = dict(facts["ended"])
        for worker in self._ended:
            self._seen.add(worker)
            self._go_without(worker)
        body = m.Result() if facts["gave"] is None else m.Among(facts["gave"])
        self._together.take_up(facts["op"], body, found)

    # --- going back ---------------------------------------------------------------------------------------------

    def _take_up_order(self) -> None:
        """Of the pass of the newest cut: those who have heard it may be dead."""
        kept = self._shelf.get(max(self._shelf.cuts(), default=0)) if self._shelf is not None else None
        if kept is not None:
            facts, (_, order) = kept
            self._keep(facts["order"], order)

    def _cut(self, cut: int, is_kept: bool) -> None:
        """Keep what there is, once; not what a shard had no room for, for nobody could go back to it."""
        if self._shelf is None or cut <= self._cut_at:
            return
        self._cut_at, self._is_over = cut, self.dispatcher.is_over
        if not is_kept:
            return
        number, sizes, meet, dealt = self._begin_said
        facts = {"begin": [number, meet, dealt], "order": self._order[0], "age": self._age, "over": self._is_over}
        facts |= self.dispatcher.state()
        self._shelf.put(cut, facts, [torch.tensor(sizes, dtype=torch.int64), self._order[1]])

    def _back(self, worker: int, number: int, body: m.Rollback) -> list[OutgoingMessage]:
        """A server was lost: who says so is told how the new age begins; who looked before the newest cut looks again.

        That one all shards have, and somebody may have gone on from it.
        """
        if self._shelf is not None and body.newest < max(self._shelf.cuts(), default=-1):
            return [OutgoingMessage(worker, number, m.StaleRequest(self._age))]
        posts = self._go_back(worker, body)
        return [*posts, OutgoingMessage(worker, number, self._begun), *self._release()]

    def _go_back(self, worker: int, body: m.Rollback) -> list[OutgoingMessage]:
        """The first to say that a server was lost says to which cut all go back. All that wait for a batch are told."""
        self._met = max(self._met, body.met)
        self._seen.add(worker)
        self.dispatcher.note_notified(worker, body.calls)
        if self._shelf is None or body.age < self._age:
            return []
        here = self._shelf.cuts()
        usable = [cut for cut in body.cuts if cut in here]
        if body.least <= 0 and self._cut_at < 0 and not here:  # not all shards have got their parameters
            self._age, self._begun, self._is_torn = 0, m.RolledBack(0, -1, body.births), False
            return []
        if not usable:
            raise FramingError("a server was lost, and there is no cut that all of them have")
        kept = self._shelf.get(usable[-1])
        assert kept is not None
        facts, (sizes, order) = kept
        number, meet, dealt = facts["begin"]
        if number > self.dispatcher.epoch_number:
            self.dispatcher.begin(number, sizes.tolist(), meet, dealt)
            self._begin_said = number, sizes.tolist(), meet, dealt
        self._keep(facts["order"], order)
        self._shelf.forget(usable[-1])
        self.dispatcher.roll_back(facts)
        self._is_over = facts["over"]
        self._age, self._cut_at = max(body.age, body.least, facts["age"]) + 1, usable[-1]
        self._op = max(self._op, usable[-1])
        self._shelf.put(usable[-1], {**facts, "age": self._age}, [sizes, order])
        self._begun, self._is_torn = m.RolledBack(self._age, usable[-1], body.births), False
        waiting, self._closing = self._closing, {}
        self._last.clear()
        return [OutgoingMessage(one, parcel, m.StaleRequest(self._age)) for one, parcel in waiting.items()]


def _flat(head: m.Header, tensors: list[Chunks], dtype: torch.dtype) -> Tensor:
    """The one tensor of a parcel."""
    if len(tensors) != 1 or DTYPES[head.tensors[0][0]] is not dtype:
        raise FramingError(f"{shown(head.tensors)} where one tensor of {dtype} belongs")
    return whole(tensors[0], head.tensors[0][0])


def _gathered(said: Mapping[int, tuple[int | None, Tensor, LoopPosition | None]]) -> list[Tensor]:
    """Everyone's bytes, or the root's; `NOBODY` when that is gone."""
    places = {worker: at for worker, (_, _, at) in said.items() if at is not None}
    if are_apart(places.values()):
        raise UnevenLoopsError(explained(places))
    roots = {root for root, _, _ in said.values()}
    if len(roots) > 1 and (None in roots or roots <= said.keys()):  # some may not have heard who is gone
        raise ValueError("the workers do different things: some gather, some tell")
    root = roots.pop() if len(roots) == 1 else -1
    if root is None:
        return [one for _, one, _ in said.values()]
    if root in said:
        return [said[root][1]]
    return NOBODY
