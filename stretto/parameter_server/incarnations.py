"""Incarnations of workers, as one service knows them: it accepts messages of the current one. A state machine."""

from __future__ import annotations

from stretto.parameter_server import messages as m


class Incarnations:
    """Number of each worker's current incarnation, and whether it is a member: at first all are, with incarnation 0."""

    def __init__(self, workers: int) -> None:
        self._current = [0] * workers
        self._is_member = [True] * workers
        self._has_message = [False] * workers
        """True if this process has a message of the worker: a restarted process does not know the incarnation."""

    def current(self, worker: int) -> int:
        """Return the incarnation whose messages are accepted."""
        return self._current[worker]

    def is_over(self, worker: int, incarnation: int) -> bool:
        """Return True if messages of the incarnation are not accepted any more."""
        return incarnation < self._current[worker]

    def is_last(self, worker: int, incarnation: int) -> bool:
        """Return True if no later incarnation has ended, so that the work of this one may still be asked for."""
        return incarnation + 1 >= self._current[worker]

    def implied_end(self, worker: int, incarnation: int) -> m.IncarnationEnded | None:
        """Return the end of the previous incarnation if it follows from a newer one's first message, else None.

        Its last update may have arrived at some shards only.
        """
        is_new = self._has_message[worker] and incarnation > self._current[worker]
        return m.IncarnationEnded(worker, incarnation - 1, is_partial=True) if is_new else None

    def note(self, worker: int, incarnation: int) -> None:
        """Note a message of an incarnation: it is a member."""
        self._current[worker], self._is_member[worker], self._has_message[worker] = incarnation, True, True

    def end(self, worker: int, incarnation: int) -> bool:
        """Note that an incarnation and all before it have ended; return True if the worker was a member."""
        was_member, self._is_member[worker] = self._is_member[worker], False
        self._current[worker] = incarnation + 1
        return was_member
