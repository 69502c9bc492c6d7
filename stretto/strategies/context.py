"""Collaborators of a strategy: its view of the training loop, and the objects of the worker that it shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from stretto.data.leases import Lease
from stretto.runtime.event_writer import EventWriter
from stretto.runtime.phase_timer import Pace, Stopwatch
from stretto.runtime.runtime import Runtime
from stretto.strategies.traffic_counters import Tally
from stretto.transport import Transport

Push = Callable[[int, list[Lease]], bool]
"""Pushes an update, the work on these samples and leases; returns False if the update was left out."""


class ExchangeObserver(Protocol):
    """The training loop, as a strategy notifies it."""

    @property
    def is_weightless(self) -> bool:
        """True while this worker makes a pass of weight 0."""

    def take_back_pass(self) -> None:
        """Take back the gradients of a backward pass of weight 0, before an exchange at its end."""

    def exchange_ended(self, blocked_s: float) -> None:
        """Note that an exchange has ended, which blocked this worker for `blocked_s` seconds."""

    def mark(self, index: int | None = None) -> int:
        """Return the mark of the step of this optimizer, or of the gradients of all."""

    def batch(self) -> int:
        """Return the number of the global step that this worker is in."""

    def refuse_apart(self, batches: Mapping[int, int] | None = None) -> None:
        """Raise the error that names workers that take part in one exchange in different steps.

        All workers call this, or some with what they know: `batches` are those that other workers are in, by rank.
        """

    def settle(self, leases: list[Lease]) -> None:
        """Note that a server has applied the work on these leases."""

    def push(self, push: Push) -> None:
        """Call `push` with the samples and leases whose work no exchange has carried yet."""


@dataclass(frozen=True, slots=True)
class StrategyContext:
    """Objects of a worker that its strategy uses."""

    transport: Transport
    timer: Stopwatch
    events: EventWriter
    tally: Tally
    runtime: Runtime
    pace: Pace
    skips_non_finite: bool = False
    """True if an asynchronous worker leaves out an update with NaN or infinity; False if it raises an error."""
    start_sums: Mapping[str, int] = field(default_factory=dict)
    """Checksums, by name, of tensors that the script makes alike at each worker, also at late ones."""
