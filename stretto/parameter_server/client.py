"""A wire through a parameter server: what all say together, and what a worker says to the server alone.

It speaks over links, and does not know what those are made of: sockets, or a simulated network.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from stretto.collective_ops import AllGather, AllReduceMean
from stretto.collective_ops import CollectiveOp as Asked
from stretto.errors import BrokenTransportError, TransportError
from stretto.membership.loop_positions import LoopPosition
from stretto.parameter_server import messages as m
from stretto.parameter_server.barrier import GENERATION
from stretto.parameter_server.client_types import (
    AllGatherHandle,
    AllReduceHandle,
    BrokenHandle,
    Channel,
    PushHandle,
    RollbackRequiredError,
    RuleMemory,
    Spoken,
    Update,
    ranges,
    shared_out,
)
from stretto.parameter_server.framing import Chunks, whole
from stretto.parameter_server.shard import named
from stretto.transport.interface import Message, Traffic, as_bytes, made

SETTLED_AT_ONCE = 50_000
"""So many batches fit into the head of a parcel."""


class ParameterServerClient:
    """One worker's end of a parameter server, over links to the coordinator and to every shard.

    `worker` and `workers` are this worker's place among those that are there, and how many those are. They change with
    the answer of an exchange of all, the same for all. `number` is this worker's own for good.
    """

    def __init__(
        self, worker: int, workers: int, coordinator: Channel, shards: Sequence[Channel], elastic: bool = False
    ) -> None:
        self.number, self.members, self.expected = worker, list(range(workers)), workers
        self._coordinator, self.links = coordinator, shards
        self.elastic = elastic
        """Whether servers that are lost come back, so that there must be cuts to go back to."""
        self.age = 0
        """How often the servers went back to a cut."""
        self.cut_at = -1
        """The cut that they went back to last."""
        self.joined: m.Joined | None = None
        """Where the run stood, for a worker that came when it was under way."""
        self.order: tuple[int, bytes] = 0, b""
        """The order of a pass as it was told, and of which pass."""
        self.keeps: int | None = None
        """What is told next is the order of this pass, and is kept for newcomers."""
        self.calls: list[bool] = []
        """The meetings that this worker was told of: whether each is for a cut alone."""
        self.met = 0
        """How many of them it has been to."""
        self.doing: Callable[[str, int], None] = lambda _text, _hand: None
        """Told what this worker does, for those who ask, and with which hand."""
        self.exchanges_begun: Callable[[], int] = lambda: -1
        """Returns how many exchanges among all this worker has begun, for its heartbeats."""
        self.place: Callable[[], LoopPosition | None] = lambda: None
        """Where the script is in its loop, for the coordinator to compare in exchanges of all."""
        self.on_cut: Callable[[bool], bool] = lambda _called: True
        """Comes to a meeting for a cut, with nothing of this worker under way; whether the pass was over then."""
        self.on_recovered: Callable[[], None] = lambda: None
        """Takes the servers' parameters after a rollback. Raises RollbackRequiredError if a server was lost since."""
        self._op = self._pushed = 0
        self._is_apart = False
        self._begun: tuple[m.Begin, Tensor] | None = None
        self._settled: list[int] = []
        self._group: m.Group | None = None
        """Who exchanges from the last generation on."""
        self._spoken = Spoken(elastic)
        self._heard: tuple[m.Heard, list[Chunks]] | None = None
        """The last answer of the coordinator to all, which another may lack: of those before it nobody can."""
        self._aborted = False
        self._on_close: list[Callable[[], None]] = []

    @property
    def worker(self) -> int:
        """This worker's place among those that are there."""
        return bisect.bisect_left(self.members, self.number)

    @property
    def workers(self) -> int:
        """How many are there."""
        return len(self.members)

    def when_closed(self, then: Callable[[], None]) -> None:
        """What is to be done once this end is closed."""
        self._on_close.append(then)

    @property
    def begun(self) -> int:
        """Number of exchanges among all that this worker has begun; the same at all workers between two of them."""
        return self._op

    @property
    def shards(self) -> int:
        """How many shards the server has."""
        return len(self.links)

    # --- all together -------------------------------------------------------------------------------------------

    def submit(self, op: Asked) -> AllReduceHandle | AllGatherHandle | BrokenHandle:
        """Begin an ask: of a mean every shard adds up its range, of messages one shard gives all to all."""
        if self._aborted:
            return BrokenHandle()
        self._op += 1
        self._is_apart = False
        flat = op.tensor.detach()
        sent = flat.cpu().contiguous()
        if isinstance(op, AllReduceMean):
            numbers = [
                self._spoken.say(link, self._op, "mean", sent[start:stop])
                for link, (start, stop) in zip(self.links, ranges(sent.numel(), self.shards), strict=True)
            ]
            return AllReduceHandle(self._spoken, self.links, flat, numbers, self.workers)
        assert isinstance(op, AllGather)
        link = self.links[self._op % self.shards]
        return AllGatherHandle(self._spoken, link, flat, self._spoken.say(link, self._op, "every", sent))

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """The message of every worker, in their order."""
        return self._gathered(m.Gather(self._op + 1, None, self.place()), made(message))

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """The root's message, at every worker. When the root is gone the first of those that are left tells."""
        while True:
            if self.keeps is not None and self.order[0] == self.keeps:
                return self.order[1]  # it was told before this worker came
            one = self.members[root]
            op, keeps = self._op + 1, self.keeps
            at = self.place()
            body = m.Gather(op, one, at) if keeps is None else m.Keep(op, one, keeps, at)
            found = self._gathered(body, made(message) if one == self.number else b"")
            if found:
                self.order = (keeps, found[0]) if keeps is not None else self.order
                return found[0]
            root = 0

    def _gathered(self, body: m.Gather | m.Keep, message: bytes) -> list[bytes]:
        if self._aborted:
            raise BrokenTransportError("the exchange was broken off")
        self._op += 1
        self._is_apart = False
        return self._told(self._answer(body, [as_bytes(message)]))

    def _answer(self, body: m.Gather | m.Keep | m.Barrier, given: list[Tensor]) -> list[Chunks]:
        """The answer to an exchange of all at the coordinator."""
        return self._hear(body, self._coordinator.send(body, given))

    def _hear(self, body: m.Gather | m.Keep | m.Barrier, number: int) -> list[Chunks]:
        """The same, when it has come."""
        reply, found = self._coordinator.wait(number)
        if isinstance(reply, m.Among):
            self.members = reply.members
        if self.elastic:
            about = (body.call, body.cut) if isinstance(body, m.Barrier) else ()
            self._heard = m.Heard(body.op, self.members, *about), found
        return found

    # --- generations --------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Break off what is under way. From any thread, at any time; who waits gets BrokenTransportError."""
        self._aborted = True
        for link in (self._coordinator, *self.links):
            link.abort()

    def regroup(self, generation: int, members: Sequence[int], me: int) -> None:
        """Exchange with these from now on; what was under way before is forgotten."""
        self.members, self.number = sorted(members), me
        self._op = generation * GENERATION
        self._spoken.forget()
        self._heard = None
        self._group = m.Group(generation, self.members)
        for link in (self._coordinator, *self.links):
            link.forget()
            link.send(self._group)
        self._aborted = False

    def traffic(self) -> Traffic:
        """The bytes of this worker's connections, as its links count them."""
        pairs = [link.traffic() for link in (self._coordinator, *self.links)]
        return Traffic(sum(sent for sent, _ in pairs), sum(received for _, received in pairs), counted=True)

    def quit(self) -> None:
        """Leave in good order: the others go on without this worker."""
        links = (*self.links, self._coordinator)
        for link, number in [(link, link.send(m.Quit())) for link in links]:
            with contextlib.suppress(TransportError):
                link.wait(number)
        self.close()

    def close(self) -> None:
        """Leave: nobody waits for this worker any more."""
        for link in (self._coordinator, *self.links):
            link.close()
        while self._on_close:
            self._on_close.pop(0)()

    # --- one by one ---------------------------------------------------------------------------------------------

    def open(self, arena: int, recipe: str, parts: Sequence[Tensor], kept: RuleMemory | None = None) -> None:
        """Give the shards their ranges of the parameters, and the rule; with what such a rule has `kept`, if it did."""
        kept = kept or RuleMemory()
        given = [*parts, *itertools.chain.from_iterable(kept.tensors.values())]
        shares = [[one.detach().cpu() for one in found] for found in shared_out(given, self.shards)]
        cut, is_open = self._op + 1, False
        while not is_open:
            body = m.Open(arena, recipe, self.expected, cut, self.age, list(kept.tensors), kept.arrivals)
            try:
                for link, share in zip(self.links, shares, strict=True):
                    link.wait(link.send(body, share))
                is_open = not self.elastic or bool(self._cut_coordinator(cut))
            except RollbackRequiredError:
                self.recover()

    def push(self, arena: int, update: Update, lengths: Sequence[int]) -> PushHandle:
        """Send an update to all shards; the ticket brings the newest version once this worker may go on.

        `lengths` are those of the parts of the parameters.
        """
        numbers = []
        self._pushed = update.seq
        for shard, link in enumerate(self.links):
            about = self._begun[0].number if self._begun else 0, list(update.batches)
            body = m.Push(arena, update.seq, update.versions[shard], update.samples, update.lr, self.age, *about)
            numbers.append(link.send(body, [one.detach().cpu() for one in update.messages[shard]]))
        return PushHandle(self.links, numbers, lengths, update.messages)

    def meet(self, seq: int, called: bool = False) -> bool:
        """Come together with all, after update `seq`; no shard lets others wait for this worker till all have come.

        What there is then is kept. Whether the pass was over: it may not be any more, if servers went back to a cut.
        If it was `called` it is the first of those that this worker was told of and has not been to.
        """
        about = (self.met + 1, self.calls[self.met]) if called else (0, False)
        self._rest(seq, self._op + 1)
        self._op, self._is_apart = self._op + 1, False  # until here this worker stands where it stood
        self._answer(m.Barrier(self._op, *about), [])
        self.met += called
        return self.cut()

    def cut(self) -> bool:
        """Keep what there is after an exchange of all, at every service; whether the pass was over then.

        The coordinator comes last: what it has kept all have, and who was told so needs not go back beyond it.
        """
        while self.elastic:
            try:
                here = self._ask_all([m.Snapshot(self._op, self.age)] * self.shards)
                is_kept = all(isinstance(one, m.Has) and one.cuts for one, _ in here)
                found = self._cut_coordinator(self._op, is_kept)
                return isinstance(found, m.Closed) and found.over
            except RollbackRequiredError:
                self.recover()
                self._rest(self._pushed, self._op)
        return True

    def _cut_coordinator(self, cut: int, is_kept: bool = True) -> m.Body:
        return self._coordinator.wait(self._coordinator.send(m.Snapshot(cut, self.age, is_kept)))[0]

    def _rest(self, seq: int, meeting: int | None) -> None:
        """Let no shard hold others back for this worker."""
        self._ask_all([m.EnterBarrier(seq, meeting, self.age)] * self.shards)

    def apart(self) -> None:
        """This worker has done with the meeting of all, and goes on by itself."""
        if not self._is_apart:
            self._is_apart = True
            self._coordinator.send(m.LeaveBarrier(self._op, self.met))

    def read(self, lengths: Sequence[int], flush: bool = False) -> PushHandle:
        """Ask for the newest version; `flush` applies what was being collected."""
        return PushHandle(self.links, [link.send(m.Read(flush, self.age)) for link in self.links], lengths)

    def recall(self, parts: int) -> RuleMemory:
        """What the rule keeps besides so many parts of parameters, when all have met and nothing is under way.

        Raises RollbackRequiredError when a server was lost.
        """
        found = self._ask_all([m.Recall(self.age)] * self.shards)
        body = found[0][0]
        assert isinstance(body, m.Remembers)
        by_part = zip(*(pieces for _, pieces in found), strict=True)
        flat = [torch.cat(list(itertools.chain.from_iterable(shares))) for shares in by_part]
        return RuleMemory(named(body.names, flat, parts), body.arrivals)

    def begin(
        self, number: int, sizes: Sequence[int], meet: int | None, dealt: bool, settled: Sequence[int] = ()
    ) -> None:
        """Pass `number` begins, with batches of these sizes; workers meet after every `meet` of them.

        They go to whoever is free, or are `dealt` in turn, but for those that are `settled`.
        """
        begin = m.Begin(number, meet, dealt, list(settled))
        self._begun = begin, torch.tensor(sizes, dtype=torch.int64)
        self._settled = []
        self._begin()
        if self.joined is None or self.joined.number != number:
            self.cut()
        self.apart()

    def keep_order(self, number: int, order: bytes) -> None:
        """Keep an order that was not told to anybody, for newcomers."""
        self.order = number, order
        self._coordinator.send(m.ReplayResult(number), [as_bytes(order)])

    def _begin(self) -> None:
        assert self._begun is not None
        body, sizes = self._begun
        if self.elastic:
            self._coordinator.send(m.ReplayResult(self.order[0]), [as_bytes(self.order[1])])
        self._coordinator.wait(self._coordinator.send(body, [sizes]))

    def ask_lease(self, number: int) -> tuple[int, int]:
        """Ask for a batch; `lease` waits for the answer. Which parcel asks, and at which age of the servers."""
        return self._coordinator.send(m.Lease(number, self.age)), self.age

    def lease(self, asked: tuple[int, int]) -> m.Leased:
        """The batch that was asked for. Raises RollbackRequiredError when the answer is of an age that is over.

        What it says is void then, be it a batch or a call to a meeting: the others were not told that it was heard.
        """
        parcel, age = asked
        body, _ = self._coordinator.wait(parcel)
        if age != self.age:
            raise RollbackRequiredError("the servers went back to a cut after this was asked")
        if not isinstance(body, m.Leased):
            raise TransportError(f"the coordinator answered {type(body).__name__} to an ask for a batch")
        if body.meet:
            self.calls.append(body.cut)
        return body

    def settle(self, number: int, batches: Sequence[int]) -> None:
        """The work on these batches is in the server's parameters."""
        self._settled += batches
        self._coordinator.send(m.Settle(number, list(batches), self.age))

    def is_over(self, number: int, left: bool = False) -> bool:
        """Wait until nobody holds a batch of the pass any more, and hold nobody back meanwhile.

        False when there are batches again, or a meeting is called. Who has `left` the pass gets no more of it.
        """
        self.apart()
        self._rest(self._pushed, None)
        body, _ = self._coordinator.wait(self._coordinator.send(m.Close(number, self.age, left)))
        return not isinstance(body, m.Closed) or body.over

    def counted(self, number: int) -> tuple[Tensor, dict[int, int]]:
        """Return the counts of each sample of an epoch, and of the samples that each worker has trained.

        Both are empty for an epoch that is over.
        """
        while True:
            try:
                return self.count(number)
            except RollbackRequiredError:
                self.recover()

    def count(self, number: int) -> tuple[Tensor, dict[int, int]]:
        """The same, once. Raises RollbackRequiredError when a server was lost."""
        _, (pieces, pairs) = self._coordinator.wait(self._coordinator.send(m.Count(number, self.age)))
        workers, samples = whole(pairs, "int64").reshape(-1, 2).T.tolist()
        return whole(pieces, "uint8"), dict(zip(workers, samples, strict=True))

    # --- coming late, and going back ----------------------------------------------------------------------------

    def join(self) -> None:
        """Come to a run that is under way: wait until no member is in a meeting, and learn where it stands."""
        try:
            body, tensors = self._coordinator.wait(self._coordinator.send(m.Join()))
        except RollbackRequiredError:
            self.recover()
            self.join()
            return
        if not isinstance(body, m.Joined):
            raise TransportError(f"the coordinator answered {type(body).__name__} to a newcomer")
        self.members, self.age, self._op = list(body.members), body.age, body.op
        self.met, self.calls = body.met, list(body.calls)
        here = self._joined_shards()
        while any(one.age < 0 for one in here):  # one was started again, and has no parameters yet
            self.recover()
            here = self._joined_shards()
        if not body.number:
            return
        self.order = body.number, self._told(tensors)[0]
        self._is_apart = True
        clock = min(one.clock for one in here)
        self._ask_all([m.ResumeClock(clock)] * self.shards)
        self.joined = msgspec.structs.replace(body, arena=here[0].arena, clock=clock)

    def _joined_shards(self) -> list[m.Joined]:
        return [self._joined(one) for one, _ in self._ask_all([m.Join()] * self.shards)]

    @staticmethod
    def _joined(body: m.Body) -> m.Joined:
        if not isinstance(body, m.Joined):
            raise TransportError(f"a server answered {type(body).__name__} to a newcomer")
        return body

    def recover(self) -> None:
        """Go back to the cut from which the servers begin anew, with all workers. What was settled since is undone.

        Once more, if servers are lost meanwhile.
        """
        while not self._recovered():
            pass

    def _recovered(self) -> bool:
        if not self._go_back():
            return False
        self._settled, self._pushed = [], 0
        if self._begun is not None:
            self._begin()
        try:
            if self.cut_at >= 0:
                self.on_recovered()
        except RollbackRequiredError:
            return False
        return True

    def _go_back(self) -> bool:
        """Agree with the others, through the coordinator, on a cut that all shards have; False to look again."""
        kept, _ = self._coordinator.wait(self._coordinator.send(m.ListSnapshots()))
        assert isinstance(kept, m.Has)
        has = [body for body, _ in self._ask_all([m.ListSnapshots()] * self.shards) if isinstance(body, m.Has)]
        least = max(one.age for one in has)
        cuts = sorted(set.intersection(*(set(one.cuts) for one in has)))
        newest = max(kept.cuts, default=-1)
        back = m.Rollback(self.age, least, cuts, [one.birth for one in has], self.calls, self.met, newest)
        try:
            begun, _ = self._coordinator.wait(self._coordinator.send(back))
            assert isinstance(begun, m.RolledBack)
            self.age, self.cut_at = begun.age, begun.cut
            self._ask_all([m.RequestRollback(begun.age, begun.cut, birth) for birth in begun.births])
        except RollbackRequiredError:
            return False
        return True

    def _ask_all(self, bodies: Sequence[m.Request]) -> list[tuple[m.Body, list[Chunks]]]:
        """The replies of all shards, each to what it is asked."""
        numbers = [link.send(body) for link, body in zip(self.links, bodies, strict=True)]
        return [link.wait(number) for link, number in zip(self.links, numbers, strict=True)]

    def say_again(self, link: Channel) -> None:
        """Tell a service that was started again what it may need: who is there, the order, what was settled or said."""
        if self._group is not None:
            link.mutter(self._group)
        if link is self._coordinator and self.order[0]:
            link.mutter(m.ReplayResult(self.order[0]), [as_bytes(self.order[1])])
        if link is self._coordinator and self._begun is not None:
            for at in range(0, len(self._settled), SETTLED_AT_ONCE):
                batches = self._settled[at : at + SETTLED_AT_ONCE]
                link.mutter(m.Settle(self._begun[0].number, batches, self.age))
        self._spoken.again(link)
        if link is self._coordinator and self._heard is not None:
            heard, found = self._heard
            link.mutter(heard, [whole(one, "uint8") for one in found])
        if link is self._coordinator and self._is_apart:
            link.mutter(m.LeaveBarrier(self._op, self.met))

    def _told(self, tensors: Sequence[Chunks]) -> list[bytes]:
        """The bytes in the tensors of a reply."""
        return [bytes(whole(pieces, "uint8").numpy()) for pieces in tensors]
