"""Embeddings with sparse gradients whose rows are exchanged by themselves, and why others are exchanged whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from stretto.recipe.recipe import Recipe
from stretto.strategies.model_sync import Named
from stretto.strategies.optimizers import Optimizers

_OPTIONS: dict[type[Optimizer], tuple[str, ...]] = {
    SGD: ("momentum", "weight_decay"),
    Adagrad: ("weight_decay",),
    SparseAdam: (),
}
"""Optimizers whose step changes the rows in a sparse gradient alone, with the options that change others."""


@dataclass
class SparseTable:
    """A parameter of modules that look up its rows. `reason` says why it is exchanged whole; empty if it is not."""

    name: str
    parameter: nn.Parameter
    modules: list[nn.Module] = field(default_factory=list)
    reason: str = ""


def sparse_tables(model: nn.Module, named: Named, optimizers: Optimizers, recipe: Recipe) -> list[SparseTable]:
    """Return the trained parameters that embeddings with sparse gradients hold."""
    found: dict[int, SparseTable] = {}
    named_by_id = {id(parameter): (name, parameter) for name, parameter in named}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and id(module.weight) in named_by_id:
            table = found.setdefault(id(module.weight), SparseTable(*named_by_id[id(module.weight)]))
            table.modules.append(module)
    for table in found.values():
        table.reason = _reason(table, model, optimizers, recipe)
    return list(found.values())


def _reason(table: SparseTable, model: nn.Module, optimizers: Optimizers, recipe: Recipe) -> str:
    parameter = table.parameter
    others = [each for each in model.modules() if any(own is parameter for own in each._parameters.values())]
    if len(others) > len(table.modules):
        return "other modules use the weight as well"
    if any(module.max_norm is not None for module in table.modules):
        return "max_norm changes rows in the forward pass"
    if hasattr(parameter, "to_local"):
        return "another library holds it"
    if not recipe.moves_rows:
        return f"{recipe} needs the whole table"
    for optimizer, wrappers in zip(optimizers, optimizers.around, strict=True):
        group = next((one for one in optimizer.param_groups if any(own is parameter for own in one["params"])), None)
        if group is not None and (problem := _changes_others((*wrappers, optimizer)[0], group)):
            return problem
    return ""


def _changes_others(optimizer: Optimizer, group: dict[str, Any]) -> str:
    """Return why steps of an optimizer may change rows without a gradient; empty if they do not."""
    kind = type(optimizer).__name__
    options = [name for name in _OPTIONS.get(type(optimizer), ()) if group[name]]
    if type(optimizer) not in _OPTIONS:
        return f"{kind} may change rows without a gradient; SGD, Adagrad and SparseAdam do not"
    return f"{options[0]} of {kind} changes rows without a gradient" if options else ""


def tables_in_files(model: nn.Module, recipe: Recipe | None) -> set[int]:
    """Return the ids of the weights that are in memory-mapped files where the script gives them no memory.

    They are those of which a worker uses some rows only.
    """
    found = [one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse]
    return {id(one.weight) for one in found} if recipe is not None and recipe.moves_rows else set()


def watch_lookups(table: SparseTable, look_up: Callable[[Tensor], None]) -> None:
    """Call `look_up` with the numbers of rows before each forward pass of the modules, until `stop_watching`.

    A hook of a module would be an attribute of it: part of its copies and files.
    """
    for kind in (nn.Embedding, nn.EmbeddingBag):
        if kind.__call__ is nn.Module.__call__:
            kind.__call__ = _looking_up  # type: ignore[method-assign]
    for module in table.modules:
        _lookups[module] = weakref.WeakMethod(look_up)  # a weak reference: the module may outlive the object


def stop_watching(tables: Sequence[SparseTable]) -> None:
    """Let the modules of tables look rows up without a request."""
    for module in [module for table in tables for module in table.modules]:
        _lookups.pop(module, None)


_lookups: weakref.WeakKeyDictionary[nn.Module, weakref.WeakMethod[Callable[[Tensor], None]]] = (
    weakref.WeakKeyDictionary()
)


def _looking_up(module: nn.Module, *given: Any, **named: Any) -> Any:
    _request(module, given[0] if given else named["input"])
    return nn.Module.__call__(module, *given, **named)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _request(module: nn.Module, rows: Tensor) -> None:
    """Ask for rows. The model may be compiled, and the request to a server is no part of its graph."""
    found = _lookups.get(module)
    if found is not None and (look_up := found()) is not None and isinstance(rows, Tensor):
        look_up(rows)


def notice_of(tables: Sequence[SparseTable]) -> list[str]:
    """Return the lines that say how the tables are exchanged."""
    alone = [f"{one.name} ({len(one.parameter):,} rows)" for one in tables if not one.reason]
    lines = [
        f"{one.name} is exchanged whole, though its gradients are sparse: {one.reason}" for one in tables if one.reason
    ]
    if alone:
        lines.append(f"only the rows of a batch are exchanged of {', '.join(alone)}")
    return lines
