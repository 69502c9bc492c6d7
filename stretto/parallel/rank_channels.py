"""Channels of the ranks of one worker to the services of a parameter server: rank 0 alone is connected.

`server_ranks.py` has the diagram. A request with tensors of each rank goes out as one, and its reply is divided; every
other reply is told to all ranks unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import torch
from torch import Tensor

from stretto.errors import BrokenTransportError, TransportError, UnevenLoopsError
from stretto.parallel.link import Link, Waiting
from stretto.parameter_server import messages as m
from stretto.parameter_server.client_types import Channel, Replaying, RollbackRequiredError, RunOverError, Sink
from stretto.parameter_server.framing import DTYPES, Chunks, layout_of
from stretto.transport.interface import Collectives, Traffic, as_bytes

SERVER = 3
"""Channel of the ranks' messages about the server, beside those of a pipeline."""
OfRanks: TypeAlias = m.Open | m.Push | m.Read | m.ReadRuleState | m.Gather
"""Requests with tensors of each rank, or whose replies have some; all others are the same at all ranks."""
ERRORS = {
    error.__name__: error
    for error in (TransportError, BrokenTransportError, UnevenLoopsError, RollbackRequiredError, RunOverError)
}


class Told(msgspec.Struct, array_like=True):
    """A message between two ranks: a request or a reply, an error, or the end of an attempt; tensors follow."""

    body: m.Body | None = None
    tensors: list[tuple[str, int]] = []
    error: tuple[str, str] | None = None
    is_so: bool = False


_TOLD = msgspec.msgpack.Decoder(Told)


class RankMessages:
    """One rank's messages to and from another rank of its worker, in the order in which both speak of the server."""

    def __init__(self, siblings: Collectives, waiting: Waiting) -> None:
        self._link = Link(siblings, waiting)
        self.rank, self.others = siblings.worker, range(1, siblings.workers)

    def send(self, rank: int, told: Told, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message with these tensors."""
        told.tensors = layout_of(tensors)
        self._link.send(as_bytes(msgspec.msgpack.encode(told)), rank, SERVER)
        for tensor in tensors:
            if tensor.numel():
                self._link.send(tensor, rank, SERVER)
        self._link.flush()

    def receive(self, rank: int) -> tuple[Told, list[Tensor]]:
        """Return the next message of a rank, and its tensors, which are flat. Raise the error that it tells of."""
        told = _TOLD.decode(self._received(rank).numpy().tobytes())
        if told.error is not None:
            name, text = told.error
            raise ERRORS.get(name, TransportError)(text)
        return told, [self._received(rank, name) if numbers else _empty(name) for name, numbers in told.tensors]

    def _received(self, rank: int, dtype: str = "uint8") -> Tensor:
        incoming = self._link.receive(rank, SERVER)
        with self._link.waiting():
            octets = incoming.handle.wait()
        assert isinstance(octets, Tensor)
        return octets.view(DTYPES[dtype])

    def tell(self, told: Told) -> None:
        """Send a message from rank 0 to each other rank."""
        for rank in self.others:
            self.send(rank, told)

    def agreed(self, is_so: bool) -> bool:
        """Return what rank 0 passes."""
        if self.rank:
            return self.receive(0)[0].is_so
        self.tell(Told(is_so=is_so))
        return is_so


def _empty(dtype: str) -> Tensor:
    return torch.empty(0, dtype=DTYPES[dtype], device="cpu")


# --- channels ---------------------------------------------------------------------------------------------------------


class FollowingChannel(Channel):
    """A service as the ranks above 0 reach it: through rank 0."""

    def __init__(self, messages: RankMessages) -> None:
        self._messages, self._requests = messages, 0

    def attach(self, client: Replaying) -> None:
        """Do nothing: rank 0 replays."""

    def send(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> int:
        """Give rank 0 the tensors of a request that has some of each rank."""
        self._requests += 1
        if isinstance(body, OfRanks):
            self._messages.send(0, Told(body), tensors)
        return self._requests

    def wait(self, request_id: int, sink: Sink | None = None) -> tuple[m.Body, list[Chunks]]:
        """Return the reply that rank 0 has received, with this rank's tensors."""
        told, tensors = self._messages.receive(0)
        assert told.body is not None
        if sink is None:
            return told.body, [[tensor] for tensor in tensors]
        for index, tensor in enumerate(tensors):
            if tensor.numel():
                sink(index, 0, tensor)
        return told.body, []

    def poll(self, request_id: int) -> bool:
        """Return True if the reply has arrived at rank 0 when it asks."""
        return self._messages.agreed(False)

    def is_pending(self, request_id: int) -> bool:
        """Return False: rank 0 repeats requests."""
        return False

    def discard(self, request_id: int) -> None:
        """Do nothing: rank 0 gets the reply."""

    def send_oneway(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> None:
        """Do nothing: rank 0 sends it."""

    def tend(self) -> None:
        """Do nothing: rank 0 connects."""

    def abort(self) -> None:
        """Do nothing: rank 0 tells of an abort."""

    def reset(self) -> None:
        """Do nothing: nothing is pending here."""

    def traffic(self) -> Traffic:
        """Return no bytes: this rank has no connection."""
        return Traffic(0, 0, counted=True)

    def close(self) -> None:
        """Do nothing: this rank has no connection."""


class LeadingChannel(Channel):
    """Rank 0's connection with a service, over which it sends the requests of all ranks of its worker."""

    def __init__(self, inner: Channel, messages: RankMessages) -> None:
        self._inner, self._messages = inner, messages
        self._shares: dict[int, Shares] = {}
        """By request: what belongs to each rank."""
        self._alone: set[int] = set()
        """Requests for means, which rank 0 makes alone."""

    def attach(self, client: Replaying) -> None:
        """Let this client replay its state when the service is back."""
        self._inner.attach(_Outer(client, self))

    def send(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> int:
        """Send a request, with the tensors of all ranks if each has some."""
        if not isinstance(body, OfRanks):
            request_id = self._inner.send(body, tensors)
            self._alone |= {request_id} if isinstance(body, m.Contribute) else set()
            return request_id
        asked = [(body, tensors)]
        for rank in self._messages.others:
            told, theirs = self._messages.receive(rank)
            assert isinstance(told.body, OfRanks)
            asked.append((told.body, theirs))
        shares = Shares(asked)
        request_id = self._inner.send(*shares.request())
        self._shares[request_id] = shares
        return request_id

    def wait(self, request_id: int, sink: Sink | None = None) -> tuple[m.Body, list[Chunks]]:
        """Return the reply to a request, with the tensors of rank 0, and give the other ranks theirs."""
        if request_id in self._alone:
            self._alone.discard(request_id)
            return self._inner.wait(request_id, sink)
        shares = self._shares.pop(request_id, None) or Shares([])
        try:
            body, results = self._inner.wait(request_id, shares.sink(sink) if sink is not None else None)
        except TransportError as error:
            self._messages.tell(Told(error=(type(error).__name__, str(error))))
            raise
        results = shares.streamed() if sink is not None else results
        for rank in self._messages.others:
            self._messages.send(rank, *shares.reply(rank, body, results))
        return shares.body(0, body), shares.of(0, results)

    def poll(self, request_id: int) -> bool:
        """Return True if the reply has arrived, at all ranks alike."""
        return self._messages.agreed(self._inner.poll(request_id))

    def is_pending(self, request_id: int) -> bool:
        """Return True if a request has no reply yet."""
        return self._inner.is_pending(request_id)

    def discard(self, request_id: int) -> None:
        """Stop waiting for the reply to a request."""
        self._shares.pop(request_id, None)
        self._inner.discard(request_id)

    def send_oneway(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message whose reply is not waited for."""
        self._inner.send_oneway(body, tensors)

    def tend(self) -> None:
        """Connect again if the service was lost and is back."""
        self._inner.tend()

    def abort(self) -> None:
        """Abort waiting calls, from any thread."""
        self._inner.abort()

    def reset(self) -> None:
        """Drop all requests and replies, and clear an abort."""
        self._shares.clear()
        self._alone.clear()
        self._inner.reset()

    def traffic(self) -> Traffic:
        """Return the bytes of the worker's connection."""
        return self._inner.traffic()

    def close(self) -> None:
        """Close the connection."""
        self._inner.close()


@dataclass(frozen=True, slots=True)
class _Outer(Replaying):
    """Client of a connection, which knows the channel around it only."""

    client: Replaying
    channel: Channel

    def replay(self, channel: Channel) -> None:
        self.client.replay(self.channel)

    def tend(self, waiting: Channel) -> None:
        self.client.tend(self.channel)


@dataclass(slots=True)
class Shares:
    """A request of all ranks of a worker as one, and the part of each rank in its reply; without ranks all get all.

    `asked` are the requests of the ranks, with their tensors. In the request and its reply the parts of the parameters
    of rank 0 come first, then parts of rank 1, and so on, once for each kind of tensor.
    """

    asked: Sequence[tuple[OfRanks, Sequence[Tensor]]]
    _pieces: dict[int, Chunks] = field(default_factory=dict)
    """Pieces of other ranks' tensors, by number of the tensor in the reply."""

    def request(self) -> tuple[m.Request, Sequence[Tensor]]:
        """Return the request for the service, with the tensors of all ranks."""
        body = self.asked[0][0]
        if isinstance(body, m.Gather):
            each = [one.numpy().tobytes() for _, (one,) in self.asked]
            return body, [as_bytes(msgspec.msgpack.encode(each))]
        if isinstance(body, m.Open):
            arrivals = [count for one, _ in self.asked if isinstance(one, m.Open) for count in one.arrivals]
            body = msgspec.structs.replace(body, arrivals=arrivals)
        elif isinstance(body, m.Read | m.ReadRuleState):
            body = msgspec.structs.replace(body, parts=len(self._places()))
        kinds = 1 + len(body.names) if isinstance(body, m.Open) else 1
        return body, [
            one
            for kind in range(kinds)
            for _, tensors in self.asked
            for one in tensors[kind * len(tensors) // kinds : (kind + 1) * len(tensors) // kinds]
        ]

    def _places(self) -> list[tuple[int, int]]:
        """Return the rank of each part of the parameters in the reply, and its number there."""
        parts = (
            body.parts if isinstance(body, m.Read | m.ReadRuleState) else len(tensors) for body, tensors in self.asked
        )
        return [(rank, part) for rank, count in enumerate(parts) for part in range(count)]

    def sink(self, own: Sink) -> Sink:
        """Return the receiver of a reply: pieces of rank 0 go to its own, the others' are kept."""
        places = self._places()

        def take(tensor: int, at: int, piece: Tensor) -> None:
            rank, part = places[tensor]
            if not rank:
                own(part, at, piece)
                return
            if not at:
                self._pieces[tensor] = []  # the reply begins, maybe again
            self._pieces[tensor].append(piece.clone())

        return take

    def streamed(self) -> list[Chunks]:
        """Return the tensors of a reply that `sink` has kept."""
        return [self._pieces.get(tensor, []) for tensor in range(len(self._places()))]

    def reply(self, rank: int, body: m.Body, results: Sequence[Chunks]) -> tuple[Told, list[Tensor]]:
        """Return the reply for this rank, and its tensors."""
        own = self.of(rank, results)
        return Told(self.body(rank, body)), [torch.cat(chunks) if chunks else _empty("uint8") for chunks in own]

    def body(self, rank: int, body: m.Body) -> m.Body:
        """Return the reply for this rank, without tensors. Rank 0 alone learns of applied updates, and writes them."""
        if isinstance(body, m.PushReply) and rank:
            return msgspec.structs.replace(body, applied=[])
        if not isinstance(body, m.RuleStateReply):
            return body
        pairs = zip(body.arrivals, self._places(), strict=False)
        return msgspec.structs.replace(body, arrivals=[count for count, (owner, _) in pairs if owner == rank])

    def of(self, rank: int, results: Sequence[Chunks]) -> list[Chunks]:
        """Return the tensors of a reply that are this rank's."""
        if not self.asked:
            return list(results)
        if isinstance(self.asked[0][0], m.Gather):
            each = [msgspec.msgpack.decode(torch.cat(chunks).numpy().tobytes(), type=list[bytes]) for chunks in results]
            return [[as_bytes(messages[rank])] for messages in each]
        places = self._places()
        return [chunks for index, chunks in enumerate(results) if places[index % len(places)][0] == rank]
