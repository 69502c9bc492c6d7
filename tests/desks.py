"""A desk, and what it is told: whole parcels, without a socket."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stretto.parameter_server import messages as m
from stretto.parameter_server.framing import dtype_name
from stretto.parameter_server.handler import OutgoingMessage, RequestHandler


def told(
    desk: RequestHandler, worker: int, number: int, body: m.Body, tensors: Sequence[Tensor] = ()
) -> list[OutgoingMessage]:
    """What a desk replies to a parcel."""
    head = m.Header(number, body, [(dtype_name(one), one.numel()) for one in tensors])
    desk.expects(worker, head)
    return desk.take(worker, head, [[one.clone()] for one in tensors])
