"""Checks of a model and its optimizer before training, and the same initial state at all workers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from stretto.errors import ModelError, RecipeError, explain
from stretto.loader.data_digest import refuse_different_rows
from stretto.runtime.device_random import seed_devices, seed_of
from stretto.strategies.parameter_view import is_held, local
from stretto.strategies.tensor_sync import crc, follow
from stretto.transport import Transport

Named = list[tuple[str, Parameter]]


def plain_name(name: str) -> str:
    """A parameter's name as the script's model has it, without what torch.compile puts before it."""
    return name.removeprefix("_orig_mod.").replace("._orig_mod.", ".")


class SeveralModels(nn.ModuleList):
    """Several models as one. `given` is what the script gave, which its `evaluate` is called with."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__(models)
        self.given = models


def given(model: nn.Module) -> Any:
    """Return the model, or the list of models, as the script has it."""
    return model.given if isinstance(model, SeveralModels) else model


def trained(parameter: Parameter) -> bool:
    """True if a step of its optimizer may change this parameter: it requires a gradient, or still has one."""
    return parameter.requires_grad or parameter.grad is not None


def trainable(model: nn.Module, optimizers: Iterable[Optimizer], former: Container[int] = ()) -> Named:
    """Return the parameters that these optimizers train, by name, each once.

    Raises ModelError when the optimizers hold parameters that the model does not have, or complex ones; they may hold
    parameters that the script has replaced, whose ids are in `former`.
    """
    held = {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}
    named = [(plain_name(name), one) for name, one in model.named_parameters()]
    foreign = sum(one not in former for one in held - {id(one) for _, one in named})
    if foreign:
        raise ModelError(
            explain(
                "the optimizer holds parameters that are not the model's",
                got=f"{foreign} of {len(held)} parameters of the optimizer are not in the model",
                expected="an optimizer over the model's parameters alone",
                to_type="torch.optim.SGD(model.parameters(), ...) after the last layer was replaced; for more modules, "
                "stretto.distribute([encoder, head], optimizer, loader)",
            )
        )
    found = [(name, one) for name, one in named if id(one) in held and trained(one) and is_held(one)]
    for name, one in found:
        if one.is_complex():
            problem = f"parameter {name} is complex, which can't be exchanged"
            raise ModelError(
                explain(problem, got=str(one.dtype), expected="real numbers", to_type="torch.view_as_real")
            )
    return found


def refuse_all_frozen(model: nn.Module) -> None:
    """Raise ModelError if no parameter of the model is trained, so that there is nothing to exchange."""
    parameters = list(model.parameters())
    if not any(one.requires_grad or one.grad is not None for one in parameters):
        raise ModelError(
            explain(
                "no parameter of the model is trained: all are frozen",
                got=f"{len(parameters)} parameters, none of which requires a gradient",
                expected="at least one parameter that does before the first epoch begins",
                to_type="model.requires_grad_(True); to evaluate alone, start the script with python",
            )
        )


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of this process by name; of several that share their memory, the first."""
    found: dict[str, Tensor] = {}
    for name, one in [*model.named_parameters(), *model.named_buffers()]:
        if is_held(one):
            found[plain_name(name)] = one.detach()
    return found


def agree_on_start(transport: Transport, model: nn.Module, recipe: str, data: str) -> None:
    """Raise, at every worker, unless all have models of the same names, shapes and dtypes, and the same recipe.

    `data` is a digest of the data, or empty where these may differ.
    """
    if any(isinstance(one, UninitializedParameter) for one in model.parameters()):
        raise ModelError(
            explain(
                "the model has parameters without a shape yet",
                got="a lazy module that has not seen a batch",
                expected="every parameter initialised before the call",
                to_type="model(next(iter(loader))[0]) before stretto.distribute",
            )
        )
    mine = [(name, list(local(one).shape), str(one.dtype)) for name, one in state_of(model).items()]
    packed = msgspec.msgpack.encode(mine)
    digest = hashlib.blake2b(packed, digest_size=16).digest()
    told = transport.all_gather_bytes(digest + msgspec.msgpack.encode((recipe, data)))
    if len({one[:16] for one in told}) > 1:
        raise ModelError(_model_difference(transport.all_gather_bytes(packed)))
    others = [msgspec.msgpack.decode(one[16:], type=tuple[str, str]) for one in told]
    by_worker = [spelled for spelled, _ in others]
    if len(set(by_worker)) > 1:
        raise RecipeError(
            explain(
                "the workers were given different recipes",
                got="; ".join(by_worker),
                expected="one recipe",
                to_type="the same script and STRETTO_RECIPE everywhere",
            )
        )
    refuse_different_rows([rows for _, rows in others])


def _model_difference(packed: Sequence[bytes]) -> str:
    layouts = [{name: (shape, kind) for name, shape, kind in msgspec.msgpack.decode(one)} for one in packed]
    names = list(dict.fromkeys(name for layout in layouts for name in layout))
    for name in names:
        found = [layout.get(name) for layout in layouts]
        if any(one != found[0] for one in found):
            shown = ", ".join(f"worker {worker}: {_shape(one)}" for worker, one in enumerate(found))
            problem = f"the workers' models differ in {name}"
            return explain(
                problem,
                got=shown,
                expected="the same model on every worker",
                to_type="build the model from settings that do not depend on the worker",
            )
    return "the workers' models hold the same tensors in a different order"


def _shape(found: tuple[list[int], str] | None) -> str:
    return "not there" if found is None else f"{tuple(found[0])} {found[1].removeprefix('torch.')}"


def same_start(transport: Transport, model: nn.Module) -> dict[str, int]:
    """Bring all workers to worker 0's parameters and buffers; only tensors that differ travel.

    Return the checksums, by name, of tensors that the scripts of several workers have made alike.
    """
    state = state_of(model)
    alike = {name: crc(one) for name, one in state.items()}
    told = transport.all_gather_bytes(msgspec.msgpack.encode([*alike.values()]))
    is_same = len(set(told)) == 1
    if not is_same:
        by_name = zip(*(msgspec.msgpack.decode(one, type=list[int]) for one in told), strict=True)
        alike = {name: values[0] for name, values in zip(state, by_name, strict=True) if len(set(values)) == 1}
    if not (transport.server.agreed(is_same) if transport.server is not None else is_same):
        follow(transport, [one for name, one in state.items() if name not in alike])
    return alike if transport.workers > 1 else {}


def refuse_other_start(model: nn.Module, sums: Mapping[str, int]) -> None:
    """Raise ModelError unless the script of a late worker has made these tensors as those of the others did."""
    held = state_of(model)
    other = [name for name, value in sums.items() if name not in held or crc(held[name]) != value]
    if other:
        raise ModelError(
            explain(
                "a worker that comes late has another model than those that began the run",
                got=f"other values of {', '.join(other[:3])}{', ...' * (len(other) > 3)}, which the run does not train",
                expected="the values that the scripts of the first workers made",
                to_type="torch.manual_seed(0) before the model is made",
            )
        )


def part_random_states(transport: Transport, section: int = 1) -> None:
    """Give every worker but the first random states of its own, so that dropout and augmentation differ among them.

    Worker 0 keeps the script's: a run with one worker draws what the script alone draws.
    """
    told = transport.broadcast_bytes(str(torch.initial_seed()).encode())
    if transport.worker == 0:
        return
    draw_from(told + f":{transport.worker}{f':{section}' * (section > 1)}".encode())


def draw_from(text: bytes) -> None:
    """Put all random generators of this process where this text says."""
    own = seed_of(text)
    torch.default_generator.manual_seed(own)
    seed_devices(own)
    random.seed(own)
    np.random.seed(own % (1 << 32))
