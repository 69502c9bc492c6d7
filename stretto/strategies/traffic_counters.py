"""What this worker said and heard in exchanges: bytes raw and encoded, by purpose; and what it still owes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from stretto.codecs import Block, Codec, CodecContext
from stretto.collective_ops import AllGather, Answer, CollectiveOp
from stretto.strategies.flat_buffers import FlatBuffer

MEASURE_EVERY_S = 5.0
"""Seconds between two measurements of norms, which are also due at the 1st, 2nd, 4th, 8th ... contribution.

So the last measurement of a short run is of its later half.
"""


@dataclass(slots=True)
class Account:
    """Bytes of one purpose, before the wire multiplies them: `raw` is what exact numbers would take."""

    raw_sent: int = 0
    sent: int = 0
    raw_received: int = 0
    received: int = 0

    def began(self, raw: int) -> None:
        """An exchange of numbers of so many bytes: as much would be said and heard exactly."""
        self.raw_sent += raw
        self.raw_received += raw

    def said(self, ask: CollectiveOp) -> None:
        """An ask sets off."""
        self.sent += ask.tensor.nbytes

    def heard(self, ask: CollectiveOp, answer: Answer) -> None:
        """Its answer is there: a mean, or the messages of all others."""
        every = sum(one.nbytes for one in answer) if isinstance(ask, AllGather) else 2 * ask.tensor.nbytes
        self.received += every - ask.tensor.nbytes


class Tally:
    """All that a worker counts about its exchanges. `clock` tells when norms are measured anew."""

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
        """That of a purpose; None for a worker that is alone, who says nothing to anybody."""
        return self.accounts.setdefault(purpose, Account()) if self._context.workers > 1 else None

    def context(self, part: FlatBuffer, start: int = 0, stop: int | None = None) -> CodecContext:
        """Where a codec works that encodes these numbers of a part."""
        stop = part.theta.numel() if stop is None else stop
        held = [one for one in part.slots if start <= one.start and one.stop <= stop]
        blocks = [Block(one.name, one.start - start, one.stop - start, tuple(one.parameter.shape)) for one in held]
        return replace(self._context, blocks=blocks, theta=part.theta.detach()[start:stop])

    def spoke(self, codec: Codec, message: Tensor, like: Tensor) -> None:
        """A message speaks of some of the numbers of a tensor like this one."""
        if codec.pair and self._context.workers > 1:
            told = codec.values_sent(message, like) if not codec.linear else min(message.numel(), like.numel())
            self._entries_sent += told
            self._entries += like.numel()

    def norm_of(self, given: Sequence[Tensor]) -> float | None:
        """The norm of what is about to be encoded, now and then; None when it is not time to measure."""
        self._measure_residuals()
        now = self._context.clock() if self._context.clock is not None else 0.0
        self._asked += 1
        if now - self._measured_at < MEASURE_EVERY_S and self._asked < self._due_at:
            return None
        self._measured_at, self._due_at = now, 2 * self._asked
        return _norm(given)

    def owes(self, given: float | None, codec: Codec, states: Sequence[Any]) -> None:
        """Have the residual measured if the norm of the contribution was.

        It is measured after the exchange: a codec of several collective operations has its residual only then.
        """
        if given is not None:
            self._residuals = given, codec, states

    def _measure_residuals(self) -> None:
        if self._residuals is None:
            return
        (given, codec, states), self._residuals = self._residuals, None
        residuals = [one for state in states if (one := codec.residual(state)) is not None]
        if residuals:
            self._norms = given, _norm(residuals)

    def figures(self) -> dict[str, Any]:
        """What progress events carry."""
        self._measure_residuals()
        bytes_of = {
            purpose: [one.raw_sent, one.sent, one.raw_received, one.received] for purpose, one in self.accounts.items()
        }
        found: dict[str, Any] = {"traffic": bytes_of} if bytes_of else {}
        if self._entries:
            found["values_sent"] = [self._entries_sent, self._entries]
        if self._norms is not None:
            found["residual_norms"] = [round(norm, 9) for norm in self._norms]
        return found


def _norm(flat: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(one.float().square().sum()) for one in flat))
