"""Refuses whole states, copies and files of a model while this process holds a part of it only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from stretto.errors import ModelError, ScriptError, explain

_READERS = ("state_dict", "__reduce_ex__")
"""Methods by which torch and Python read a whole object: `torch.save`, `pickle`, `copy.deepcopy`."""


class ReadGuard:
    """Modules and optimizers that may be read as a whole while the guard is open."""

    def __init__(self, guarded: Sequence[nn.Module | Optimizer]) -> None:
        self._guarded = guarded

    def shut(self) -> None:
        """Let `state_dict`, copies and `torch.save` raise ScriptError."""
        for one in self._guarded:
            vars(one).update(dict.fromkeys(_READERS, _refuse))

    def open(self) -> None:
        """Let all be read."""
        for one in self._guarded:
            for name in _READERS:
                vars(one).pop(name, None)


def refuse_objects(model: nn.Module) -> None:
    """Let copies and `torch.save` of a model raise ModelError: each process has a part of it."""
    vars(model)["__reduce_ex__"] = _refuse_object


def allow_objects(model: nn.Module) -> None:
    """Let the model be copied and saved again."""
    vars(model).pop("__reduce_ex__", None)


def _refuse_object(*_args: Any) -> NoReturn:
    raise ModelError(
        explain(
            "the processes of a worker hold a part of the model each, so a file or copy of the object would lack parts",
            got="torch.save(model, path), pickle, or copy.deepcopy(model)",
            expected="the whole state from model.state_dict(), which all processes of a worker call together",
            to_type='stretto.save(model.state_dict(), "model.pt"), or --layout "whole()"',
        )
    )


def _refuse(*_args: Any, **_options: Any) -> NoReturn:
    raise ScriptError(
        explain(
            "within an epoch this process holds its rows and one block of columns, and the others are NaN",
            got="state_dict(), a copy or torch.save of the model or of its optimizer in the loop over the loader",
            expected="the same after the loop, where every process has the whole model, or checkpoints of the run",
            to_type='for batch in loader: ...; torch.save(model.state_dict(), "model.pt"), or '
            '--checkpoint-every "4 rounds"',
        )
    )
