"""The attributes of a trainer that elasticity and checkpoints use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from stretto.loader.epoch_batches import BatchSource, EpochBatches
from stretto.membership.loop_positions import LoopPosition
from stretto.runtime.event_writer import EventWriter
from stretto.strategies.optimizers import Optimizers
from stretto.strategies.strategy import Strategy
from stretto.training.evaluator import Evaluator
from stretto.training.idle_worker import Settings
from stretto.training.section import Section
from stretto.transport import Transport


class TrainerView(Protocol):
    """The attributes of a trainer that elasticity and checkpoints use."""

    model: nn.Module
    optimizers: Optimizers
    loader: Any
    batch_source: BatchSource
    transport: Transport
    section: Section
    events: EventWriter
    strategy: Strategy
    evaluator: Evaluator
    settings: Settings
    is_over: bool
    epoch_batches: EpochBatches | None
    closing_epoch: EpochBatches | None
    steps: int
    steps_of: list[int]
    step_requests: int
    global_steps_done: int
    stepless_global_steps: int
    rounds_done: int
    samples: int
    epochs: int
    peeks: list[int]
    samples_before: int
    step_requests_before: int

    def push_all(self) -> None:
        """Bring to a server what has not been sent yet, and wait until it is there."""

    def push_stepped(self) -> None:
        """The same of what has been stepped with, where nothing is accumulated."""

    def place(self) -> LoopPosition:
        """Return where the script is in its loop."""

    def is_at_rest(self) -> bool:
        """Return True if no computed gradient or update waits for an exchange or a step."""

    def run_synced(self, then: Callable[[], None]) -> None:
        """Replace the model by the server's, with all workers at a barrier, call `then`, and continue."""
