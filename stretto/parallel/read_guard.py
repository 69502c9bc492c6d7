"""Refuses whole states, copies and files of a model while this process holds a part of it only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from stretto.errors import ScriptError, explain

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
