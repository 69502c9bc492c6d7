"""The calls of modules in a forward pass, and the places among them at which the model can be cut.

A *call* is the entry into a module's `forward`, numbered from 0, the model itself. Modules that consist of others, such
as the model or an `nn.Sequential`, are *open*: the calls within them are numbered too. All others are run by one stage.
A stage begins at a call: it receives one tensor, the input of that call, and all else that it needs it computes, or
finds in the batch. So the model can be cut at a call if no later operation uses another tensor from before it.

The calls are found by running the forward pass on shapes. The result of a module is labelled with its call, and a
result of several tensors with the first of their labels; a use of a tensor with label a after call b excludes all cuts
between the two. The input of a call has its label from then on, as `h` in `h = h + block(h)`. A parameter excludes the
cuts between its first and its last use.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from stretto.errors import ModelError, explain
from stretto.parallel.remote import RemoteTensor, remote, seen
from stretto.strategies.model_sync import plain_name

Forward = Callable[..., Any]
INPUT = -1
"""Label of a tensor that is computed from the batch alone."""


class Calls(msgspec.Struct, frozen=True):
    """The calls of a forward pass. A model has the same ones at all ranks and in every pass."""

    names: list[str]
    """Name of the module of each call."""
    cuts: dict[int, int]
    """Calls at which the model can be cut, with the place of the tensor among the flat arguments of the call."""
    used: dict[str, list[int]]
    """First and last call that use each parameter and buffer."""
    sizes: dict[int, int]
    """Bytes of the tensor of each cut."""
    output_bytes: int
    """Bytes of what the model returns."""

    def stage_of(self, name: str, begins: Sequence[int]) -> int:
        """Return the stage that holds a parameter or buffer, given the first calls of all stages."""
        return bisect_right(begins, self.used.get(plain_name(name), [0, 0])[0]) - 1

    def why_not(self, call: int) -> str:
        """Return the reason why the model can't be cut at a call."""
        tied = [name for name, (first, last) in self.used.items() if first < call <= last]
        if tied:
            first, last = (self.names[at] or "the model" for at in self.used[tied[0]])
            return f"{tied[0]} is used before it, in {first}, and after it, in {last}"
        return "a later module needs a tensor from before it, as over a skip connection"


def opened(model: nn.Module) -> dict[str, bool]:
    """Return the modules that are called in a forward pass by name, each with True if it is open.

    >>> opened(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh())))
    {'': True, '0': False, '1': True, '1.0': False}
    """
    found: dict[str, bool] = {}

    def visit(name: str, module: nn.Module) -> None:
        is_open = not name or _is_container(module) or _is_mostly_list(module)
        if name or not _is_list(module):
            found[name] = is_open
        for child, inner in module.named_children() if is_open else ():
            visit(f"{name}.{child}" if name else child, inner)

    visit("", model)
    names = {id(module): name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}
    return {name: is_open for name, is_open in found.items() if names[id(model.get_submodule(name))] == name}


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) or _is_list(module)


def _is_mostly_list(module: nn.Module) -> bool:
    """Return True if most parameters of a module are in one list of modules, as of an encoder in its layers."""
    size = _size(module)
    return any(2 * _size(child) > size > 0 for child in module.children() if _is_container(child))


def _size(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


@contextmanager
def replaced(modules: dict[str, nn.Module], make: Callable[[str, Forward], Forward]) -> Iterator[None]:
    """Replace the `forward` of these modules within."""
    before = {name: vars(module).get("forward") for name, module in modules.items()}
    for name, module in modules.items():
        vars(module)["forward"] = make(name, module.forward)
    try:
        yield
    finally:
        for name, module in modules.items():
            put_back(module, before[name])


def put_back(module: nn.Module, forward: Forward | None) -> None:
    """Give a module the `forward` that a script has set for it, or else that of its class (None)."""
    vars(module).pop("forward", None)
    if forward is not None:
        vars(module)["forward"] = forward


class _Recorder:
    """Record of one forward pass on shapes."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.parameters: dict[int, str] = {}
        """Names of the model's parameters by the ids of their remote tensors."""
        self.inputs: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.output_bytes = 0
        self.excluded: list[tuple[int, int]] = []
        self.used: dict[str, list[int]] = {}
        self._closed = 0

    @property
    def now(self) -> int:
        """The last call that has begun."""
        return len(self.names) - 1

    def note(self, sources: Sequence[RemoteTensor]) -> int:
        """Note an operation between calls."""
        if self._closed:
            return self.now
        labels = [self._label(source) for source in sources]
        found = min((label for label in labels if label != INPUT), default=INPUT)
        self._use(found, self.now)
        return found

    def _label(self, source: RemoteTensor) -> int:
        """Return the label of a tensor; a parameter belongs to the call that has begun last."""
        name = self.parameters.get(id(source))
        if name is None:
            return source.label
        self.use(name, max(self.now, 0))
        return max(self.now, 0)

    def use(self, name: str, call: int) -> None:
        """Note a use of a parameter or buffer."""
        first, last = self.used.get(name, [call, call])
        self.used[name] = [min(first, call), max(last, call)]

    def _use(self, label: int, last: int) -> None:
        if INPUT != label < last:
            self.excluded.append((label + 1, last))

    def enter(self, name: str, forward: Forward, is_open: bool, own: Sequence[str]) -> Forward:
        """Return the replacement of a module's forward."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._closed:
                return forward(*args, **kwargs)
            self.names.append(name)
            now = self.now
            flat, shape = tree_flatten((args, kwargs))
            remotes = [place for place, one in enumerate(flat) if isinstance(one, RemoteTensor)]
            dependent = [place for place in remotes if self._label(flat[place]) != INPUT]
            for place in dependent:
                self._use(self._label(flat[place]), now - 1)
            if len(dependent) == 1:
                self.inputs[now] = dependent[0]
                self.sizes[now] = flat[dependent[0]].nbytes
                flat[dependent[0]].label = now
            else:
                for place in dependent:
                    self._use(self._label(flat[place]), now)
            for place in remotes:
                flat[place] = remote(flat[place], now if place in dependent else INPUT, self)
            args, kwargs = tree_unflatten(flat, shape)
            if is_open:
                return forward(*args, **kwargs)
            for parameter in own:
                self.use(parameter, now)
            self._closed += 1
            try:
                found = forward(*args, **kwargs)
            finally:
                self._closed -= 1
            return tree_map_only(Tensor, lambda tensor: remote(tensor, now, self), seen(found))

        return call

    def end(self, outputs: Any) -> None:
        """Note what the model returns, and its use."""
        for one in tree_leaves(seen(outputs)):
            if isinstance(one, RemoteTensor):
                self._use(self._label(one), self.now)
                self.output_bytes += one.nbytes


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Call a model without its own hooks, whose calls are no part of its forward pass, and which may read values."""
    kinds = "_forward_pre_hooks", "_forward_hooks"
    before = {kind: vars(model)[kind] for kind in kinds}
    vars(model).update({kind: OrderedDict() for kind in kinds})
    try:
        yield
    finally:
        vars(model).update(before)


def record_calls(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Calls:
    """Return the calls of a forward pass with these arguments, without computing anything."""
    modules = opened(model)
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    recorder = _Recorder()
    values: dict[str, Tensor] = {name: remote(tensor, INPUT, recorder) for name, tensor in state.items()}
    parameters = [name for name, _ in model.named_parameters()]  # all ranks have the buffers, which exclude no cut
    recorder.parameters |= {id(values[name]): plain_name(name) for name in parameters}
    names = {id(tensor): plain_name(name) for name, tensor in state.items()}

    def make(name: str, forward: Forward) -> Forward:
        module = model.get_submodule(name)
        inner = [names[id(one)] for one in (*module.parameters(), *module.buffers()) if id(one) in names]
        return recorder.enter(name, forward, modules[name], inner)

    replacements = replaced({name: model.get_submodule(name) for name in modules}, make)
    with replacements, _without_hooks(model), torch.no_grad():
        recorder.end(functional_call(model, values, tuple(args), kwargs))
    named = {plain_name(name) for name in parameters}
    shared = {name: (first + 1, last) for name, (first, last) in recorder.used.items() if name in named}
    places = {call: place for call, place in recorder.inputs.items() if call and not _is_in(call, recorder.excluded)}
    cuts = {call: place for call, place in places.items() if not _is_in(call, shared.values())}
    if not cuts:
        tied = [name for name, calls in shared.items() if any(_is_in(call, [calls]) for call in places)]
        raise ModelError(_cannot_be_cut(recorder, tied))
    sizes = {call: recorder.sizes[call] for call in cuts}
    return Calls(recorder.names, cuts, recorder.used, sizes, recorder.output_bytes)


def _is_in(call: int, ranges: Iterable[tuple[int, int]]) -> bool:
    return any(first <= call <= last for first, last in ranges)


def _cannot_be_cut(recorder: _Recorder, tied: Sequence[str]) -> str:
    names = [name or "the model" for name in recorder.names]
    got = f"a forward pass that calls {', '.join(names[1:5]) or 'no module'}; each cut would need several tensors"
    expected = "modules that are called one after another, each with the result of the one before"
    if tied:
        first, last = (names[call] for call in recorder.used[tied[0]])
        got = f"{tied[0]}, which {first} and {last} use, at either side of each cut"
        expected = "parameters that are used at one place, or close together"
    problem = "the model cannot be cut into stages of a pipeline"
    return explain(problem, got=got, expected=expected, to_type='--layout "whole()"')
