"""Holds conversations over a wire: several at once, each turn of all before the next turn of any."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stretto.wire import Ticket, Wire
from stretto.words import Conversation


class Talk:
    """One conversation under way; its first ask is out when this is made."""

    def __init__(self, wire: Wire, conversation: Conversation) -> None:
        self._wire = wire
        self._conversation = conversation
        self.result: Tensor | None = None
        self._ticket: Ticket | None = wire.start(next(conversation))

    def turn(self) -> bool:
        """Wait for the answer to the ask that is out and go on; True when the conversation is over."""
        if self._ticket is None:
            return True
        answer = self._ticket.wait()
        try:
            self._ticket = self._wire.start(self._conversation.send(answer))
        except StopIteration as end:
            self._ticket, self.result = None, end.value
        return self._ticket is None


def finish(talks: Sequence[Talk]) -> list[Tensor]:
    """Bring all conversations to their end, in the same order at every worker; returns their results."""
    open_talks = list(talks)
    while open_talks:
        open_talks = [talk for talk in open_talks if not talk.turn()]
    return [talk.result for talk in talks if talk.result is not None]
