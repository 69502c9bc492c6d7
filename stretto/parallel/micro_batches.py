"""Micro-batches: the arguments of a model, in pieces of about equally many samples.

The samples are the first dimension of the first tensor among the arguments; tensors of another length belong to each
piece as a whole. So a model has to treat each sample for itself, which `refuse_mixing` tries with the first batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from stretto.errors import ModelError, explain
from stretto.parallel.remote import seen
from stretto.recipe.layout import pipeline
from stretto.runtime.device_random import kept_random_states
from stretto.runtime.kept_modules import kept_modules

TOLERANCE = 0.05
"""Largest difference between two outputs that is rounding, also in 16 bits, as a share of the largest output."""


def rows_of(arguments: Any) -> int:
    """Return the number of samples of a batch; 0 for one without a tensor that has rows.

    >>> rows_of(({"x": torch.ones(3, 2)}, 5))
    3
    """
    return next((len(one) for one in tree_leaves(arguments) if isinstance(one, Tensor) and one.dim()), 0)


def pieces(flat: Sequence[Any], count: int) -> list[list[Any]]:
    """Return the flat arguments of each of at most `count` micro-batches.

    >>> pieces([torch.tensor([1, 2, 3]), "a"], 2)
    [[tensor([1, 2]), 'a'], [tensor([3]), 'a']]
    """
    rows = rows_of(flat)
    count = min(count, rows)
    if count <= 1:
        return [list(flat)]
    cut = [
        one.tensor_split(count) if isinstance(one, Tensor) and one.dim() and len(one) == rows else [one] * count
        for one in flat
    ]
    return [list(piece) for piece in zip(*cut, strict=True)]


def micro_batch(layout: pipeline, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the arguments of the first micro-batch, which is the largest, given those of a batch."""
    flat, shape = tree_flatten((tuple(args), dict(kwargs)))
    return tree_unflatten(pieces(flat, layout.micro_batches)[0], shape)


def refuse_mixing(
    model: nn.Module, layout: pipeline, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> None:
    """Raise ModelError if this batch has other outputs in micro-batches than as a whole, without training.

    Models whose outputs are random then, too, are not tried. Random states and buffers are as before afterwards.
    """
    flat, shape = tree_flatten((tuple(args), dict(kwargs)))
    parts = pieces(flat, layout.micro_batches)
    if len(parts) == 1:
        return

    def outputs(given: Sequence[Any]) -> list[Tensor]:
        args, kwargs = tree_unflatten(list(given), shape)
        return [one for one in tree_leaves(seen(model.forward(*args, **kwargs))) if isinstance(one, Tensor)]

    with kept_modules(model), kept_random_states(device), torch.no_grad():
        for module in model.modules():
            module.training = False
        whole, again = outputs(flat), outputs(flat)
        if any(not one.dim() or len(one) != rows_of(flat) for one in whole):
            return  # no rows to compare: such outputs are refused when they are joined
        if any(_difference(one, other) for one, other in zip(whole, again, strict=True)):
            return
        try:
            found = [outputs(part) for part in parts]
            joined = [torch.cat(each) for each in zip(*found, strict=True)]
        except (RuntimeError, ValueError, AssertionError, IndexError) as error:
            raise ModelError(_mixes(layout, f"{type(error).__name__} with a micro-batch: {error}")) from error
    for one, other in zip(whole, joined, strict=True):
        if difference := _difference(one, other):
            raise ModelError(_mixes(layout, difference))


def _difference(one: Tensor, other: Tensor) -> str:
    """Return the difference of two outputs in words; nothing if it is rounding, or if they are whole numbers."""
    if one.shape != other.shape:
        return f"outputs of shape {tuple(other.shape)} in place of {tuple(one.shape)}"
    if not one.is_floating_point() or not one.numel():
        return ""
    one, other = one.double(), other.double()
    largest = float(torch.where(one.isfinite(), one.abs(), 0).max())
    if torch.allclose(one, other, rtol=0, atol=TOLERANCE * largest, equal_nan=True):
        return ""
    return f"outputs that differ by {float((one - other).abs().nan_to_num().max()):.3g}, of at most {largest:.3g}"


def _mixes(layout: pipeline, got: str) -> str:
    return explain(
        "the model has other outputs for a batch in micro-batches than for the whole batch, so it mixes its samples",
        got=got,
        expected="a model that treats each sample for itself, and has samples in the first dimension of its tensors",
        to_type=f'batch_first=True, or --layout "pipeline(stages={layout.stages}, micro_batches=1)"',
    )
