"""Models that the script builds on torch's meta device, without memory, and of which each process builds its part.

    with torch.device("meta"):
        model = Net()                 # shapes only
    optimizer = torch.optim.AdamW(model.parameters())
    loader = stretto.distribute(model, optimizer, loader)

`place_meta` gives the tensors a device and no memory; `build` gives them memory and the values of `reset_parameters`, a
unit at a time: a module that one stage of a pipeline runs, or the tensors that an open module has itself. Every process
draws the random numbers of all units, so the values do not depend on who keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from stretto.errors import ModelError, explain
from stretto.parallel.calls import opened
from stretto.parallel.mapped_tables import MappedTables
from stretto.runtime.device_random import kept_random_states, seed_devices, seed_of
from stretto.strategies.parameter_view import hold_elsewhere, hold_here, without_memory

_unbuilt = WeakIdKeyDictionary()
"""Tensors that have no values yet."""
RESETS = ("reset_parameters", "_reset_parameters", "reset_running_stats")
"""Names of the methods of torch's modules that give their own tensors the first values."""


def place_meta(model: nn.Module, device: torch.device) -> None:
    """Move tensors from the meta device to this one, without memory: their values are NaN until they are built.

    The script's objects stay the same, so an optimizer that was made before holds them.
    """
    for module in model.modules():
        for tensor in _tensors(module):
            if tensor.device.type == "meta":
                empty: Tensor = without_memory(tensor, device)
                if isinstance(tensor, nn.Parameter):
                    empty = nn.Parameter(empty, tensor.requires_grad)
                torch.utils.swap_tensors(tensor, empty)  # type: ignore[no-untyped-call]
                _unbuilt[tensor] = True
                hold_elsewhere(tensor)


def is_unbuilt(model: nn.Module) -> bool:
    """Return True if tensors of a model have no values yet."""
    return any(tensor in _unbuilt for tensor in _all_tensors(list(model.modules())))


def build(
    model: nn.Module,
    random_state: Tensor | None = None,
    keeps: Callable[[str], bool] = lambda _: True,
    in_files: Container[int] = (),
) -> None:
    """Give values to the tensors that have none, and keep those whose names `keeps` accepts.

    Tensors of the CPU whose ids are `in_files` are in memory-mapped files. Random numbers are drawn from `random_state`
    on, or from the present state of torch's generator, which does not change. Raises ModelError for a module with such
    tensors and without a method `reset_parameters`.
    """
    if not is_unbuilt(model):
        return
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    units = [(name, inner) for name, inner in _units(model) if any(one in _unbuilt for one in _all_tensors(inner))]
    device = next((one.device for _, unit in units for one in _all_tensors(unit)), torch.device("cpu"))
    with kept_random_states(device), torch.no_grad():
        if random_state is not None:
            torch.set_rng_state(random_state)
        if device.type != "cpu":
            seed_devices(seed_of(torch.get_rng_state().numpy().tobytes()))
        for name, unit in units:
            with _memory(unit, in_files) as unbuilt:
                _reset(name, unit)
                for tensor in unbuilt:
                    if keeps(names[id(tensor)]):
                        del _unbuilt[tensor]
                        hold_here(tensor)


def build_states(optimizers: Iterable[Optimizer], in_files: Container[int] = ()) -> None:
    """Give memory to the states that optimizers made of parameters without memory, as Adagrad does when it is made.

    Raises ModelError for states whose first value is not known.
    """
    for group, parameter, state in _states(optimizers):
        for name, value in state.items():
            if isinstance(value, Tensor) and value.is_meta:
                first = group.get("initial_accumulator_value")
                if first is None or value.shape != parameter.shape:
                    raise ModelError(_no_state(name))
                state[name] = _memory_of(parameter.detach(), id(parameter) in in_files)
                if first or id(parameter) not in in_files:
                    state[name].fill_(first)


def _states(optimizers: Iterable[Optimizer]) -> Iterator[tuple[dict[str, Any], nn.Parameter, dict[str, Any]]]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield group, parameter, optimizer.state.get(parameter, {})


@contextmanager
def with_memory(module: nn.Module) -> Iterator[None]:
    """Give a module memory within, with zeros where it has no values, to measure the times of its calls."""
    with _memory(list(module.modules())) as unbuilt:
        for tensor in unbuilt:
            tensor.data.zero_()
        yield


@contextmanager
def _memory(modules: list[nn.Module], in_files: Container[int] = ()) -> Iterator[list[Tensor]]:
    """Yield the tensors of a unit without values, and give them memory; tensors still without values lose it again."""
    unbuilt = [tensor for tensor in _all_tensors(modules) if tensor in _unbuilt]
    for tensor in unbuilt:
        tensor.data = _memory_of(tensor, id(tensor) in in_files)
    try:
        yield unbuilt
    finally:
        for tensor in unbuilt:
            if tensor in _unbuilt:
                tensor.data = without_memory(tensor, tensor.device)


def _memory_of(tensor: Tensor, in_file: bool) -> Tensor:
    """Return new memory for a tensor, on the CPU perhaps in a memory-mapped file, where it is zeros."""
    if in_file and tensor.device.type == "cpu":
        return MappedTables().zeros(tensor)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _units(model: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """Return the units of a model, each as its modules from the innermost on."""
    named = [(name, model.get_submodule(name), is_open) for name, is_open in opened(model).items()]
    return [(name, [module] if is_open else list(_innermost_first(module))) for name, module, is_open in named]


def _innermost_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules within a module in the order in which their constructors end."""
    for child in module.children():
        yield from _innermost_first(child)
    yield module


def _reset(name: str, unit: list[nn.Module]) -> None:
    """Call the methods that give the modules of a unit their first values; that of its outermost one may do for all."""
    resets = [next((found for one in RESETS if (found := getattr(module, one, None))), None) for module in unit]
    for module, reset in zip(unit, resets, strict=True):
        has_own = any(one in _unbuilt for one in _tensors(module))
        if has_own and reset is None and resets[-1] is None:
            raise ModelError(_no_values(name, module))
        if reset is not None and (has_own or module is unit[-1]):
            reset()


def _no_values(name: str, module: nn.Module) -> str:
    own = [one for one, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor in _unbuilt]
    kind = type(module).__name__
    return explain(
        f"the {kind} {name or 'model'} was built on the meta device, and nothing gives its tensors their first values",
        got=f"{', '.join(own[:3])} of a class without reset_parameters",
        expected="a method reset_parameters, as torch's own modules have, that fills the tensors of the module itself",
        to_type=f"def reset_parameters(self) in the class {kind}",
    )


def _no_state(name: str) -> str:
    return explain(
        f"an optimizer that was made of parameters on the meta device has a state {name} without values",
        got="a state that has no memory, and no known first value",
        expected="an optimizer that makes its state in the first step, or torch.optim.Adagrad",
        to_type="the model without torch.device('meta')",
    )


def _tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module itself."""
    return [one for one in (*module._parameters.values(), *module._buffers.values()) if one is not None]


def _all_tensors(modules: list[nn.Module]) -> list[Tensor]:
    """Return the tensors of these modules, each once."""
    return list({id(one): one for module in modules for one in _tensors(module)}.values())
