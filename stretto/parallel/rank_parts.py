"""Parts of a model that the ranks of a worker share: the interface of layouts, and a worker of one rank."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stretto.checkpoint.storage import State
from stretto.loader.arrangement import Arrangement
from stretto.parallel.link import Link
from stretto.recipe.layout import Layout
from stretto.recipe.recipe import Recipe
from stretto.runtime.phase_timer import Stopwatch
from stretto.strategies.optimizers import Optimizers
from stretto.transport.interface import Message, Traffic


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank of a worker. `recipe` is None if workers exchange nothing; `workers` is their number."""

    model: nn.Module
    optimizers: Optimizers
    loader: Any
    evaluate_every: int | None
    recipe: Recipe | None
    workers: int
    link: Link
    continues: bool
    """True if the model gets its values from a checkpoint."""
    gather: Callable[[Message], list[bytes]]
    """Returns the messages of all workers."""
    broadcast: Callable[[Message, int], bytes]
    """Returns the message of one worker at all workers, given its place among them."""
    notice: Callable[[str], None]
    """Shows a line."""
    on_split: Callable[[], None]
    """Called once the model is split."""
    on_exchange: Callable[[], None]
    """Called when the ranks have exchanged parts of the model."""
    timeout_s: float
    """Longest wait of a rank for another one without data."""
    timer: Stopwatch | None = None
    """Phases of this rank's time; None if they are not logged."""
    write: Callable[..., None] = lambda *_, **__: None
    """Writes an event of a kind with these fields."""
    on_backward: Callable[[], None] = lambda: None
    """Called in each backward pass of a model in stages, at all ranks."""


class RankParts(Arrangement):
    """The parts of a worker of one process, which holds the whole model; base of the parts of several ranks."""

    rank = 0
    """Rank of this process in its worker."""
    keeps_exchanges = True
    """True if states of exchanges, in a checkpoint, fit the parts of the model that this process exchanges."""

    def begin(self, facts: Any) -> None:
        """Divide the model as other workers have (`facts`), or else when the script first needs it."""

    def facts(self) -> Any:
        """Return the division, for workers that join; None before it is chosen, and where there is none."""

    def joined(self, state: State) -> State:
        """Return the state of the whole model at rank 0, given that of each rank; all ranks call this."""
        return state

    def joined_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's tensors, whole, at rank 0, given those of each rank; all ranks call this."""
        return tensors

    def part_of(self, state: State) -> State:
        """Return this rank's part of the state of a whole model."""
        return state

    def take_part(self) -> None:
        """Divide the model with the workers that call it for the first time now; all others call this, or the model."""

    def of_first(self, broadcast: Callable[[Callable[[], bytes]], bytes], make: Callable[[], bytes]) -> bytes:
        """Return the message that the first worker makes, at all workers. It may call the model in doing so."""
        return broadcast(make)

    def settle(self) -> None:
        """Exchange the parts of a model that was divided while its mean was in place; all workers call this."""

    def traffic(self) -> Traffic:
        """Return the bytes between the ranks of this worker that no transport counts."""
        return Traffic(0, 0, counted=True)

    def figures(self) -> dict[str, Any]:
        """Return this rank's figures for the event log."""
        return {}

    def agreed(self, is_so: bool) -> bool:
        """Return True if all ranks pass True; they call this together."""
        return is_so

    def gathered(self, own: bytes) -> Sequence[bytes]:
        """Return the messages of ranks that train different samples; they call this together."""
        return [own]

    def end_batch(self, has_stepped: bool) -> None:
        """Note that the script has left a batch of this rank, after a step of an optimizer or without one."""

    def end_epoch(self, is_left: bool, number: int) -> None:
        """Note the end of epoch `number`, from 1, at all ranks together, unless the script has left it early."""

    @property
    def is_whole(self) -> bool:
        """False while ranks leave the model divided between two epochs."""
        return True

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Let each rank hold all rows of the tensors that it holds within; all ranks call this."""
        yield

    def close(self) -> None:
        """Divide nothing after the end of the section."""


def create_parts(layout: Layout, context: RankContext) -> RankParts:
    """Return the parts of the ranks of a worker that a layout names by its import path."""
    module, _, name = layout.carried_out_by.rpartition(".")
    made: RankParts = getattr(importlib.import_module(module), name)(layout, context)
    return made


def uncompiled(forward: Callable[..., Any], inner: bool = False) -> Callable[..., Any]:
    """Return a forward pass that torch.compile does not compile, although the script calls a compiled model.

    With `inner` what it calls is compiled.
    """
    found: Callable[..., Any] = torch.compiler.disable(forward, recursive=not inner)  # type: ignore[no-untyped-call]
    return found
