"""Simulated client channel to a server: requests and replies as live, in the network's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from stretto.errors import BrokenTransportError, TransportError
from stretto.parameter_server import messages as m
from stretto.parameter_server.client_types import Replaying, Sink, raise_refusals
from stretto.parameter_server.framing import CHUNK_BYTES, Chunks, layout_of
from stretto.parameter_server.handler import OutgoingMessage
from stretto.parameter_server.sessions import ClientSession
from stretto.simulator.engine import Engine, Worker
from stretto.simulator.network.wire_bytes import handshake_bytes, message_bytes
from stretto.transport.interface import Traffic

if TYPE_CHECKING:
    from stretto.simulator.cluster.rpc_server import SimServer


class ReplyTensors:
    """The tensors of a reply; sizes and bytes are computed once for all workers that receive the same reply."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.kinds = layout_of(tensors)
        self.pieces: list[Chunks] = [[tensor] for tensor in tensors]
        self._messages: list[bytes] | None = None
        self._nbytes: dict[int, int] = {}

    def nbytes(self, reply: OutgoingMessage, encrypted: bool) -> int:
        """Return the bytes of the message, which depend on its number only by the number's length."""
        length = reply.request_id.bit_length()
        if length not in self._nbytes:
            self._nbytes[length] = message_bytes(m.Header(reply.request_id, reply.body, self.kinds), encrypted)
        return self._nbytes[length]

    def messages(self) -> list[bytes]:
        """Return the contents of the tensors as bytes."""
        if self._messages is None:
            self._messages = [bytes(tensor.numpy()) for tensor in self.tensors]
        return self._messages


@dataclass(slots=True)
class _Request:
    """A request of a worker, with a copy of its tensors; `was_sent` is true once it has left the worker."""

    body: m.Request
    layout: list[tuple[str, int]]
    pieces: list[Chunks]
    was_sent: bool = False


def _request(body: m.Request, tensors: Sequence[Tensor]) -> _Request:
    chunks: list[Chunks] = [[tensor.detach().clone()] if tensor.numel() else [] for tensor in tensors]
    return _Request(body, layout_of(tensors), chunks)


class ChannelSettings(NamedTuple):
    """Settings of all channels of a run."""

    encrypted: bool
    limit_s: float
    """Time limit of a wait, in seconds."""
    servers_can_fail: bool


class SimChannel:
    """A connection of a worker's `incarnation` to a server.

    The numbers of its requests continue those of the previous incarnation's channel, `before`, whose replies are
    dropped.
    """

    def __init__(
        self,
        engine: Engine,
        worker: Worker,
        server: SimServer,
        settings: ChannelSettings,
        before: SimChannel | None = None,
        incarnation: int = 0,
    ) -> None:
        self._engine, self.worker, self._server, self.incarnation = engine, worker, server, incarnation
        self._encrypted, self._limit_s, self._servers_can_fail = settings
        self._client: Replaying | None = None
        self._session: ClientSession[_Request] = ClientSession(before._session.last if before is not None else 0)
        self._dropped_up_to = self._session.last
        """Number up to which replies are dropped."""
        self._replies: dict[int, tuple[OutgoingMessage, ReplyTensors]] = {}
        self._on_read: dict[int, Callable[[], None]] = {}
        """Functions to call when a reply has been read or dropped."""
        self._is_aborted = False
        self.last = ReplyTensors(())
        """Tensors of the last reply that was waited for."""
        self._sent, self._received = handshake_bytes(worker.number, self._encrypted)
        self._is_open = True

    def attach(self, client: Replaying) -> None:
        """Let this client replay its state when the server is restarted, before unanswered requests are sent again."""
        self._client = client

    def send(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> int:
        """Send a request at this worker's virtual time, with a copy of its tensors, and return its number."""
        request = _request(body, tensors)
        number = self._session.number(request, not isinstance(body, m.WITHOUT_REPLY))
        if isinstance(body, m.Push | m.Contribute | m.ExchangeTensors):
            self._spend_codec_time()
        self._send_request(number, request)
        return number

    def discard(self, number: int) -> None:
        """Drop the reply to this request."""
        self._session.discard(number)
        self._replies.pop(number, None)
        self._mark_read(number)

    def tend(self) -> None:
        """Do nothing: the restarted server calls `resend`."""

    def send_oneway(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message that has no reply."""
        self._send_request(0, _request(body, tensors))

    def _send_request(self, number: int, request: _Request) -> None:
        header = m.Header(number, request.body, request.layout, self._session.answered_below)
        nbytes = message_bytes(header, self._encrypted)
        self._sent += nbytes
        request.was_sent = False
        self.worker.schedule(lambda: self._transmit(header, request, nbytes))

    def wait(self, number: int, sink: Sink | None = None) -> tuple[m.Body, list[Chunks]]:
        """Wait for a reply, and return its body and tensors (none with a `sink`, which receives them)."""
        if number not in self._replies:
            self.worker.wait_until(
                lambda: number in self._replies or self._is_aborted, lambda: self._server.name, self._limit_s
            )
        if number not in self._replies:
            raise BrokenTransportError(f"the request to {self._server.name} was aborted")
        reply, self.last = self._replies.pop(number)
        raise_refusals(self._server.name, reply.body)
        if isinstance(reply.body, m.PushReply | m.Result | m.MembersResult) and reply.tensors:
            self._spend_codec_time()
        for index, tensor in enumerate(reply.tensors if sink is not None else ()):
            sink(index, 0, tensor)  # type: ignore[misc]
        self._mark_read(number)
        return reply.body, [] if sink is not None else self.last.pieces

    def poll(self, number: int) -> bool:
        """True if the reply has arrived by this worker's virtual time."""
        self.worker.catch_up()
        return number in self._replies

    def reply(self, server: SimServer, reply: OutgoingMessage) -> None:
        """Send a reply of the server to this worker."""
        if self.worker.has_failed or reply.request_id <= self._dropped_up_to:
            if reply.sent is not None:
                reply.sent()
            return
        if reply.sent is not None:
            self._on_read[reply.request_id] = reply.sent
        reply_tensors = server.reply_tensors(reply.tensors)
        is_same_for_all = isinstance(reply.body, m.Result)
        encrypted = self._encrypted
        if is_same_for_all:
            nbytes = reply_tensors.nbytes(reply, encrypted)
        else:
            nbytes = message_bytes(m.Header(reply.request_id, reply.body, reply_tensors.kinds), encrypted)
        self._received += nbytes
        receive = server.unless_restarted(lambda: self._receive(reply, reply_tensors))
        self._transfer(server.endpoint, self.worker.number, nbytes, receive)

    def traffic(self) -> Traffic:
        """Return the bytes so far, as a live connection would count them."""
        return Traffic(self._sent, self._received, counted=True)

    def is_pending(self, number: int) -> bool:
        """True if a request has no reply yet."""
        return self._session.is_pending(number)

    def resend(self) -> None:
        """Send the unanswered requests again, in order, to a restarted server."""
        if self.worker.has_ended or not self._is_open:
            return
        sent_requests = [(number, request) for number, request in self._session.unanswered() if request.was_sent]
        if self._client is not None:
            self._client.replay(self)
        for number, request in sent_requests:
            self._send_request(number, request)

    def abort(self) -> None:
        """Abort the request that the worker waits for."""
        self._is_aborted = True
        self.worker.wake()

    def reset(self) -> None:
        """Drop all requests so far and their replies, and end an abort."""
        self._is_aborted, self._dropped_up_to = False, self._session.last
        self._replies.clear()
        self._session.reset()
        for on_read in self._on_read.values():
            on_read()
        self._on_read.clear()

    def close(self) -> None:
        """Close the channel. A server that can fail must confirm `Finish`, which cannot be sent again later."""
        if not self._is_open:
            return
        counted = self._sent, self._received  # a live connection is counted before its last messages
        if self._servers_can_fail and not self._is_aborted:
            with suppress(TransportError):
                self.wait(self.send(m.Finish()))
        self._is_open = False
        self.send(m.Leave())
        self._sent, self._received = counted

    def _spend_codec_time(self) -> None:
        self.worker.codec_calls += 1
        self.worker.compute(self._engine.cost_model.codec_s)

    def _transmit(self, header: m.Header, request: _Request, nbytes: int) -> None:
        request.was_sent = True
        server = self._server
        if not server.is_down:
            receive = server.unless_restarted(lambda: server.receive(self, header, request.pieces))
            self._transfer(self.worker.number, server.endpoint, nbytes, receive)

    def _transfer(self, source: int, target: int, nbytes: int, callback: Callable[[], None]) -> None:
        """Transfer a message: processor work at the source, the links, processor work at the target.

        Each end processes its messages one after another. A message is transferred in chunks: all three overlap from
        the first chunk to the last.
        """
        engine, server = self._engine, self._server
        chunk_s = engine.cost_model.message_time_s(min(nbytes, CHUNK_BYTES))
        rest_s = engine.cost_model.message_time_s(nbytes) - chunk_s
        link_s = engine.cost_model.link_s(nbytes) if engine.network.crosses_link(source, target) else 0.0
        remaining_parts = 2 + (link_s > 0)

        def resource(endpoint: int) -> int:
            return 1 + endpoint if endpoint >= 0 else server.resource

        def finish_part() -> None:
            nonlocal remaining_parts
            remaining_parts -= 1
            if not remaining_parts:
                engine.process_message(target, resource(target), chunk_s, callback)

        def transmit() -> None:
            if self.worker.has_failed:
                return
            engine.process_message(target, resource(target), rest_s, lambda: None)
            engine.network.send(source, target, nbytes, finish_part)
            if link_s:
                engine.use_processor(0, link_s, finish_part)

        engine.process_message(source, resource(source), chunk_s, transmit)
        engine.process_message(source, resource(source), rest_s, finish_part)

    def _receive(self, reply: OutgoingMessage, reply_tensors: ReplyTensors) -> None:
        if self._session.answer(reply.request_id) and reply.request_id > self._dropped_up_to:
            self._replies[reply.request_id] = reply, reply_tensors
            self.worker.wake()
        elif reply.request_id not in self._replies:
            self._mark_read(reply.request_id)

    def _mark_read(self, number: int) -> None:
        if (on_read := self._on_read.pop(number, None)) is not None:
            on_read()
