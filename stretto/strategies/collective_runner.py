"""Holds conversations over a wire: several at once, each turn of all before the next turn of any."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stretto.collective_ops import CollectiveCoroutine, CollectiveOp
from stretto.strategies.traffic_counters import Account
from stretto.transport import Handle, Transport


class CollectiveRunner:
    """One conversation under way; its first ask is out when this is made. `account` counts what is said."""

    def __init__(self, transport: Transport, conversation: CollectiveCoroutine, account: Account | None = None) -> None:
        self._transport = transport
        self._conversation = conversation
        self._account = account
        self.result: Tensor | None = None
        self.ask: CollectiveOp | None = None
        """The ask that is out."""
        self._ticket: Handle | None = self._start(next(conversation))

    def turn(self) -> bool:
        """Wait for the answer to the ask that is out and go on; True when the conversation is over."""
        if self._ticket is None or self.ask is None:
            return True
        answer = self._ticket.wait()
        if self._account is not None:
            self._account.heard(self.ask, answer)
        try:
            self._ticket = self._start(self._conversation.send(answer))
        except StopIteration as end:
            self._ticket, self.ask, self.result = None, None, end.value
        return self._ticket is None

    def _start(self, ask: CollectiveOp) -> Handle:
        self.ask = ask
        if self._account is not None:
            self._account.said(ask)
        return self._transport.submit(ask)


def finish(talks: Sequence[CollectiveRunner]) -> list[Tensor]:
    """Bring all conversations to their end, in the same order at every worker; returns their results."""
    open_talks = list(talks)
    while open_talks:
        open_talks = [talk for talk in open_talks if not talk.turn()]
    return [talk.result for talk in talks if talk.result is not None]
