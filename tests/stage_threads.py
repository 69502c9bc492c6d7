"""Pipelines whose ranks are threads of one process, over the in-memory transport."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from thread_pool import thread_pool
from torch import Tensor, nn

from stretto.errors import TransportError
from stretto.parallel.calls import record_calls
from stretto.parallel.link import Link
from stretto.parallel.pipeline import Pipeline
from stretto.recipe.layout import pipeline
from stretto.strategies.optimizers import Optimizers
from stretto.strategies.parameter_view import is_held
from stretto.transport import in_memory
from stretto.transport.single_worker import SingleWorkerTransport

Found = TypeVar("Found")
TIMEOUT_S = 60.0


def callbacks() -> tuple[Callable[..., Any], ...]:
    """Return the callbacks of a rank of the only worker, for its RankContext."""
    alone = SingleWorkerTransport()
    return alone.all_gather_bytes, alone.broadcast_bytes, print, lambda: None, lambda: None


def in_threads(ranks: int, work: Callable[[Link], Found]) -> list[Found]:
    """Return the result of `work` at each rank; raise the error of the rank that failed first."""
    transports = in_memory.wires(ranks, TIMEOUT_S)

    def run(rank: int) -> Found:
        try:
            return work(Link(transports[rank]))
        except BaseException:
            transports[rank].close()
            raise

    with thread_pool(ranks) as pool:
        futures = [pool.submit(contextvars.Context().run, run, rank) for rank in range(ranks)]
        errors = [error for future in futures if (error := future.exception(3 * TIMEOUT_S)) is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, TransportError))
    return [future.result() for future in futures]


def equal_parts(cuts: Sequence[int], stages: int) -> list[int]:
    """Return the first calls of stages with about as many cuts each."""
    return [0, *(cuts[stage * len(cuts) // stages] for stage in range(1, stages))]


def split(link: Link, model: nn.Module, optimizer: torch.optim.Optimizer, layout: pipeline, *args: Any) -> None:
    """Split a model over the ranks of a link, at about equally many cuts; `args` are those of its forward pass."""
    calls = record_calls(model, args, {})
    Pipeline(model, Optimizers([optimizer]), layout, link, calls, equal_parts(sorted(calls.cuts), layout.stages))


def joined(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return all parameters of a split model, each from the rank that holds it."""
    return {name: one.detach() for model in models for name, one in model.named_parameters() if is_held(one)}


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of two models' parameters, which have the same names."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
