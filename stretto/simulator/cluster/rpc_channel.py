"""A worker's simulated connection to an office: what is said leaves, travels and comes as it does live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from stretto.errors import BrokenTransportError, TransportError
from stretto.parameter_server import messages as m
from stretto.parameter_server.client_types import Sink, refuse_refusals
from stretto.parameter_server.framing import CHUNK_BYTES, Chunks, kind
from stretto.parameter_server.handler import OutgoingMessage
from stretto.simulator.engine import Engine, Worker
from stretto.simulator.network.wire_bytes import handshake_bytes, parcel_bytes

if TYPE_CHECKING:
    from stretto.simulator.cluster.rpc_server import SimServer


class Said:
    """The tensors of a reply, looked at once though many workers are sent the same."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.kinds = [(kind(one), one.numel()) for one in tensors]
        self.pieces: list[Chunks] = [[one] for one in tensors]
        self._messages: list[bytes] | None = None
        self._nbytes: dict[int, int] = {}

    def nbytes(self, post: OutgoingMessage, encrypted: bool) -> int:
        """The bytes of the parcel, which differ by the length of its number alone."""
        length = post.number.bit_length()
        if length not in self._nbytes:
            self._nbytes[length] = parcel_bytes(post.number, post.body, self.kinds, encrypted)
        return self._nbytes[length]

    def messages(self) -> list[bytes]:
        """What the tensors say, as bytes."""
        if self._messages is None:
            self._messages = [bytes(one.numpy()) for one in self.tensors]
        return self._messages


@dataclass(slots=True)
class _Parcel:
    """What a worker says, and whether it has left it."""

    head: m.Header
    pieces: list[Chunks]
    nbytes: int
    has_left: bool = False


class SimLink:
    """A connection of a worker's `life` to an office. `beside` are those of all workers to the same.

    Its parcels are numbered behind those of the life `before`, whose replies are nobody's.
    """

    def __init__(
        self,
        world: Engine,
        worker: Worker,
        office: SimServer,
        beside: list[SimLink],
        encrypted: bool,
        limit_s: float,
        elastic: bool = False,
        before: SimLink | None = None,
        life: int = 0,
    ) -> None:
        self._world, self.worker, self._office, self.life = world, worker, office, life
        self.beside = beside
        self._encrypted, self._limit_s, self._endures = encrypted, limit_s, elastic
        self.again: Callable[[], None] = lambda: None
        """Called when an office is there again, before what had no reply is asked again."""
        self._asked: dict[int, _Parcel] = {}
        """What waits for a reply, in order, where it may have to be asked again."""
        self._numbers: int = before._numbers if before is not None else 0
        self._first = self._numbers
        """Replies to parcels up to the first number are not waited for."""
        self._replies: dict[int, tuple[OutgoingMessage, Said]] = {}
        self._unread: dict[int, Callable[[], None]] = {}
        """What is to be called when a reply has been read, or never will be."""
        self._is_aborted = False
        self.last = Said(())
        """What the last reply that was waited for said."""
        self._sent, self._received = handshake_bytes(worker.number, encrypted)
        self._open = True

    def send(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> int:
        """Send a parcel when this worker's time has come. What it holds is kept as it is now."""
        self._numbers += 1
        parcel = self._parcel(self._numbers, body, tensors)
        if self._endures and not isinstance(body, m.SILENT):
            self._asked[self._numbers] = parcel
        if isinstance(body, m.Push | m.Contribute):
            self._worked()
        self._post(parcel)
        return self._numbers

    def drop(self, number: int) -> None:
        """Nobody waits for the reply to this parcel any more."""
        self._asked.pop(number, None)
        self._replies.pop(number, None)
        self._read(number)

    def mutter(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> None:
        """Send a parcel whose reply nobody waits for."""
        self._post(self._parcel(0, body, tensors))

    def _parcel(self, number: int, body: m.Request, tensors: Sequence[Tensor]) -> _Parcel:
        kinds = [(kind(one), one.numel()) for one in tensors]
        pieces: list[Chunks] = [[one.detach().clone()] if one.numel() else [] for one in tensors]
        return _Parcel(m.Header(number, body, kinds), pieces, parcel_bytes(number, body, kinds, self._encrypted))

    def _post(self, parcel: _Parcel) -> None:
        self._sent += parcel.nbytes
        parcel.has_left = False
        self.worker.act(lambda: self._leave(parcel))

    def wait(self, number: int, sink: Sink | None = None) -> tuple[m.Body, list[Chunks]]:
        """The reply to a parcel."""
        if number not in self._replies:
            self.worker.until(
                lambda: number in self._replies or self._is_aborted, lambda: self._office.called, self._limit_s
            )
        if number not in self._replies:
            raise BrokenTransportError(f"the exchange at {self._office.called} was broken off")
        post, self.last = self._replies.pop(number)
        refuse_refusals(self._office.called, post.body)
        if isinstance(post.body, m.PushReply | m.Result | m.Among) and post.tensors:
            self._worked()
        for index, one in enumerate(post.tensors if sink is not None else ()):
            sink(index, 0, one)  # type: ignore[misc]
        self._read(number)
        return post.body, [] if sink is not None else self.last.pieces

    def is_there(self, number: int) -> bool:
        """Whether the reply has come by this worker's time."""
        self.worker.catch_up()
        return number in self._replies

    def reply(self, office: SimServer, post: OutgoingMessage) -> None:
        """The office sends something back."""
        if self.worker.is_dead or post.number <= self._first:
            if post.sent is not None:
                post.sent()
            return
        if post.sent is not None:
            self._unread[post.number] = post.sent
        said = office.said(post.tensors)
        same = isinstance(post.body, m.Result)
        encrypted = self._encrypted
        nbytes = said.nbytes(post, encrypted) if same else parcel_bytes(post.number, post.body, said.kinds, encrypted)
        self._received += nbytes
        come = office.unless_lost(lambda: self._come(post, said))
        self._carry(office.end, self.worker.number, nbytes, come)

    def traffic(self) -> tuple[int, int]:
        """The bytes so far, as the live connection would count them."""
        return self._sent, self._received

    def awaits(self, number: int) -> bool:
        """Whether a parcel has had no reply yet."""
        return number in self._asked

    def ask_again(self) -> None:
        """The office is there again, and knows nothing: what had left, and had no reply, is asked again, in order."""
        if self.worker.is_over or not self._open:
            return
        gone = [one for one in self._asked.values() if one.has_left]
        self.again()
        for parcel in gone:
            self._post(parcel)

    def abort(self) -> None:
        """Break off what is waited for."""
        self._is_aborted = True
        self.worker.wake()

    def forget(self) -> None:
        """Nothing that was asked is waited for any more, and what comes now is."""
        self._is_aborted, self._first = False, self._numbers
        self._replies.clear()
        self._asked.clear()
        for read in self._unread.values():
            read()
        self._unread.clear()

    def close(self) -> None:
        """Say good-bye. An office that may be lost has to know of it: who is not there any more can't say it again."""
        if not self._open:
            return
        counted = self._sent, self._received  # the live connection is counted before its last words
        if self._endures and not self._is_aborted:
            with suppress(TransportError):
                self.wait(self.send(m.Finish()))
        self._open = False
        self.send(m.Leave())
        self._sent, self._received = counted

    def _worked(self) -> None:
        self.worker.asks += 1
        self.worker.work(self._world.tariff.ask_s)

    def _leave(self, parcel: _Parcel) -> None:
        parcel.has_left = True
        office = self._office
        if not office.is_away:
            come = office.unless_lost(lambda: office.come(self, parcel.head, parcel.pieces))
            self._carry(self.worker.number, office.end, parcel.nbytes, come)

    def _carry(self, source: int, target: int, nbytes: int, then: Callable[[], None]) -> None:
        """One end works on it, the links carry it, the other end works on it; each end takes one after another.

        It goes in chunks: from the first one on all three are at work at once, until the last one has come.
        """
        world, office = self._world, self._office
        chunk_s = world.tariff.post_s(min(nbytes, CHUNK_BYTES))
        rest_s = world.tariff.post_s(nbytes) - chunk_s
        link_s = world.tariff.link_s(nbytes) if world.net.has_link(source, target) else 0.0
        left = 2 + (link_s > 0)

        def share(end: int) -> int:
            return 1 + end if end >= 0 else office.share

        def part() -> None:
            nonlocal left
            left -= 1
            if not left:
                world.handle(target, share(target), chunk_s, then)

        def set_off() -> None:
            if self.worker.is_dead:
                return
            world.handle(target, share(target), rest_s, lambda: None)
            world.net.send(source, target, nbytes, part)
            if link_s:
                world.busy(0, link_s, part)

        world.handle(source, share(source), chunk_s, set_off)
        world.handle(source, share(source), rest_s, part)

    def _come(self, post: OutgoingMessage, said: Said) -> None:
        asked = self._asked.pop(post.number, None)
        if post.number > self._first and (asked is not None or not self._endures):
            self._replies[post.number] = post, said
            self.worker.wake()
        elif post.number not in self._replies:
            self._read(post.number)

    def _read(self, number: int) -> None:
        if (read := self._unread.pop(number, None)) is not None:
            read()
