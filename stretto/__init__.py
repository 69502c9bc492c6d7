"""Stretto: distributed training for people who have a plain PyTorch script and several ordinary machines.

    loader = stretto.distribute(model, optimizer, loader, evaluate=accuracy)      # the one line

A recipe is five words, `Recipe(what=..., when=..., whom=..., how=..., then=...)`; `stretto.recipes` has the named ones.
Names are imported when they are first used, so that the command line does not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto import how as how
    from stretto import recipes as recipes
    from stretto import then as then
    from stretto import what as what
    from stretto import when as when
    from stretto import whom as whom
    from stretto.errors import StrettoError as StrettoError
    from stretto.how.check import check_codec as check_codec
    from stretto.recipe import Recipe as Recipe
    from stretto.train import distribute as distribute
    from stretto.train import finish as finish
    from stretto.train import log as log
    from stretto.train import no_sync as no_sync
    from stretto.train.identity import barrier as barrier
    from stretto.train.identity import is_main as is_main
    from stretto.train.identity import main_first as main_first
    from stretto.train.identity import print as print
    from stretto.train.identity import rank as rank
    from stretto.train.identity import save as save
    from stretto.train.identity import world_size as world_size
    from stretto.typed import parse as parse
    from stretto.wire.check import check_wire as check_wire

__version__ = "0.1.0"

_FROM = {
    "distribute": "train",
    "finish": "train",
    "log": "train",
    "no_sync": "train",
    "rank": "train.identity",
    "world_size": "train.identity",
    "is_main": "train.identity",
    "barrier": "train.identity",
    "main_first": "train.identity",
    "print": "train.identity",
    "save": "train.identity",
    "Recipe": "recipe",
    "parse": "typed",
    "StrettoError": "errors",
    "check_codec": "how.check",
    "check_wire": "wire.check",
}
_ROOMS = ("recipes", "what", "when", "whom", "how", "then")

__all__ = [*_FROM, *_ROOMS]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"stretto.{name}")
    if name in _FROM:
        return getattr(importlib.import_module(f"stretto.{_FROM[name]}"), name)
    raise AttributeError(f"module 'stretto' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
