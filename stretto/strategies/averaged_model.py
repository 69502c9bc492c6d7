"""The averaged model between exchanges, without a change to the training.

Between two exchanges the workers' parameters differ. To evaluate, to save, or at the end of an epoch, all workers hold
the same model: the mean of their parameters, weighted by the samples since the last exchange, or a server's newest
version. Afterwards each worker restores its own parameters, unless the script has changed the model in between: then
the script's values are kept.
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


class AveragedModel:
    """The averaged model in place of a worker's own, until `resume`. Cost: one exact all-reduce of the parameters.

    `sets` holds the flat buffers of each parameter set, with this worker's share in their mean. `read` replaces the
    parameters by a server's, and returns True if the worker's former parameters are still valid; without it they are
    averaged over the workers. Buffers are averaged with the share of the first set.
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
            operations = [flat.ask_mean(transport, share(), account) for flat, share in averaged]
            return [finish(one) for one in operations]

        for (flat, _), received in zip(averaged, transport.attempt(means), strict=True):
            flat.take(received)
        self._shown = [one.clone() for one in self._tensors]

    @property
    def own_parameters(self) -> Sequence[Tensor]:
        """This worker's own parameters, by flat buffer."""
        return self._own[: self._parts]

    @property
    def drift(self) -> float | None:
        """Distance of this worker's own parameters from the averaged ones, relative to the norm of the latter."""
        pairs = list(zip(self._own, self._shown, strict=True))
        distance = sum(float((own - shown).double().square().sum()) for own, shown in pairs)
        norm = sum(float(shown.double().square().sum()) for shown in self._shown)
        return (distance / norm) ** 0.5 if norm else None

    def is_changed(self) -> bool:
        """Return True if the script has changed the model: its values stay."""
        return not all(torch.equal(now, shown) for now, shown in zip(self._tensors, self._shown, strict=True))

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore this worker's parameters."""
        for now, before in zip(self._tensors, self._own, strict=True):
            now.copy_(before)
