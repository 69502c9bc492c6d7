"""Parts of the tensors of a sharded model and of its optimizers: of whole tensors this rank's part, and whole again."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from stretto.parallel import refusals
from stretto.parallel.link import Link
from stretto.parallel.mapped_tables import moved_to_file
from stretto.parallel.part_operations import whole_tensor
from stretto.parallel.read_guard import refuse_objects
from stretto.strategies.model_sync import plain_name
from stretto.strategies.optimizers import Optimizers
from stretto.strategies.parameter_view import like_parameter, local


class Shards:
    """One rank's parts, along the first dimension, of the parameters and of state of the same shape."""

    def __init__(self, model: nn.Module, optimizers: Optimizers, link: Link) -> None:
        self._model, self._optimizers, self._link = model, optimizers, link
        self._rank, self._ranks = link.rank, link.ranks

    def repoint(self, before: Mapping[int, str]) -> None:
        """Let the optimizers train the sharded parameters in place of the parameters `before`, named by their ids."""
        after = dict(self._model.named_parameters(remove_duplicate=False))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["params"] = [self._moved(optimizer, one, after, before) for one in group["params"]]
            refusals.refuse_kept_parameters(optimizer, before)

    def _moved(
        self, optimizer: Optimizer, one: Parameter, after: Mapping[str, Parameter], before: Mapping[int, str]
    ) -> Parameter:
        """Return the parameter in place of one, with its state."""
        if id(one) not in before:
            return one
        new = after[before[id(one)]]
        if state := optimizer.state.pop(one, None):
            optimizer.state[new] = {name: self._entry(value, new) for name, value in state.items()}
        return new

    # --- whole tensors by name ----------------------------------------------------------------------------------

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors at rank 0, given the parts of all ranks; one after another, so that few are whole.

        Large ones that were gathered are in files.
        """
        found = {}
        for name, tensor in tensors.items():
            one = whole_tensor(self._placed(name, tensor))
            if self._rank == 0:
                found[name] = one if one is tensor else moved_to_file(one)
        return found

    def parts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's parts of whole tensors; other tensors are not changed."""
        return {name: self._part(tensor, self._parameter_of(name)) for name, tensor in tensors.items()}

    def _placed(self, name: str, tensor: Tensor) -> Tensor:
        parameter = self._parameter_of(name)
        return tensor if parameter is None else like_parameter(parameter, tensor)

    def _part(self, tensor: Tensor, like: Tensor | None) -> Tensor:
        if like is None or tensor.shape != like.shape or tensor.shape == local(like.detach()).shape:
            return tensor
        chunks = tensor.chunk(self._ranks)
        return chunks[self._rank] if self._rank < len(chunks) else tensor[:0]

    def _entry(self, value: Any, like: Parameter) -> Any:
        """Return this rank's part of an entry of a parameter's state, given whole."""
        return like_parameter(like, self._part(value, like)) if isinstance(value, Tensor) else value

    def _parameter_of(self, name: str) -> Parameter | None:
        """Return the parameter that a tensor of a checkpoint belongs to."""
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            return self._optimizers.parameters[int(rest.partition("/")[0])]
        return self._named.get(rest) if kind == "model" else None

    @property
    def _named(self) -> dict[str, Parameter]:
        named = self._model.named_parameters(remove_duplicate=False)
        return {plain_name(name): one for name, one in named}

    # --- what the script saves and loads ------------------------------------------------------------------------

    def give_whole_states(self) -> None:
        """Let the script save and load whole states of the model and of its optimizers, at all ranks together.

        Files and copies of the model's object are refused.
        """
        model: Any = self._model
        model.state_dict = functools.partial(self._state_dict, model)
        model.load_state_dict = functools.partial(self._load_model, model)
        refuse_objects(model)
        for each in self._optimizers:
            optimizer: Any = each
            optimizer.state_dict = functools.partial(self._state_dict, optimizer)
            optimizer.load_state_dict = functools.partial(self._load_optimizer, optimizer)

    def _state_dict(self, of: Any, *args: Any, **options: Any) -> Any:
        state = type(of).state_dict(of, *args, **options)
        if args or options.get("prefix"):
            return state
        self._link.gather(b"")  # gloo aborts a process that gathers here what another one does not
        return _all_whole(state)

    def _load_model(self, model: nn.Module, state: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        options.pop("assign", None)  # the parameters are of another class than those of the state, and stay
        named = self._named
        parts = {name: self._entry(one, named[name]) if name in named else one for name, one in state.items()}
        return type(model).load_state_dict(model, parts, *args, **options)

    def _load_optimizer(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        of_number = dict(zip(numbers, parameters, strict=False))
        states = {
            number: {name: self._entry(value, of_number[number]) for name, value in entries.items()}
            for number, entries in state["state"].items()
        }
        type(optimizer).load_state_dict(optimizer, {**state, "state": states})


def _all_whole(state: Any) -> Any:
    """Return a state with whole tensors in place of parts, gathered in the same order at all ranks."""
    if isinstance(state, Tensor):
        return whole_tensor(state)
    if not isinstance(state, dict):
        return state
    made = copy.copy(state)  # a model's has the versions of the modules, too
    made.update((name, _all_whole(one)) for name, one in state.items())
    return made
