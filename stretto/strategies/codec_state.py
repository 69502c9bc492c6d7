"""What codecs remember between rounds, as parts that can be put back, begun anew, and kept on a disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.spec import Answer

Leaf = Tensor | int | float | bool | None
NOT_STATE = frozenset({"theta", "scene", "clock", "notice", "runs", "matrices", "rest"})
"""What a memory knows of its surroundings, and does not change."""


def owners(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The objects that a memory is made of, with where they are in it."""
    if isinstance(state, list | tuple):
        for index, one in enumerate(state):
            yield from owners(one, f"{path}/{index}")
    elif hasattr(state, "__dict__") and type(state).__module__.startswith("stretto") and not _is_fixed(state):
        yield path, state
        for name, value in _state(state):
            yield from owners(value, f"{path}/{name}")


def leaves(state: Any) -> dict[str, Leaf]:
    """All tensors and numbers of a memory, by where they are."""
    found: dict[str, Leaf] = {}
    for path, owner in owners(state):
        for name, value in _state(owner):
            if isinstance(value, Tensor | int | float | bool):
                found[f"{path}/{name}"] = value
            elif isinstance(value, list):
                tensors = {f"{path}/{name}/{index}": one for index, one in enumerate(value) if isinstance(one, Tensor)}
                found.update(tensors)
    return found


@torch.no_grad()
def put(state: Any, found: Mapping[str, Leaf]) -> None:
    """Give a memory of the same make the values of `leaves`; what is not named stays."""
    for path, owner in owners(state):
        for name, value in _state(owner):
            kept = found.get(f"{path}/{name}")
            if isinstance(value, Tensor) and isinstance(kept, Tensor):
                _write(owner, name, value, kept)
            elif isinstance(value, int | float | bool) and kept is not None and not isinstance(kept, Tensor):
                setattr(owner, name, kept)
            elif value is None and isinstance(kept, Tensor):
                setattr(owner, name, kept.clone())
            elif isinstance(value, list):
                _put_list(value, f"{path}/{name}", found)


def common(state: Any) -> dict[str, Leaf]:
    """What is the same at all workers and can't begin anew: whoever comes has to be given it."""
    names = {f"{path}/{name}" for path, owner in owners(state) for name in getattr(owner, "common", ())}
    return {path: value for path, value in leaves(state).items() if path in names}


def _write(owner: Any, name: str, value: Tensor, kept: Tensor) -> None:
    if value.shape == kept.shape:
        value.copy_(kept)
    else:
        setattr(owner, name, kept.to(value.device).clone())


def _put_list(values: list[Any], path: str, found: Mapping[str, Leaf]) -> None:
    for index, one in enumerate(values):
        kept = found.get(f"{path}/{index}")
        if isinstance(one, Tensor) and isinstance(kept, Tensor):
            values[index] = kept.to(one.device).clone()


def regroup(state: Any, workers: int, joined: bool) -> None:
    """The workers are others now: what they hold in common about the encoding begins anew where it must.

    What a worker owes stays. `joined` says that one has come who knows nothing of it.
    """
    for _, owner in owners(state):
        if hasattr(owner, "regroup"):
            owner.regroup(workers, joined)


class StateSnapshot:
    """Memories as they were at the last `keep`, to be put back when a round is done again. Cost: a copy of them."""

    def __init__(self, states: Sequence[Any]) -> None:
        self._states = states
        self._kept: list[tuple[Any, dict[str, Any]]] = []
        self._contents: list[tuple[Tensor, Tensor]] = []
        self._copies: dict[int, Tensor] = {}

    @torch.no_grad()
    def keep(self) -> None:
        """Remember them as they are now."""
        self._kept = [(owner, dict(_state(owner))) for one in self._states for _, owner in owners(one)]
        copies: dict[int, Tensor] = {}
        self._contents = []
        for _, state in self._kept:
            for value in state.values():
                for tensor in value if isinstance(value, list) else [value]:
                    if isinstance(tensor, Tensor):
                        copy = self._copy(tensor)
                        copies[id(tensor)] = copy
                        self._contents.append((tensor, copy))
        self._copies = copies

    def _copy(self, tensor: Tensor) -> Tensor:
        copy = self._copies.get(id(tensor))
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            return tensor.clone()
        return copy.copy_(tensor)

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back."""
        for owner, state in self._kept:
            for name, value in state.items():
                setattr(owner, name, value)
        for tensor, copy in self._contents:
            tensor.copy_(copy)


class CodecStates:
    """The memories of an exchange that may be done again, among workers that change.

    They are only copied where workers may die (`elastic`).
    """

    def __init__(self, states: Sequence[Any], elastic: bool) -> None:
        self.states, self._endures = states, elastic
        self._undo = StateSnapshot(states)
        self._running = False
        self._later: tuple[int, bool] | None = None

    def begin(self) -> None:
        """A round begins."""
        self._running = True
        if self._endures:
            self._undo.keep()

    def restore(self) -> None:
        """The round is done again from its beginning."""
        self._undo.restore()

    def end(self) -> None:
        """The round has ended here: what had to wait for it follows."""
        self._running = False
        if self._later is not None:
            (workers, joined), self._later = self._later, None
            self.regroup(workers, joined, later=False)

    def regroup(self, workers: int, joined: bool, later: bool) -> None:
        """Others exchange from now on; `later`: once this round, which the others have ended, has ended here."""
        if later:
            self._later = (workers, joined)
            return
        if self._running:
            self._undo.restore()
        for one in self.states:
            regroup(one, workers, joined)
        if self._running:
            self._undo.keep()


def _state(owner: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(owner).items() if name not in NOT_STATE]


def _is_fixed(state: Any) -> bool:
    return isinstance(state, Answer | type) or callable(state)
