"""Sends complete requests to a request handler, without a socket."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stretto.parameter_server import messages as m
from stretto.parameter_server.framing import dtype_name
from stretto.parameter_server.handler import OutgoingMessage, RequestHandler


def replies_to(
    handler: RequestHandler, worker: int, number: int, body: m.Body, tensors: Sequence[Tensor] = ()
) -> list[OutgoingMessage]:
    """Return the replies of a handler to a request."""
    header = m.Header(number, body, [(dtype_name(tensor), tensor.numel()) for tensor in tensors])
    handler.expects(worker, header)
    return handler.take(worker, header, [[tensor.clone()] for tensor in tensors])
