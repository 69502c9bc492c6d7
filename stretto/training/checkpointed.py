"""The script's own values in the checkpoints of a run, and the passing of epochs that were trained before.

A script that is started again, in a resumed run or at a restarted worker, repeats its code: the loops over epochs that
are over are empty, and the code between them runs with the state of the checkpoint. Until the epoch that continues,
the script *passes* these epochs: values in `checkpointed` do not change, and no file, line or figure of the script is
written again.

    call of checkpointed     the values of the checkpoint, if it is known by then
    distribute               the values that came with the state of the run: passing begins
    first epoch with batches, or the code after the epoch at whose end the checkpoint was written:
                             the same values again, for objects that passed code has changed: passing ends
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from stretto import state as states
from stretto.checkpoint.state_transfer import Own, as_text, from_text
from stretto.checkpoint.storage import KINDS, State
from stretto.errors import RecipeError, ScriptError, explain
from stretto.training.worker_context import WorkerContext, find_context

NAME = "kept"
"""Name of the values in a worker's own state, and beginning of the names of their tensors."""
EXPECTED = "numbers, text, lists, tuples, dicts, tensors, or objects with state_dict and load_state_dict"


class Checkpointed:
    """Values of the script, as attributes, that each checkpoint of the run contains.

    Raises ScriptError when an attribute is set to a value that cannot be saved.
    """

    __slots__ = ("__dict__", "_script")

    def __init__(self, script: ScriptState, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_script", script)
        for name, value in values.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        attributes: dict[str, Any] = vars(self)
        if self._script.is_passing and name in attributes:
            return
        value = value.item() if isinstance(value, np.generic) else value
        _encoded(_saved(value, name), name)
        is_new = name not in attributes
        attributes[name] = value
        if is_new and self in self._script.objects:
            self._script.give_back_to(self, name)

    def __getattr__(self, name: str) -> Any:
        kept = ", ".join(vars(self)) or "none"
        raise AttributeError(f"stretto.checkpointed was not given {name!r}; its values: {kept}")

    def __repr__(self) -> str:
        return f"checkpointed({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class ScriptState:
    """The values of all calls of `checkpointed` in one process, in order, and whether the script passes epochs."""

    def __init__(self) -> None:
        self.objects: list[Checkpointed] = []
        self.is_passing = False
        """True while the script passes epochs that were trained before this process came."""
        self.is_looked_up = False
        """True once it is known which values the script continues from, if any."""
        self._given: list[dict[str, Any]] = []
        """Saved values of each call, which the script continues from."""

    def create(self, values: Mapping[str, Any]) -> Checkpointed:
        """Return the values of the next call: those of the checkpoint where it has them."""
        made = Checkpointed(self, values)
        self.objects.append(made)
        self.give_back_to(made)
        return made

    def saved(self) -> Own:
        """Return all values as facts and tensors of a state. Raises ScriptError for a value that cannot be saved."""
        calls = [{name: _saved(value, name) for name, value in vars(each).items()} for each in self.objects]
        calls += self._given[len(calls) :]
        if not calls:
            return {}, {}
        tensors: dict[str, Tensor] = {}
        packed = [
            {name: _encoded(value, name, f"{NAME}/{number}/{name}", tensors) for name, value in call.items()}
            for number, call in enumerate(calls)
        ]
        return {NAME: as_text(msgspec.msgpack.encode(packed))}, tensors

    def take(self, own: Own) -> None:
        """Take the values of a worker's own state, or of a checkpoint, and give them to the calls so far."""
        facts, tensors = own
        self.is_looked_up = True
        if NAME not in facts:
            return
        self._given = [
            {name: states.unpack(msgspec.msgpack.decode(value), tensors) for name, value in call.items()}
            for call in msgspec.msgpack.decode(from_text(facts[NAME]))
        ]
        self.give_back()

    def give_back(self) -> None:
        """Set all values to those that the script continues from: code that was passed may have changed lists."""
        for each in self.objects:
            self.give_back_to(each)

    def give_back_to(self, kept: Checkpointed, *only: str) -> None:
        """Set the values of one call; a saved object waits until the script has set it."""
        number = next(index for index, each in enumerate(self.objects) if each is kept)
        attributes = vars(kept)
        for name, saved in self._given[number].items() if number < len(self._given) else ():
            if (only and name not in only) or (isinstance(saved, states.Saved) and name not in attributes):
                continue
            try:
                attributes[name] = states.load(attributes.get(name), states.copied(saved))
            except RecipeError:
                raise ScriptError(
                    explain(
                        f"stretto.checkpointed has an object in {name}, and the checkpoint has none, or the reverse",
                        got=type(attributes.get(name)).__name__,
                        expected="the same kinds of values as in the run that wrote the checkpoint",
                        to_type=f"stretto.checkpointed({name}=...) with the object itself",
                    )
                ) from None

    def end_passing(self) -> None:
        """End the passing of epochs, if the script passes any: what passed code has changed is given back."""
        if not self.is_passing:
            return
        self.is_passing = False
        self.give_back()
        for number, each in enumerate(self.objects[: len(self._given)]):
            self._given[number] = {name: one for name, one in self._given[number].items() if name not in vars(each)}


_script_state: ContextVar[ScriptState | None] = ContextVar("script_state", default=None)


def script_state() -> ScriptState:
    """Return the state of this process's script."""
    found = _script_state.get()
    if found is None:
        _script_state.set(found := ScriptState())
    return found


def checkpointed(**values: Any) -> Any:
    """Return an object whose attributes, at first these `values`, are saved with each checkpoint of the run.

    A resumed run continues with the values of its checkpoint: each worker with its own, if the number of workers is the
    same; else all with those of the first worker. So do restarted and joined workers, with the values of the first
    worker that trains. Call it at every worker, before or after `distribute`, and change the values at every worker:
    numbers, text, lists, tuples, dicts, tensors, and objects with `state_dict` and `load_state_dict`. In a single
    process, and in a run without checkpoints, it is a plain object.

    While finished epochs are passed (`is_resuming()`), setting an attribute does nothing.

    Raises ScriptError, which names the attribute, for a value that cannot be saved.

    >>> kept = checkpointed(best=float("inf"), history=[])
    >>> kept.best = min(kept.best, 0.5)
    >>> kept
    checkpointed(best=0.5, history=[])
    """
    script, context = script_state(), find_context()
    if context is not None and not script.is_looked_up:
        _look_ahead(script, context)
    return script.create(values)


def own_of(state: State, number: int, members: Sequence[int]) -> Own:
    """Return the script's values for a worker: its own among the same members, else those of the first worker."""
    if not state.own:
        return state.facts, state.tensors
    return state.own[number if sorted(state.own) == sorted(members) else min(state.own)]


def _look_ahead(script: ScriptState, context: WorkerContext) -> None:
    """Take the values of the checkpoint to resume before `distribute` reads it, where this process sees its folder."""
    script.is_looked_up = True
    files = context.resumed_files
    if files is None or context.remote_files is not None or context.incarnation:
        return
    with tempfile.TemporaryDirectory(prefix="stretto-") as scratch:
        found = files.newest(Path(scratch), lambda _: None)
    if found is not None:
        script.take(own_of(found.state, context.worker, range(context.workers)))


def _saved(value: Any, name: str) -> Any:
    try:
        return states.save(value, name)
    except RecipeError as error:
        which, _, kind = str(error).partition("\n")[0].partition(" can't be saved: it is a ")
        raise _refused(which, kind) from None


def _encoded(saved: Any, name: str, prefix: str = "", tensors: dict[str, Tensor] | None = None) -> bytes:
    """Return a saved value as bytes, with its tensors by name. Raises ScriptError for one that cannot be saved."""
    found: dict[str, Tensor] = {}
    try:
        encoded = msgspec.msgpack.encode(states.pack(saved, prefix, found), enc_hook=_number)
    except (TypeError, ValueError, OverflowError) as error:
        raise _refused(name, f"{type(saved).__name__}: {error}") from None
    for tensor in found.values():
        if tensor.dtype not in KINDS or tensor.layout != torch.strided:
            raise _refused(name, f"a tensor of {tensor.dtype}, {tensor.layout}")
    if tensors is not None:
        tensors |= {key: tensor.detach() for key, tensor in found.items()}
    return encoded


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} in it has no plain form")


def _refused(name: str, got: str) -> ScriptError:
    attribute = name.partition("[")[0]
    return ScriptError(
        explain(
            f"stretto.checkpointed can't save {name}",
            got=got,
            expected=EXPECTED,
            to_type=f"{attribute}=float(...) for a number, {attribute}=torch.as_tensor(...) for an array, or a name "
            "outside of stretto.checkpointed",
        )
    )
