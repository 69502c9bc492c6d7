"""State of a flat buffer between two exchanges with an asynchronous server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.codecs import Codec
from stretto.parameter_server.client_types import ranges
from stretto.recipe.what import What, gradients, parameters
from stretto.state import save
from stretto.strategies.flat_buffers import FlatBuffer
from stretto.strategies.optimizers import Optimizers
from stretto.strategies.traffic_counters import Tally

Groups = Mapping[int, dict[str, Any]]
"""Parameter groups of the optimizers, by the id of each parameter in them."""


class ServerRange(Protocol):
    """State of one flat buffer between exchanges."""

    part: FlatBuffer
    change: Tensor
    """The update, flat."""

    def compute_change(self, what: What, groups: Groups) -> None:
        """Compute the update since the last exchange."""

    def compute_empty_change(self, what: What) -> None:
        """Set the update to one without effect."""

    def encode(self, shard: int) -> list[Tensor]:
        """Return the messages to a shard."""
        ...

    def count_values(self, messages: list[list[Tensor]]) -> None:
        """Count the values in the messages to all shards."""

    def sent(self) -> None:
        """Begin the next update: the present one was sent."""

    def undo(self) -> None:
        """Restore the parameters as they were before the steps of an update that is not sent."""

    def before_read(self) -> None:
        """Prepare for a version of the server that will replace the parameters."""

    def was_read(self) -> None:
        """Note that the parameters were set to a version of the server."""

    def start_from_read(self) -> None:
        """Continue from the version that was read."""

    def not_finite(self) -> str | None:
        """Return the name of a parameter whose update is not finite; None if all are."""
        ...


class FlatRange:
    """State of one flat buffer between exchanges. All of its numbers are exchanged."""

    def __init__(self, part: FlatBuffer, how: Codec, shards: int, tally: Tally) -> None:
        self.part, self._how, self._tally = part, how, tally
        self.mark = part.theta.clone()
        self.change = torch.empty_like(part.theta)
        self.bounds = ranges(part.theta.numel(), shards)
        self.states = [how.init_state(part.theta[a:b], tally.context(part, a, b)) for a, b in self.bounds]
        save(self.states, f"the state of {how}")  # raises now, and not when a checkpoint is due
        self.known = part.theta.clone() if how.reply is not None else None
        """The server's parameters, as decoded from its replies; None if replies are not encoded."""

    def compute_change(self, what: What, groups: Groups) -> None:
        """Write the update into `change`."""
        if isinstance(what, parameters):
            self.change.copy_(self.part.theta)
        elif isinstance(what, gradients):
            self._descend(groups)
        else:
            torch.sub(self.part.theta, self.mark, out=self.change)

    def _descend(self, groups: Groups) -> None:
        """Write the gradient step of every parameter, `-lr * g`, into `change`."""
        self.change.zero_()
        for slot in self.part.slots:
            gradient = slot.source.gradient
            if gradient is not None and slot.home is None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                slot.view(self.change).copy_(dense).mul_(-float(groups[id(slot.parameter)]["lr"]))

    def compute_empty_change(self, what: What) -> None:
        """Set `change` to an update without effect."""
        if isinstance(what, parameters):
            self.change.copy_(self.part.theta)
        else:
            self.change.zero_()

    def encode(self, shard: int) -> list[Tensor]:
        """Return the message to a shard."""
        return [self._how.encode(self.change[slice(*self.bounds[shard])], self.states[shard])]

    def count_values(self, messages: list[list[Tensor]]) -> None:
        """Count the values in the messages to all shards."""
        for (message,), bounds in zip(messages, self.bounds, strict=True):
            self._tally.count_values(self._how, message, self.change[slice(*bounds)])

    def sent(self) -> None:
        """Begin the next update: the present one was sent."""
        self.mark.copy_(self.part.theta)

    def undo(self) -> None:
        """Restore the parameters as they were before the steps of an update that is not sent."""
        self.part.theta.copy_(self.mark)

    def before_read(self) -> None:
        """Do nothing: the caller keeps what it needs of the parameters."""

    def was_read(self) -> None:
        """Note that the parameters were set to a version of the server."""
        if self.known is not None:
            self.known.copy_(self.part.theta)

    def start_from_read(self) -> None:
        """Continue from the version that was read."""
        self.mark.copy_(self.part.theta)

    def not_finite(self) -> str | None:
        """Return the name of a parameter whose update is not finite; None if all are."""
        for slot in self.part.slots:
            if not bool(torch.isfinite(self.change[slot.start : slot.stop]).all()):
                return slot.name
        return None


def groups_of(optimizers: Optimizers) -> Groups:
    """Return the group of each parameter."""
    return {id(parameter): group for group in optimizers.param_groups for parameter in group["params"]}
