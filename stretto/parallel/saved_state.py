"""Whole states of a split model and its optimizers, as files of the script hold them: each rank's part is gathered.

All ranks of a worker call `state_dict()` at the same place of the script, as they call the model.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from stretto.parallel.link import Link
from stretto.strategies.optimizers import Optimizers
from stretto.transport.tensor_bytes import Packed, packed, unpacked


def give_whole_states(model: nn.Module, optimizers: Optimizers, link: Link) -> None:
    """Let `state_dict()` of the model and of its optimizers return the whole state at every rank.

    The class's own method (`type(model).state_dict(model)`) returns this rank's part.
    """
    names = [*type(model).state_dict(model)]
    model.state_dict = functools.partial(_of_model, model, link, names)  # type: ignore[method-assign,assignment]
    for optimizer in optimizers:
        optimizer.state_dict = functools.partial(_of_optimizer, optimizer, link)  # type: ignore[method-assign]


def _of_model(model: nn.Module, link: Link, names: Sequence[str], *args: Any, **options: Any) -> dict[str, Any]:
    own: dict[str, Any] = type(model).state_dict(model, *args, **options)
    if args or options.get("destination") is not None or options.get("prefix"):  # a part of a larger module's
        return own
    others = _gathered(link, {name: one for name, one in own.items() if isinstance(one, Tensor)})
    whole = others | own
    order = [name for name in dict.fromkeys((*names, *whole)) if name in whole]
    own.clear()  # the object has the versions of the modules, too
    own.update((name, whole[name]) for name in order)
    return own


def _of_optimizer(optimizer: torch.optim.Optimizer, link: Link) -> dict[str, Any]:
    whole: dict[str, Any] = type(optimizer).state_dict(optimizer)
    states: dict[int, dict[str, Any]] = whole["state"]
    numbers = {
        f"{index}/{name}": value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
        for index, state in states.items()
        for name, value in state.items()
        if isinstance(value, Tensor | int | float)
    }
    for place, tensor in _gathered(link, numbers).items():
        index, _, name = place.partition("/")
        states.setdefault(int(index), {}).setdefault(name, tensor)
    whole["state"] = dict(sorted(states.items()))
    return whole


def _gathered(link: Link, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of all ranks by name."""
    message = msgspec.msgpack.encode({name: packed(tensor) for name, tensor in tensors.items()})
    parts = [msgspec.msgpack.decode(part, type=dict[str, Packed]) for part in link.gather(message)]
    return {name: unpacked(one) for part in parts for name, one in part.items()}
