"""Runs coroutines of collective operations on a transport: several at once, each step of all before the next of any."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stretto.collective_ops import CollectiveCoroutine, CollectiveOp
from stretto.strategies.traffic_counters import Account
from stretto.transport import Handle, Transport


class CollectiveRunner:
    """A coroutine under way; its first operation is submitted on creation. `account` counts its bytes."""

    def __init__(self, transport: Transport, coroutine: CollectiveCoroutine, account: Account | None = None) -> None:
        self._transport = transport
        self._coroutine = coroutine
        self._account = account
        self.result: Tensor | None = None
        self.ask: CollectiveOp | None = None
        """The operation that is under way; None at the end."""
        self._handle: Handle | None = self._start(next(coroutine))

    def turn(self) -> bool:
        """Wait for the operation under way and submit the next one. Return True at the coroutine's end."""
        if self._handle is None or self.ask is None:
            return True
        answer = self._handle.wait()
        if self._account is not None:
            self._account.count_received(self.ask, answer)
        try:
            self._handle = self._start(self._coroutine.send(answer))
        except StopIteration as end:
            self._handle, self.ask, self.result = None, None, end.value
        return self._handle is None

    def _start(self, ask: CollectiveOp) -> Handle:
        self.ask = ask
        if self._account is not None:
            self._account.count_sent(ask)
        return self._transport.submit(ask)


def finish(runners: Sequence[CollectiveRunner]) -> list[Tensor]:
    """Run all coroutines to their end, in the same order at every worker; return their results."""
    running = list(runners)
    while running:
        running = [runner for runner in running if not runner.turn()]
    return [runner.result for runner in runners if runner.result is not None]
