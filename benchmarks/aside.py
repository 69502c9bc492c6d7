"""Sets aside, in a running worker, what it does to be ready for a death, and takes it up again.

Two runs of the very same kind differ by up to a tenth as long as they live, so that 1% is not to be seen between two of
them. Here both sides are the same processes: at the end of a segment all workers set aside the same things at the same
step. What a worker holds in memory for it (a second board of gradients, a thread that sleeps) stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stretto.training.trainer import Trainer
from stretto.transport.elastic import ElasticTransport

BARE = "bare"
"""The word for a segment without all that."""


class Aside:
    """One worker's readiness, which can be set aside between two steps."""

    def __init__(self, trainer: Trainer) -> None:
        assert isinstance(trainer.wire, ElasticTransport)
        self._trainer, self._wire = trainer, trainer.wire
        self._is_ready = True

    def heed(self, word: str) -> None:
        """Before a segment: be ready in it, or not."""
        if (word != BARE) != self._is_ready:
            self._is_ready = not self._is_ready
            self._set_exchange()
            self._set_wire()

    def _set_exchange(self) -> None:
        """Two boards in turn, own gradients that are kept, memories that can be put back, parts of those who die."""
        replica: Any = self._trainer.replica
        exchange = replica.gradients or replica.rounds
        exchange._elastic = exchange.codec_states._elastic = self._is_ready
        hands: Any = self._trainer.hands
        hands._parts = self._is_ready

    def _set_wire(self) -> None:
        """Attempts and their answers that are kept, what is told of oneself, beats, looking whether to rest."""
        wire: Any = self._wire
        companion, inner = wire._standing, wire._inner
        wire._kept.clear()  # what is written there meanwhile is not what a script does to its gradients
        plain: dict[str, Callable[..., Any]] = {
            name: getattr(inner, name) for name in ("submit", "all_gather_bytes", "broadcast_bytes")
        }
        plain |= {"attempt": _at_once, "doing": _nothing, "is_to_rest": _nothing}
        for name, act in plain.items():
            self._replace(wire, name, act)
        self._replace(companion, "_speak", _nothing)

    def _replace(self, owner: Any, name: str, act: Callable[..., Any]) -> None:
        if self._is_ready:
            delattr(owner, name)
        else:
            setattr(owner, name, act)


def _at_once(act: Callable[[], Any], *_: Any, **__: Any) -> Any:
    return act()


def _nothing(*_: Any, **__: Any) -> bool:
    return False
