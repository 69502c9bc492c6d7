"""The collectives of FSDP among the ranks of a worker, with their bytes and the time in which a rank waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.runtime.phase_timer import Stopwatch


class Exchanged:
    """Bytes that this rank has sent, and as many received: those of a ring. Waits count in the timer's phase."""

    def __init__(self, timer: Stopwatch | None) -> None:
        self._timer, self.nbytes = timer, 0

    @contextmanager
    def of(self, whole: Tensor, part: Tensor) -> Iterator[None]:
        """Count a collective of a whole tensor, of which this rank has a part. GPUs return before its end."""
        self.nbytes += whole.nbytes - part.nbytes
        timer = self._timer
        if timer is None or timer.phase != "computing":
            yield
            return
        with timer.on("waiting"):
            yield


class _Collective:
    """A collective that FSDP calls."""

    def __init__(self, exchanged: Exchanged) -> None:
        self._exchanged = exchanged

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor for an operation."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Collective):
    """The all-gather of parameters."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Gather the parts of all ranks."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before
        with self._exchanged.of(output_tensor, input_tensor):
            return gather(output_tensor, input_tensor, group, async_op)


class WeightedReduceScatter(_Collective):
    """The reduce-scatter of gradients, each rank's multiplied by a factor."""

    def __init__(self, exchanged: Exchanged, factor: Callable[[], float]) -> None:
        super().__init__(exchanged)
        self._factor = factor

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Reduce and scatter."""
        if (factor := self._factor()) != 1:
            input_tensor.mul_(factor)
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before
        with self._exchanged.of(input_tensor, output_tensor):
            return reduce_scatter(output_tensor, input_tensor, op, group, async_op)
