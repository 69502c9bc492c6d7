"""The attributes of a trainer that elasticity and checkpoints use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn

from stretto.loader.epoch_batches import BatchSource, EpochBatches
from stretto.parallel.rank_parts import RankParts
from stretto.runtime.event_writer import EventWriter
from stretto.runtime.phase_timer import Stopwatch
from stretto.strategies.optimizers import Optimizers
from stretto.strategies.strategy import Strategy
from stretto.training.evaluator import Evaluator
from stretto.training.progress import LoopProgress
from stretto.training.section import Section
from stretto.training.settings import Settings
from stretto.training.speed_shares import SpeedShares
from stretto.transport import Transport


class EpochsView(Protocol):
    """The part of a loop's epochs that elasticity and checkpoints use."""

    @property
    def current(self) -> EpochBatches | None:
        """The epoch under way."""

    @property
    def closing(self) -> EpochBatches | None:
        """The epoch that is being closed; None at other times."""

    def push_all(self) -> None:
        """Push the remaining update to a server, and wait until it is applied."""

    lost: list[tuple[int, str]]
    """Losses of streams that this worker knows: the epoch, and a text."""

    def note_lost(self, text: str, writes: bool) -> None:
        """Note that batches of a stream were lost in this epoch; one worker `writes`."""

    def restore_lost(self, lost: Sequence[tuple[int, str]]) -> None:
        """Take the losses of a state."""

    def push_stepped(self) -> None:
        """Push the remaining update, unless gradients are accumulated."""

    def run_synced(self, then: Callable[[], None]) -> None:
        """Replace the model by the server's, with all workers at a barrier, call `then`, and continue."""


class GlobalStepsView(Protocol):
    """The part of a loop's global steps that elasticity and checkpoints use."""

    def is_at_rest(self) -> bool:
        """Return True if no computed gradient or update waits for an exchange or a step."""

    def refuse_not_finite(self) -> None:
        """Raise NotFiniteError if a gradient of the last step was not finite."""


class AgentView(Protocol):
    """The part of a worker's place in a changing membership that checkpoints use."""

    def returned(self) -> tuple[bytes, int] | None:
        """Return the samples that the next epoch trains for an earlier one, serialised, and how many of them count."""

    def unsaved(self) -> list[tuple[int, str]]:
        """Return the losses of a run that is resumed from now: work of an earlier epoch, which no checkpoint has."""


class TrainerView(Protocol):
    """The attributes of a trainer that elasticity and checkpoints use."""

    model: nn.Module
    optimizers: Optimizers
    loader: Any
    batch_source: BatchSource
    transport: Transport
    section: Section
    timer: Stopwatch
    events: EventWriter
    strategy: Strategy
    evaluator: Evaluator
    settings: Settings
    progress: LoopProgress
    shares: SpeedShares
    is_over: bool
    rank_parts: RankParts

    @property
    def agent(self) -> AgentView:
        """The worker's part in a changing membership."""

    @property
    def epochs(self) -> EpochsView:
        """The epochs of the loop."""

    @property
    def global_steps(self) -> GlobalStepsView:
        """The global steps of the loop."""
