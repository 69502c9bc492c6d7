"""Types of the parameter-server client: channels, handles of pending operations, and each shard's ranges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from torch import Tensor

from stretto.collective_ops import Answer
from stretto.errors import BrokenTransportError, TransportError, UnevenLoopsError
from stretto.parameter_server import messages as m
from stretto.parameter_server.framing import Chunks, concatenated, dtype_name, with_offsets
from stretto.transport.device_memory import device_copy
from stretto.transport.interface import Traffic

ALIGNMENT = 64
"""Shards begin at multiples of this number of elements."""


Sink = Callable[[int, int, Tensor], None]
"""Receiver of chunks: (index of the tensor, position of the first element, elements)."""


class RollbackRequiredError(TransportError):
    """A service was lost and restarts from a snapshot: call `ParameterServerClient.roll_back`, and continue there."""


class RunOverError(TransportError):
    """The other workers have finished the run: a worker that joins now has nothing to do."""


def raise_refusals(peer: str, body: m.Body) -> None:
    """Raise TransportError for a refusal, RollbackRequiredError if a service has lost its state.

    Raise UnevenLoopsError if the script is at fault, RunOverError if the run is finished.
    """
    if isinstance(body, m.RunOver):
        raise RunOverError("the run is over")
    if isinstance(body, m.Refused) and body.uneven:
        raise UnevenLoopsError(body.text)
    if isinstance(body, m.Refused):
        raise TransportError(f"{peer} refused: {body.text}")
    if isinstance(body, m.StaleRequest):
        raise RollbackRequiredError(f"{peer} was lost, and restarts from a snapshot")


class Exchange(Protocol):
    """A worker's exchange with an asynchronous server."""

    def wait_at_barrier(self, called: bool = False) -> bool:
        """Wait at a barrier with no request pending; return True if the epoch was over then."""
        ...

    def rolled_back(self) -> None:
        """Take over the servers' parameters. Raises RollbackRequiredError if another service was lost since."""
        ...


class Replaying(Protocol):
    """A client whose services may be restarted."""

    def replay(self, channel: Channel) -> None:
        """Send a restarted service the state that it may have lost."""
        ...

    def tend(self, waiting: Channel) -> None:
        """Let the other channels connect again while one waits: another worker may need what they then repeat."""
        ...


class Channel(Protocol):
    """A worker's connection to one service: requests and their replies."""

    def attach(self, client: Replaying) -> None:
        """Let this client replay its state when the service is back, before requests without a reply are sent again."""
        ...

    def send(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> int:
        """Send a request; return its id, for `wait`. The tensors may not change until the reply has arrived."""
        ...

    def wait(self, request_id: int, sink: Sink | None = None) -> tuple[m.Body, list[Chunks]]:
        """Return the reply to a request. Raises TransportError if it is a refusal, is late, or will never arrive.

        With a `sink` the tensors are passed to it chunk by chunk as they arrive, and are not returned.
        """
        ...

    def poll(self, request_id: int) -> bool:
        """Return True if the reply has arrived, without waiting."""
        ...

    def is_pending(self, request_id: int) -> bool:
        """Return True if a request has no reply yet."""
        ...

    def discard(self, request_id: int) -> None:
        """Stop waiting for the reply to a request, if it has none yet."""
        ...

    def send_oneway(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message whose reply is not waited for."""
        ...

    def tend(self) -> None:
        """Connect again if the service was lost and is back, without waiting."""
        ...

    def abort(self) -> None:
        """Abort waiting calls, from any thread."""
        ...

    def reset(self) -> None:
        """Drop all requests and replies, and clear an abort."""
        ...

    def traffic(self) -> Traffic:
        """Return the bytes sent and received."""
        ...

    def close(self) -> None:
        """Send `Leave` and close. Idempotent."""
        ...


def ranges(length: int, shards: int, width: int = 0) -> list[tuple[int, int]]:
    """Return the start and end of each shard's part of a flat tensor; one of rows of this `width` has whole rows."""
    unit = math.lcm(ALIGNMENT, max(width, 1))
    step = -(-length // shards // unit) * unit
    bounds = [min(shard * step, length) for shard in range(shards)] + [length]
    return list(itertools.pairwise(bounds))


def split_among_shards(parts: Sequence[Tensor], shards: int, widths: Sequence[int] = ()) -> list[list[Tensor]]:
    """Return for each shard its range of every part; `widths` are those of the parts' rows, 0 for a part without."""
    widths = widths or [0] * len(parts)
    bounds = [ranges(part.numel(), shards, width) for part, width in zip(parts, widths, strict=True)]
    return [
        [part[slice(*shard_bounds[shard])] for part, shard_bounds in zip(parts, bounds, strict=True)]
        for shard in range(shards)
    ]


@dataclass(frozen=True, slots=True)
class _Contribution:
    channel: Channel
    request_id: int
    body: m.Contribute | m.ExchangeTensors
    tensors: list[Tensor]

    def is_of(self, channel: Channel, series: Hashable) -> bool:
        """Return True if its number is one of this series at this shard."""
        return self.channel is channel and self.body.series == series


class Contributions:
    """One worker's contributions to collective operations, to be repeated to a shard that was lost with its results."""

    def __init__(self, is_stored: bool) -> None:
        self._stores = is_stored
        self._sent: list[_Contribution] = []

    def send(self, channel: Channel, body: m.Contribute | m.ExchangeTensors, tensor: Tensor) -> int:
        """Send a contribution to a shard; return the request id."""
        pending_ops = (
            sent.body.op
            for sent in self._sent
            if sent.is_of(channel, body.series) and channel.is_pending(sent.request_id)
        )
        body = msgspec.structs.replace(body, received_up_to=min(pending_ops, default=body.op) - 1)
        request_id = channel.send(body, [tensor])
        if self._stores:
            self._sent.append(_Contribution(channel, request_id, body, [tensor.clone()]))
        return request_id

    def wait(self, channel: Channel, request_id: int, series: Hashable = None) -> tuple[m.Body, list[Chunks]]:
        """Wait for the result, and drop contributions whose results all workers have."""
        body, results = channel.wait(request_id)
        if isinstance(body, m.Result | m.MembersResult):
            self._sent = [
                sent for sent in self._sent if not sent.is_of(channel, series) or sent.body.op > body.received_up_to
            ]
        return body, results

    def replay(self, channel: Channel) -> None:
        """Send the contributions to a restarted shard; the channel sends those without a reply itself."""
        for contribution in self._sent:
            if contribution.channel is channel and not channel.is_pending(contribution.request_id):
                channel.send_oneway(contribution.body, contribution.tensors)

    def clear(self) -> None:
        """Drop the contributions of a generation that is over."""
        self._sent.clear()


@dataclass(slots=True)
class AllReduceHandle:
    contributions: Contributions
    channels: Sequence[Channel]
    tensor: Tensor
    request_ids: list[int]
    expected: int
    """Number of workers that were to contribute; each has scaled its tensor for the mean of that many."""

    def wait(self) -> Answer:
        flat = self.tensor
        results = [
            self.contributions.wait(channel, request_id)
            for channel, request_id in zip(self.channels, self.request_ids, strict=True)
        ]
        bounds = ranges(flat.numel(), len(results))
        for (start, stop), (body, (chunks, *_)) in zip(bounds, results, strict=True):
            _write(flat[start:stop], chunks)
            if isinstance(body, m.MembersResult) and len(body.members) < self.expected:
                flat[start:stop] *= self.expected / len(body.members)
        return flat


@dataclass(slots=True)
class BrokenHandle:
    """An operation on an aborted transport."""

    def wait(self) -> Answer:
        raise BrokenTransportError("the exchange was broken off")


@dataclass(slots=True)
class AllGatherHandle:
    contributions: Contributions
    channel: Channel
    like: Tensor
    request_id: int

    def wait(self) -> Answer:
        results = self.contributions.wait(self.channel, self.request_id)[1]
        return [device_copy(concatenated(chunks, dtype_name(self.like)), self.like.device) for chunks in results]


@dataclass(slots=True)
class ExchangeHandle:
    contributions: Contributions
    channel: Channel
    like: Tensor
    series: Hashable
    request_id: int

    def wait(self) -> Answer:
        (chunks,) = self.contributions.wait(self.channel, self.request_id, self.series)[1]
        return concatenated(chunks, dtype_name(self.like)).to(self.like.device)


@dataclass(frozen=True, slots=True)
class Update:
    """An update to push: for each shard an encoded message for each part of its range."""

    seq: int
    versions: Sequence[int]
    samples: int
    lr: float
    messages: Sequence[Sequence[Tensor]]
    batches: Sequence[int] = ()
    """Batches of the epoch in the update."""

    @property
    def nbytes(self) -> int:
        """Bytes of all messages."""
        return sum(message.nbytes for messages in self.messages for message in messages)


@dataclass(frozen=True, slots=True)
class PushResult:
    """The shards' replies: their versions, and this worker's applied updates."""

    versions: list[int]
    applied: list[tuple[int, int, int, int]]
    """Updates of this worker that were applied at the first shard: (seq, version, staleness, samples)."""
    refused: set[int]
    blocked_s: float


@dataclass(slots=True)
class PushHandle:
    """A pending push or read."""

    channels: Sequence[Channel]
    request_ids: list[int]
    lengths: Sequence[int] = ()
    kept: Sequence[Sequence[Tensor]] = field(default_factory=list)
    """Tensors being sent, referenced until they are."""

    def poll(self) -> bool:
        """Return True if all shards have replied, without waiting."""
        return all(
            channel.poll(request_id) for channel, request_id in zip(self.channels, self.request_ids, strict=True)
        )

    def wait(self, take: Sink) -> PushResult:
        """Wait for all shards; `take` gets the newest parameters as they arrive: (part, first element, elements).

        Raises TransportError if a shard refuses, is lost or is late.
        """
        replies = self._replies(lambda shard: self._sink_of(shard, take))
        return _push_result([body for body, _ in replies])

    def messages(self) -> tuple[PushResult, list[list[Tensor]]]:
        """Wait for all shards, where replies are encoded; return each shard's message for each part of its range."""
        replies = self._replies(lambda _: None)
        return _push_result([body for body, _ in replies]), [
            [concatenated(chunks, "uint8") for chunks in results] for _, results in replies
        ]

    def discard(self) -> None:
        """Stop waiting for the replies."""
        for channel, request_id in zip(self.channels, self.request_ids, strict=True):
            channel.discard(request_id)

    def _replies(self, sink_for: Callable[[int], Sink | None]) -> list[tuple[m.Body, list[Chunks]]]:
        pairs = enumerate(zip(self.channels, self.request_ids, strict=True))
        try:
            return [channel.wait(request_id, sink_for(shard)) for shard, (channel, request_id) in pairs]
        except RollbackRequiredError:
            self.discard()  # the other shards' replies are void as well
            raise

    def _sink_of(self, shard: int, take: Sink) -> Sink:
        starts = [ranges(length, len(self.channels))[shard][0] for length in self.lengths]
        return lambda part, offset, chunk: take(part, starts[part] + offset, chunk)


@dataclass(frozen=True, slots=True)
class RuleState:
    """State of the servers' update rule besides the parameters: by name, a flat tensor for each part of them."""

    tensors: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    arrivals: list[int] = field(default_factory=list)
    """Amount of each part's momentum that has arrived since its last refresh."""


def _push_result(replies: Sequence[m.Body]) -> PushResult:
    pushes = [body for body in replies if isinstance(body, m.PushReply)]
    refused = {seq for push in pushes for seq in push.refused}
    blocked_s = max(push.blocked_s for push in pushes)
    return PushResult([push.version for push in pushes], pushes[0].applied, refused, blocked_s)


def _write(flat: Tensor, chunks: Chunks) -> None:
    for offset, chunk in with_offsets(chunks):
        flat[offset : offset + chunk.numel()].copy_(chunk)
