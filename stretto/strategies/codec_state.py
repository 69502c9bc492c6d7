"""Codec states of a round that may be repeated, among workers whose membership changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stretto import state as states_
from stretto.state import Members


class StateSnapshot:
    """Copy of codec states as they were at the last `keep`, to restore them when a round is repeated."""

    def __init__(self, states: Sequence[Any]) -> None:
        self._states = states
        self._kept: list[Any] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the states. The memory of the copy before is used again."""
        saved = [states_.save(one, "a codec's state") for one in self._states]
        self._kept = states_.copied(saved, self._kept)

    @torch.no_grad()
    def restore(self) -> None:
        """Set the states to the copy, if there is one."""
        for state, saved in zip(self._states, self._kept, strict=False):
            states_.load_into(state, saved)


class CodecStates:
    """Codec states of an exchange. They are copied at the begin of each round only if workers may fail (`elastic`).

    Raises RecipeError for a state that can't be saved, when it is created and not when a worker has failed.
    """

    def __init__(self, states: Sequence[Any], elastic: bool) -> None:
        self.states, self._elastic = states, elastic
        for one in states:
            states_.save(one, "a codec's state")
        self._snapshot = StateSnapshot(states)
        self._running = False
        self._pending: Members | None = None
        """Members of the next round, while this one ends among the former members."""

    def begin(self) -> None:
        """Note that a round begins, and copy the states."""
        self._running = True
        if self._elastic:
            self._snapshot.keep()

    def restore(self) -> None:
        """Restore the states of the round's begin, since it is repeated."""
        self._snapshot.restore()

    def end(self) -> None:
        """Note that the round has ended, and reset the states to members that have changed during it."""
        self._running = False
        if self._pending is not None:
            members, self._pending = self._pending, None
            self._reset(members)

    def regroup(self, workers: int, joined: bool, later: bool) -> None:
        """Reset the states to other members; with `later`, after this round, which the others have already ended."""
        if later:
            self._pending = Members(workers, joined)
        else:
            self._reset(Members(workers, joined))

    def _reset(self, members: Members) -> None:
        if self._running:
            self._snapshot.restore()
        for one in self.states:
            states_.reset(one, members)
        if self._running:
            self._snapshot.keep()
