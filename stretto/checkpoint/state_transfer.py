"""State of a run as tensors and facts, for joining workers and for checkpoints."""

from __future__ import annotations

import base64
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stretto.checkpoint.folder import new_digest
from stretto.checkpoint.storage import State
from stretto.errors import ModelError, explain
from stretto.runtime.device_random import device_states, set_device_states
from stretto.strategies.model_sync import plain_name, state_of, trained
from stretto.strategies.optimizers import Optimizers, device_of_state
from stretto.strategies.parameter_view import like_parameter, local
from stretto.transport.tensor_bytes import Packed, octets, packed, unpacked

Own = tuple[dict[str, Any], dict[str, Tensor]]
"""State of one worker: facts and tensors."""


class _Encoded(msgspec.Struct):
    """Encoded form of a state."""

    facts: dict[str, Any]
    tensors: dict[str, Packed]
    own: dict[int, tuple[dict[str, Any], dict[str, Packed]]]


_ENCODED = msgspec.msgpack.Decoder(_Encoded)
_OWN = msgspec.msgpack.Decoder(tuple[dict[str, Any], dict[str, Packed]])


def pack(state: State) -> bytes:
    """Encode a state as bytes."""
    own = {worker: (facts, _packed(tensors)) for worker, (facts, tensors) in state.own.items()}
    return msgspec.msgpack.encode(_Encoded(state.facts, _packed(state.tensors), own))


def unpack(data: bytes) -> State:
    """Decode a state."""
    encoded = _ENCODED.decode(data)
    own = {worker: (facts, _unpacked(tensors)) for worker, (facts, tensors) in encoded.own.items()}
    return State(encoded.facts, _unpacked(encoded.tensors), own)


def in_parts(state: State) -> tuple[bytes, list[Tensor]]:
    """Return a state as a message and the tensors that the message names, in order."""
    own = {worker: (facts, list(tensors)) for worker, (facts, tensors) in state.own.items()}
    tensors = [*state.tensors.values(), *(one for _, each in state.own.values() for one in each.values())]
    return msgspec.msgpack.encode((state.facts, list(state.tensors), own)), [local(one) for one in tensors]


def of_parts(message: bytes, tensors: list[Tensor]) -> State:
    """Return the state of a message and its tensors."""
    kind = tuple[dict[str, Any], list[str], dict[int, tuple[dict[str, Any], list[str]]]]
    facts, names, own = msgspec.msgpack.decode(message, type=kind)
    rest = iter(tensors)

    def named(names: list[str]) -> dict[str, Tensor]:
        return {name: next(rest) for name in names}

    return State(facts, named(names), {worker: (facts, named(names)) for worker, (facts, names) in own.items()})


def pack_own(own: Own) -> bytes:
    """Encode the state of one worker as bytes."""
    return msgspec.msgpack.encode((own[0], _packed(own[1])))


def unpack_own(data: bytes | memoryview) -> Own:
    """Decode the state of one worker."""
    facts, tensors = _OWN.decode(data)
    return facts, _unpacked(tensors)


def _packed(tensors: Mapping[str, Tensor]) -> dict[str, Packed]:
    return {name: packed(local(tensor)) for name, tensor in tensors.items()}


def _unpacked(tensors: Mapping[str, Packed]) -> dict[str, Tensor]:
    return {name: unpacked(tensor) for name, tensor in tensors.items()}


# --- bytes in facts -------------------------------------------------------------------------------------------------


def as_text(facts: Any) -> Any:
    """Return facts with bytes replaced by text, as a manifest holds them."""
    if isinstance(facts, bytes):
        return {"base64": base64.b64encode(facts).decode()}
    if isinstance(facts, Mapping):
        return {str(name): as_text(value) for name, value in facts.items()}
    return [as_text(fact) for fact in facts] if isinstance(facts, list | tuple) else facts


def from_text(facts: Any) -> Any:
    """Return the facts with their bytes restored."""
    if isinstance(facts, Mapping):
        if set(facts) == {"base64"}:
            return base64.b64decode(facts["base64"])
        return {name: from_text(value) for name, value in facts.items()}
    return [from_text(fact) for fact in facts] if isinstance(facts, list) else facts


# --- model and optimizer --------------------------------------------------------------------------------------------


def state_dict_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the model's `state_dict` that this process holds, by the names in the script's model."""
    return {
        plain_name(name): value for name, value in type(model).state_dict(model).items() if isinstance(value, Tensor)
    }


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the entries of the model's `state_dict` by name, and the buffers that are not in it."""
    in_state_dict = state_dict_of(model)
    further = {name: tensor for name, tensor in state_of(model).items() if name not in in_state_dict}
    return {f"model/{name}": tensor for name, tensor in in_state_dict.items()} | {
        f"more/{name}": tensor for name, tensor in further.items()
    }


def frozen_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that nothing trains, as entries of `model_tensors`."""
    parameters = model.named_parameters(remove_duplicate=False)
    frozen = {plain_name(name) for name, one in parameters if not trained(one)}
    return {f"model/{name}": one for name, one in state_dict_of(model).items() if name in frozen}


def checksum(tensors: Mapping[str, Tensor]) -> bytes:
    """Return a checksum of tensors, their names, types and shapes."""
    digest = new_digest()
    for name, one in sorted(tensors.items()):
        digest.update(repr((name, one.dtype, tuple(one.shape))).encode())
        digest.update(octets(local(one)).data)
    return digest.digest()


def mean_model(own: Mapping[int, Own]) -> dict[str, Tensor]:
    """Return the mean of the models that workers had of their own, of tensors of real numbers and of one shape."""
    models = [tensors for _, tensors in own.values()]
    return {
        name: torch.stack([model[name] for model in models]).mean(0)
        for name, first in (models[0].items() if models else ())
        if name.startswith(("model/", "more/")) and first.is_floating_point()
        if all(name in model and model[name].shape == first.shape for model in models)
    }


@torch.no_grad()
def load_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load these tensors into the model. Raises ModelError if they belong to another model."""
    _resize_observers(model, {name.partition("/")[2]: one for name, one in tensors.items()})
    for name, held in model_tensors(model).items():
        _load(name.partition("/")[2], held, tensors.get(name))


@torch.no_grad()
def load_some(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load some parameters and buffers of the model, by name. Raises ModelError if they belong to another model."""
    _resize_observers(model, tensors)
    held = state_of(model)
    for name, stored in tensors.items():
        _load(name, held.get(name), stored)


def _resize_observers(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give buffers of one number or none, as observers have before the first forward pass, the loaded lengths."""
    for name, buffer in model.named_buffers():
        stored = tensors.get(plain_name(name))
        if stored is not None and stored.dim() == 1 and buffer.numel() <= 1:
            buffer.resize_(stored.shape)


def _load(name: str, held: Tensor | None, stored: Tensor | None) -> None:
    tensor = None if held is None else local(held)
    if tensor is None or stored is None or stored.shape != tensor.shape:
        got, expected = ("nothing" if one is None else str(tuple(one.shape)) for one in (stored, tensor))
        problem = f"the loaded state does not fit this model: {name}"
        to_type = "the same script as before, with the same arguments"
        raise ModelError(explain(problem, got=got, expected=expected, to_type=to_type))
    tensor.copy_(stored)


def optimizer_tensors(optimizers: Optimizers) -> dict[str, Tensor]:
    """Return the optimizers' state by parameter and name, counters as tensors.

    Parameters with an entry in `unsaved` are left out: a part of their state would be wrong. A sparse entry, such as
    the momentum of sparse gradients, becomes dense, which steps alike.
    """
    return {
        f"optimizer/{index}/{name}": _as_dense(value)
        if isinstance(value, Tensor)
        else torch.tensor(value, device="cpu")
        for index, (_, state) in enumerate(optimizers.states())
        if not _unsaved(state)
        for name, value in sorted(state.items())
        if value is not None
    }


def _as_dense(value: Tensor) -> Tensor:
    return value.to_dense() if value.is_sparse else value


def unsaved(optimizers: Optimizers) -> list[str]:
    """Return the names of optimizer state that is neither a tensor nor a number, such as the lists of L-BFGS."""
    return sorted({name for _, state in optimizers.states() for name in _unsaved(state)})


def _unsaved(state: Mapping[str, Any]) -> list[str]:
    return [name for name, value in state.items() if value is not None and not isinstance(value, Tensor | int | float)]


def load_optimizers(optimizers: Optimizers, tensors: Mapping[str, Tensor]) -> None:
    """Replace the optimizers' state. Raises ModelError for state of parameters that no optimizer holds."""
    parameters = optimizers.parameters
    groups = [group for group in optimizers.param_groups for _ in group["params"]]
    states: list[tuple[nn.Parameter, dict[str, Any]]] = [(parameter, {}) for parameter in parameters]
    for path, value in tensors.items():
        kind, _, index_and_name = path.partition("/")
        if kind != "optimizer":
            continue
        index, _, name = index_and_name.partition("/")
        if int(index) >= len(parameters):
            raise ModelError(
                explain(
                    "the loaded state belongs to other optimizers",
                    got=f"the state of parameter {index}",
                    expected=f"the state of {len(parameters)} parameters",
                    to_type="all parameter groups in the optimizer before stretto.distribute; freeze the later ones",
                )
            )
        parameter, state = states[int(index)]
        on_device = value.to(device_of_state(groups[int(index)], parameter, value.dim())).clone()
        state[name] = like_parameter(parameter, on_device)
    optimizers.replace_states(states)
    for optimizer in optimizers:
        vars(optimizer)["_opt_called"] = True  # schedulers check it; it stepped in an earlier process


# --- random states --------------------------------------------------------------------------------------------------


def random_states(loader: Any) -> Own:
    """Return the random states of this process and of the generators of a loader."""
    version, numbers, gauss = random.getstate()
    kind, keys, *position_and_gauss = np.random.get_state()
    facts = {"python": [version, list(numbers), gauss], "numpy": [kind, *position_and_gauss]}
    tensors = {"random/torch": torch.get_rng_state(), "random/numpy": torch.from_numpy(np.array(keys, np.int64))}
    tensors |= {f"random/device/{index}": state for index, state in enumerate(device_states())}
    for index, generator in enumerate(_generators(loader)):
        tensors[f"random/loader/{index}"] = generator.get_state()
    return facts, tensors


def restore_random_states(own: Own, loader: Any) -> None:
    """Restore random states."""
    facts, tensors = own
    if "python" not in facts:
        return
    version, numbers, gauss = facts["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, *position_and_gauss = facts["numpy"]
    np.random.set_state((kind, tensors["random/numpy"].numpy().astype(np.uint32), *position_and_gauss))
    torch.set_rng_state(tensors["random/torch"])
    numbers = itertools.takewhile(lambda index: f"random/device/{index}" in tensors, itertools.count())
    set_device_states([tensors[f"random/device/{index}"] for index in numbers])
    for index, generator in enumerate(_generators(loader)):
        if f"random/loader/{index}" in tensors:
            generator.set_state(tensors[f"random/loader/{index}"])


def _generators(loader: Any) -> Iterator[torch.Generator]:
    """Yield the generators of a loader and its samplers, each once."""
    if not isinstance(loader, DataLoader):
        return
    holders = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    generators = {
        id(generator): generator for holder in holders if (generator := getattr(holder, "generator", None)) is not None
    }
    yield from generators.values()
