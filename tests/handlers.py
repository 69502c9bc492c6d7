"""Sends complete requests to a request handler, or to a service, without a socket."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stretto.parameter_server import messages as m
from stretto.parameter_server.framing import layout_of
from stretto.parameter_server.handler import OutgoingMessage, RequestHandler
from stretto.parameter_server.service import Service


def replies_to(
    handler: RequestHandler, worker: int, number: int, body: m.Body, tensors: Sequence[Tensor] = ()
) -> list[OutgoingMessage]:
    """Return the replies of a handler to a request."""
    header = m.Header(number, body, layout_of(tensors))
    handler.expects(worker, header)
    return handler.take(worker, header, [[tensor.clone()] for tensor in tensors])


def service_replies_to(
    service: Service,
    worker: int,
    number: int,
    body: m.Body,
    tensors: Sequence[Tensor] = (),
    answered_below: int = 0,
    incarnation: int = 0,
) -> list[OutgoingMessage]:
    """Return the replies of a service to a request."""
    messages = service.admit(worker, incarnation)
    if messages is None:
        return []
    header = m.Header(number, body, layout_of(tensors), answered_below)
    return [*messages, *service.take(worker, incarnation, header, [[tensor.clone()] for tensor in tensors])]
