"""The state of a run as others take it over: who joins it, and whoever goes on from a checkpoint."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stretto.checkpoint.storage import State
from stretto.errors import ModelError, explain
from stretto.strategies.model_sync import plain_name, state_of
from stretto.strategies.optimizers import Optimizers
from stretto.transport.tensor_bytes import Packed, packed, unpacked

Own = tuple[dict[str, Any], dict[str, Tensor]]
"""What a worker has for itself: facts and tensors."""


class _Told(msgspec.Struct):
    """A state as it travels."""

    facts: dict[str, Any]
    tensors: dict[str, Packed]
    own: dict[int, tuple[dict[str, Any], dict[str, Packed]]]


def pack(state: State) -> bytes:
    """A state as bytes."""
    own = {worker: (facts, _packed(tensors)) for worker, (facts, tensors) in state.own.items()}
    return msgspec.msgpack.encode(_Told(state.facts, _packed(state.tensors), own))


def unpack(told: bytes) -> State:
    """The state again."""
    found = msgspec.msgpack.decode(told, type=_Told)
    own = {worker: (facts, _unpacked(tensors)) for worker, (facts, tensors) in found.own.items()}
    return State(found.facts, _unpacked(found.tensors), own)


def pack_own(own: Own) -> bytes:
    """What a worker has for itself, as bytes."""
    return msgspec.msgpack.encode((own[0], _packed(own[1])))


def unpack_own(told: bytes) -> Own:
    """The same again."""
    facts, tensors = msgspec.msgpack.decode(told, type=tuple[dict[str, Any], dict[str, Packed]])
    return facts, _unpacked(tensors)


def _packed(tensors: Mapping[str, Tensor]) -> dict[str, Packed]:
    return {name: packed(one) for name, one in tensors.items()}


def _unpacked(tensors: Mapping[str, Packed]) -> dict[str, Tensor]:
    return {name: unpacked(one) for name, one in tensors.items()}


# --- bytes in facts -------------------------------------------------------------------------------------------------


def as_text(facts: Any) -> Any:
    """Facts in which bytes are text, as a manifest holds them."""
    if isinstance(facts, bytes):
        return {"base64": base64.b64encode(facts).decode()}
    if isinstance(facts, Mapping):
        return {str(name): as_text(value) for name, value in facts.items()}
    return [as_text(one) for one in facts] if isinstance(facts, list | tuple) else facts


def from_text(facts: Any) -> Any:
    """The facts again."""
    if isinstance(facts, Mapping):
        if set(facts) == {"base64"}:
            return base64.b64decode(facts["base64"])
        return {name: from_text(value) for name, value in facts.items()}
    return [from_text(one) for one in facts] if isinstance(facts, list) else facts


# --- model and optimizer --------------------------------------------------------------------------------------------


def state_dict_of(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the model's `state_dict`, by the names that the script's model has for them."""
    return {plain_name(name): one for name, one in model.state_dict().items() if isinstance(one, Tensor)}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The entries of the model's `state_dict` by name, and buffers that are in none."""
    named = state_dict_of(model)
    others = {name: one for name, one in state_of(model).items() if name not in named}
    return {f"model/{name}": one for name, one in named.items()} | {f"more/{name}": one for name, one in others.items()}


@torch.no_grad()
def take_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put them in place. Raises ModelError when the model is another one."""
    for name, one in model_tensors(model).items():
        found = tensors.get(name)
        if found is None or found.shape != one.shape:
            got = "nothing" if found is None else str(tuple(found.shape))
            raise ModelError(
                explain(
                    f"the state that is taken over is not this model's: {name.partition('/')[2]}",
                    got=got,
                    expected=str(tuple(one.shape)),
                    to_type="the same script as before, with the same arguments",
                )
            )
        one.copy_(found)


def optimizer_tensors(optimizers: Optimizers) -> dict[str, Tensor]:
    """The optimizers' state by parameter and name; counters that are plain numbers as tensors too.

    Nothing of a parameter with a state that is `unkept`: half of it would be wrong.
    """
    return {
        f"optimizer/{index}/{name}": value if isinstance(value, Tensor) else torch.tensor(value)
        for index, (_, state) in enumerate(optimizers.states())
        if not _unkept(state)
        for name, value in sorted(state.items())
        if value is not None
    }


def unkept(optimizers: Optimizers) -> list[str]:
    """The names of what optimizers keep that is neither a tensor nor a number, such as the lists of L-BFGS."""
    return sorted({name for _, state in optimizers.states() for name in _unkept(state)})


def _unkept(state: Mapping[str, Any]) -> list[str]:
    return [name for name, value in state.items() if value is not None and not isinstance(value, Tensor | int | float)]


def take_optimizers(optimizers: Optimizers, tensors: Mapping[str, Tensor]) -> None:
    """Put them in place of what there is. Raises ModelError when they are of parameters that no optimizer holds."""
    parameters = optimizers.parameters
    states: list[tuple[nn.Parameter, dict[str, Any]]] = [(one, {}) for one in parameters]
    for path, value in tensors.items():
        kind, _, rest = path.partition("/")
        if kind != "optimizer":
            continue
        index, _, name = rest.partition("/")
        if int(index) >= len(parameters):
            raise ModelError(
                explain(
                    "the state that is taken over is of other optimizers",
                    got=f"the state of parameter {index}",
                    expected=f"the state of {len(parameters)} parameters",
                    to_type="all parameter groups in the optimizer before stretto.distribute; freeze those that wait",
                )
            )
        parameter, state = states[int(index)]
        state[name] = value.to(parameter.device if value.dim() else "cpu").clone()
    optimizers.replace_states(states)
    for one in optimizers:
        vars(one)["_opt_called"] = True  # it has stepped, though not here: schedulers of passes that are over ask


# --- random states --------------------------------------------------------------------------------------------------


def random_states(loader: Any) -> Own:
    """Those of this process, and of the generators that a loader draws from."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    facts = {"python": [version, list(numbers), gauss], "numpy": [kind, *rest]}
    tensors = {"random/torch": torch.get_rng_state(), "random/numpy": torch.from_numpy(np.array(keys, np.int64))}
    for index, one in enumerate(_generators(loader)):
        tensors[f"random/loader/{index}"] = one.get_state()
    return facts, tensors


def take_random_states(own: Own, loader: Any) -> None:
    """Go on drawing where they were."""
    facts, tensors = own
    if "python" not in facts:
        return
    version, numbers, gauss = facts["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, *rest = facts["numpy"]
    np.random.set_state((kind, tensors["random/numpy"].numpy().astype(np.uint32), *rest))
    torch.set_rng_state(tensors["random/torch"])
    for index, one in enumerate(_generators(loader)):
        if f"random/loader/{index}" in tensors:
            one.set_state(tensors[f"random/loader/{index}"])


def _generators(loader: Any) -> Iterator[torch.Generator]:
    """The generators of a loader and its samplers, each once."""
    if not isinstance(loader, DataLoader):
        return
    holders = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    found = {id(one): one for holder in holders if (one := getattr(holder, "generator", None)) is not None}
    yield from found.values()
