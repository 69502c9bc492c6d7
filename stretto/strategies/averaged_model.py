"""Looking at the agreed model between exchanges, without disturbing the training.

Between two exchanges workers differ. To evaluate, to save or at the end of a pass, all of them look at the same model:
the mean of their parameters, weighted by the samples since the last exchange, or a server's newest version. When
training goes on each worker takes up its own parameters again, unless the script has changed the model meanwhile: then
the script's change stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stretto.strategies.collective_runner import finish
from stretto.strategies.flat_buffers import FlatBuffer
from stretto.strategies.tensor_sync import FlatTensors, MovingBuffers
from stretto.strategies.traffic_counters import Account
from stretto.transport import Transport
from stretto.transport.elastic import attempted


class AveragedModel:
    """The agreed model in place of a worker's own, until `resume`. Cost: one exact exchange of the parameters.

    `sets` are the parts of each set of parameters with this worker's share in their mean. `read` puts the agreed
    parameters in place, and says whether what the worker had before is still its own; without it they are the workers'
    mean. Buffers are averaged with the share of the first set.
    """

    def __init__(
        self,
        sets: Sequence[tuple[Sequence[FlatBuffer], Callable[[], float]]],
        buffers: MovingBuffers,
        transport: Transport,
        account: Account | None,
        read: Callable[[], bool] | None = None,
    ) -> None:
        buffers.agree()
        groups = [([part.theta for part in parts], share) for parts, share in sets]
        parameters = [one for tensors, _ in groups for one in tensors]
        self._tensors: Sequence[Tensor] = [*parameters, *buffers.floating()]
        self._own, self._parts = [one.clone() for one in self._tensors], len(parameters)
        if read is not None and not read():
            self._own[: self._parts] = [one.clone() for one in parameters]
        averaged = [(FlatTensors(tensors), share) for tensors, share in groups if read is None]
        averaged.append((FlatTensors(buffers.floating()), groups[0][1]))

        def means() -> list[list[Tensor]]:
            asked = [flat.ask_mean(transport, share(), account) for flat, share in averaged]
            return [finish(one) for one in asked]

        for (flat, _), found in zip(averaged, attempted(transport, means), strict=True):
            flat.take(found)
        self._shown = [one.clone() for one in self._tensors]

    @property
    def own_parameters(self) -> Sequence[Tensor]:
        """This worker's own parameters, by the parts of the arena."""
        return self._own[: self._parts]

    @property
    def drift(self) -> float | None:
        """How far this worker's own parameters are from the agreed ones, relative to those."""
        pairs = list(zip(self._own, self._shown, strict=True))
        apart = sum(float((own - shown).double().square().sum()) for own, shown in pairs)
        whole = sum(float(shown.double().square().sum()) for shown in self._shown)
        return (apart / whole) ** 0.5 if whole else None

    @torch.no_grad()
    def resume(self, own: bool = True) -> bool:
        """Take up the own parameters again, if so. False when the script has changed the model: its values are kept."""
        untouched = all(torch.equal(now, shown) for now, shown in zip(self._tensors, self._shown, strict=True))
        if untouched and own:
            for now, before in zip(self._tensors, self._own, strict=True):
                now.copy_(before)
        return untouched
