"""Traffic of this worker's exchanges: raw and encoded bytes, by purpose; and the norms of its residuals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from stretto.codecs import Block, Codec, CodecContext
from stretto.collective_ops import Answer, CollectiveOp
from stretto.strategies.flat_buffers import FlatBuffer

MEASURE_EVERY_S = 5.0
"""Seconds between two measurements of norms, which are also due at the 1st, 2nd, 4th, 8th ... contribution.

So the last measurement of a short run is of its later half.
"""


@dataclass(slots=True)
class Account:
    """Bytes of one purpose, without the transport's overhead; the `raw` fields are those of exact values."""

    raw_sent: int = 0
    sent: int = 0
    raw_received: int = 0
    received: int = 0

    def count_raw(self, raw: int) -> None:
        """Count an exchange of tensors that take `raw` bytes without encoding."""
        self.raw_sent += raw
        self.raw_received += raw

    def count_sent(self, ask: CollectiveOp) -> None:
        """Count an operation that is submitted."""
        self.sent += ask.tensor.nbytes

    def count_received(self, ask: CollectiveOp, answer: Answer) -> None:
        """Count an operation's result: a mean, a peer's tensor, or the messages of all other workers."""
        if isinstance(answer, Tensor):
            self.received += answer.nbytes
        else:
            self.received += sum(one.nbytes for one in answer) - ask.tensor.nbytes


class Tally:
    """All counters of a worker's exchanges. The context's `clock` decides when norms are measured again."""

    def __init__(self, context: CodecContext) -> None:
        self._context = context
        self.accounts: dict[str, Account] = {}
        self._entries_sent = self._entries = 0
        self._norms: tuple[float, float] | None = None
        self._measured_at = float("-inf")
        self._asked, self._due_at = 0, 1
        self._residuals: tuple[float, Codec, Sequence[Any]] | None = None
        """Norm of the last measured contribution, and the places of its residual once the exchange has completed."""

    def account(self, purpose: str) -> Account | None:
        """Return the account of a purpose; None for a single worker, which sends nothing."""
        return self.accounts.setdefault(purpose, Account()) if self._context.workers > 1 else None

    def context(self, part: FlatBuffer, start: int = 0, stop: int | None = None) -> CodecContext:
        """Return the context of a codec that encodes these elements of a flat buffer."""
        stop = part.theta.numel() if stop is None else stop
        held = [one for one in part.slots if start <= one.start and one.stop <= stop]
        blocks = [Block(one.name, one.start - start, one.stop - start, tuple(one.source.local.shape)) for one in held]
        return replace(self._context, blocks=blocks, theta=part.theta.detach()[start:stop])

    def count_values(self, codec: Codec, message: Tensor, like: Tensor) -> None:
        """Count the values of a tensor like `like` that a message holds."""
        if codec.pair and self._context.workers > 1:
            values = codec.values_sent(message, like) if not codec.linear else min(message.numel(), like.numel())
            self._entries_sent += values
            self._entries += like.numel()

    def norm_of(self, tensors: Sequence[Tensor]) -> float | None:
        """Return the norm of the tensors to encode, at intervals; None when no measurement is due."""
        self._measure_residuals()
        now = self._context.clock() if self._context.clock is not None else 0.0
        self._asked += 1
        if now - self._measured_at < MEASURE_EVERY_S and self._asked < self._due_at:
            return None
        self._measured_at, self._due_at = now, 2 * self._asked
        return _norm(tensors)

    def measure_residual_later(self, norm_of_input: float | None, codec: Codec, states: Sequence[Any]) -> None:
        """Have the residual measured if the norm of the contribution was.

        It is measured after the exchange: a codec of several collective operations has its residual only then.
        """
        if norm_of_input is not None:
            self._residuals = norm_of_input, codec, states

    def _measure_residuals(self) -> None:
        if self._residuals is None:
            return
        (norm_of_input, codec, states), self._residuals = self._residuals, None
        residuals = [one for state in states if (one := codec.residual(state)) is not None]
        if residuals:
            self._norms = norm_of_input, _norm(residuals)

    def figures(self) -> dict[str, Any]:
        """Return the fields of progress events."""
        self._measure_residuals()
        bytes_of = {
            purpose: [one.raw_sent, one.sent, one.raw_received, one.received] for purpose, one in self.accounts.items()
        }
        fields: dict[str, Any] = {"traffic": bytes_of} if bytes_of else {}
        if self._entries:
            fields["values_sent"] = [self._entries_sent, self._entries]
        if self._norms is not None:
            fields["residual_norms"] = [round(norm, 9) for norm in self._norms]
        return fields


def _norm(flat: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(one.float().square().sum()) for one in flat))
