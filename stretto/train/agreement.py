"""Looking at the agreed model between exchanges, without disturbing the training.

Between two exchanges workers differ. To evaluate, to save or at the end of a pass, all of them look at the same model:
the mean of their parameters, weighted by the samples since the last exchange. When training goes on each worker takes
up its own parameters again, unless the script has changed the model meanwhile: then the script's change stands.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.train.arena import Arena
from stretto.train.state import FlatTensors, MovingBuffers
from stretto.train.talk import finish
from stretto.wire import Wire


class Look:
    """The agreed model in place of a worker's own, until `resume`. Cost: one exact exchange of the parameters."""

    def __init__(self, arena: Arena, buffers: MovingBuffers, wire: Wire, share: float) -> None:
        buffers.agree()
        self._tensors: Sequence[Tensor] = [*(part.theta for part in arena.parts), *buffers.floating()]
        self._own = [one.clone() for one in self._tensors]
        flat = FlatTensors(self._tensors)
        flat.take(finish(flat.ask_mean(wire, share)))
        self._shown = [one.clone() for one in self._tensors]

    @property
    def drift(self) -> float | None:
        """How far this worker's own parameters are from the agreed ones, relative to those."""
        pairs = list(zip(self._own, self._shown, strict=True))
        apart = sum(float((own - shown).double().square().sum()) for own, shown in pairs)
        whole = sum(float(shown.double().square().sum()) for shown in self._shown)
        return (apart / whole) ** 0.5 if whole else None

    @torch.no_grad()
    def resume(self) -> bool:
        """Take up the own parameters again. False when the script has changed the model: its values are kept."""
        untouched = all(torch.equal(now, shown) for now, shown in zip(self._tensors, self._shown, strict=True))
        if untouched:
            for now, own in zip(self._tensors, self._own, strict=True):
                now.copy_(own)
        return untouched
