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
from stretto.parallel.read_guard import refuse_objects
from stretto.strategies.optimizers import Optimizers
from stretto.strategies.parameter_view import is_held
from stretto.transport.tensor_bytes import Packed, packed, unpacked

_PARTS = msgspec.msgpack.Decoder(dict[str, Packed])


def give_whole_states(model: nn.Module, link: Link) -> None:
    """Let `state_dict()` of the model return the whole state at every rank; refuse files and copies of the object.

    The class's own method (`type(model).state_dict(model)`) returns this rank's part.
    """
    names = [*type(model).state_dict(model)]
    model.state_dict = functools.partial(_of_model, model, link, names)  # type: ignore[method-assign,assignment]
    refuse_objects(model)
    model.register_state_dict_post_hook(_without_others)  # type: ignore[no-untyped-call]


def give_whole_optimizer_states(optimizers: Optimizers, link: Link) -> None:
    """Let `state_dict()` of the optimizers of a split model return the whole state at every rank."""
    for optimizer in optimizers:
        _drop_others(optimizer)
        optimizer.register_load_state_dict_post_hook(_drop_others)
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
    parts = [_PARTS.decode(part) for part in link.gather(message)]
    return {name: unpacked(one) for part in parts for name, one in part.items()}


def _without_others(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Remove the tensors of other stages from the `state_dict` of a module."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        if not is_held(tensor):
            state.pop(prefix + name, None)


def _drop_others(optimizer: torch.optim.Optimizer) -> None:
    """Remove the state of other stages' parameters from an optimizer."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not is_held(parameter):
                optimizer.state.pop(parameter, None)
