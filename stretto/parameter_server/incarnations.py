"""Incarnations of workers, as one service knows them: it accepts messages of the current one. A state machine."""

from __future__ import annotations

from stretto.parameter_server import messages as m


class Incarnations:
    """Number of each worker's current incarnation, and whether it is a member: at first all are, with incarnation 0."""

    def __init__(self) -> None:
        self._current: dict[int, int] = {}
        self._ended: set[int] = set()
        """Workers whose current incarnation has not sent a message yet, since the last one ended."""
        self._has_message: set[int] = set()
        """Workers that this process has a message of: a restarted process does not know their incarnation."""

    def state(self) -> tuple[dict[int, int], list[int], list[int]]:
        """Return the state as plain values."""
        return self._current, sorted(self._ended), sorted(self._has_message)

    def load_state(self, state: tuple[dict[int, int], list[int], list[int]]) -> None:
        """Load a state."""
        self._current, self._ended, self._has_message = state[0], set(state[1]), set(state[2])

    def current(self, worker: int) -> int:
        """Return the incarnation whose messages are accepted."""
        return self._current.get(worker, 0)

    def is_member(self, worker: int) -> bool:
        """Return True unless the worker's last incarnation has ended."""
        return worker not in self._ended

    def is_over(self, worker: int, incarnation: int) -> bool:
        """Return True if messages of the incarnation are not accepted any more."""
        return incarnation < self.current(worker)

    def is_last(self, worker: int, incarnation: int) -> bool:
        """Return True if no later incarnation has ended, so that the work of this one may still be asked for."""
        return incarnation + 1 >= self.current(worker)

    def implied_end(self, worker: int, incarnation: int) -> m.IncarnationEnded | None:
        """Return the end of the previous incarnation if it follows from a newer one's first message, else None.

        Its last update may have arrived at some shards only.
        """
        is_new = worker in self._has_message and incarnation > self.current(worker)
        return m.IncarnationEnded(worker, incarnation - 1, is_partial=True) if is_new else None

    def note(self, worker: int, incarnation: int) -> None:
        """Note a message of an incarnation: it is a member."""
        self._current[worker] = incarnation
        self._ended.discard(worker)
        self._has_message.add(worker)

    def end(self, worker: int, incarnation: int) -> bool:
        """Note that an incarnation and all before it have ended; return True if the worker was a member."""
        was_member = worker not in self._ended
        self._ended.add(worker)
        self._current[worker] = incarnation + 1
        return was_member
