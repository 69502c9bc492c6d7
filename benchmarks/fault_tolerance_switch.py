"""Switches fault tolerance off and on again in a running worker, to measure what it costs.

Two runs with the same settings differ by up to a tenth in speed for as long as they run: a difference of 1% cannot be
seen between two runs. Here both sides are the same processes: at the end of a segment all workers switch off the same
functions at the same step. Memory that fault tolerance occupies (a second set of gradient buffers, a sleeping thread)
stays occupied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stretto.training.trainer import Trainer
from stretto.transport.elastic import ElasticTransport

BARE = "bare"
"""Word that starts a segment without fault tolerance."""


class FaultToleranceSwitch:
    """Fault tolerance of one worker, which can be switched off between two steps."""

    def __init__(self, trainer: Trainer) -> None:
        assert isinstance(trainer.transport, ElasticTransport)
        self._trainer, self._transport = trainer, trainer.transport
        self._is_ready = True

    def set_for_segment(self, word: str) -> None:
        """Switch fault tolerance off for the next segment if `word` is BARE, and on otherwise."""
        if (word != BARE) != self._is_ready:
            self._is_ready = not self._is_ready
            self._set_strategy()
            self._set_transport()

    def _set_strategy(self) -> None:
        """Switch alternating buffers, kept gradients, codec state snapshots and the split of lost batches."""
        strategy: Any = self._trainer.strategy
        exchange = strategy._gradients if strategy.exchanges_gradients else strategy.sets[0].rounds
        exchange._elastic = exchange.codec_states._elastic = self._is_ready
        epoch: Any = self._trainer.epoch_batches
        epoch._parts = self._is_ready

    def _set_transport(self) -> None:
        """Switch retained collective results, status reports, heartbeats and the check for pause requests."""
        transport: Any = self._transport
        client, inner = transport._coordinator, transport._inner
        transport._kept.clear()  # values written there in a bare segment are not gradients of the script
        plain: dict[str, Callable[..., Any]] = {
            name: getattr(inner, name) for name in ("submit", "all_gather_bytes", "broadcast_bytes")
        }
        plain |= {"attempt": _call_directly, "doing": _return_false, "is_to_rest": _return_false}
        for name, function in plain.items():
            self._replace(transport, name, function)
        self._replace(client, "_send_pending", _return_false)

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        if self._is_ready:
            delattr(owner, name)
        else:
            setattr(owner, name, function)


def _call_directly(function: Callable[[], Any], *_: Any, **__: Any) -> Any:
    return function()


def _return_false(*_: Any, **__: Any) -> bool:
    return False
