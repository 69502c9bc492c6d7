"""Stretto: distributed training for people who have a plain PyTorch script and several ordinary machines.

    loader = stretto.distribute(model, optimizer, loader, evaluate=accuracy)      # the one line

A recipe is five words, `Recipe(what=..., when=..., whom=..., how=..., then=...)`; `stretto.recipes` has the named ones.
Names are imported when they are first used, so that the command line does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto import codecs as how
    from stretto.api import (
        agreed,
        distribute,
        epoch_step,
        finish,
        is_last_batch,
        is_resuming,
        log,
        no_sync,
        steps,
        weight,
    )
    from stretto.codecs.conformance import check_codec
    from stretto.errors import StrettoError
    from stretto.identity import barrier, broadcast, is_main, main_first, print, rank, save, world_size
    from stretto.launcher.program import ray, run, spark
    from stretto.recipe import layout as layouts
    from stretto.recipe import named as recipes
    from stretto.recipe import then, what, when, whom
    from stretto.recipe.parser import parse
    from stretto.recipe.recipe import Recipe
    from stretto.recipe.whom import check_topology
    from stretto.trainers import take
    from stretto.training.checkpointed import checkpointed
    from stretto.transport.conformance import check_transport

__version__ = "0.1.0"

_FROM = {
    "agreed": "api",
    "distribute": "api",
    "finish": "api",
    "log": "api",
    "no_sync": "api",
    "weight": "api",
    "is_resuming": "api",
    "steps": "api",
    "epoch_step": "api",
    "is_last_batch": "api",
    "checkpointed": "training.checkpointed",
    "rank": "identity",
    "world_size": "identity",
    "is_main": "identity",
    "barrier": "identity",
    "broadcast": "identity",
    "main_first": "identity",
    "print": "identity",
    "save": "identity",
    "Recipe": "recipe.recipe",
    "parse": "recipe.parser",
    "StrettoError": "errors",
    "take": "trainers",
    "ray": "launcher.program",
    "run": "launcher.program",
    "spark": "launcher.program",
    "check_codec": "codecs.conformance",
    "check_topology": "recipe.whom",
    "check_transport": "transport.conformance",
}
_MODULES = {
    "recipes": "recipe.named",
    "layouts": "recipe.layout",
    "what": "recipe.what",
    "when": "recipe.when",
    "whom": "recipe.whom",
    "how": "codecs",
    "then": "recipe.then",
}

__all__ = [
    "Recipe",
    "StrettoError",
    "agreed",
    "barrier",
    "broadcast",
    "check_codec",
    "check_topology",
    "check_transport",
    "checkpointed",
    "distribute",
    "epoch_step",
    "finish",
    "how",
    "is_last_batch",
    "is_main",
    "is_resuming",
    "layouts",
    "log",
    "main_first",
    "no_sync",
    "parse",
    "print",
    "rank",
    "ray",
    "recipes",
    "run",
    "save",
    "spark",
    "steps",
    "take",
    "then",
    "weight",
    "what",
    "when",
    "whom",
    "world_size",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"stretto.{_MODULES[name]}")
    if name in _FROM:
        return getattr(importlib.import_module(f"stretto.{_FROM[name]}"), name)
    raise AttributeError(f"module 'stretto' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
