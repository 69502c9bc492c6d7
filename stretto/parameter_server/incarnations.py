"""Whose parcels a service takes: of each worker only its present life. A plain state machine."""

from __future__ import annotations

from stretto.parameter_server import messages as m


class Incarnations:
    """The lives of workers, as one process knows them: at first each is in, in its first life, and unheard."""

    def __init__(self, workers: int) -> None:
        self._present = [0] * workers
        self._is_in = [True] * workers
        self._is_heard = [False] * workers
        """Whether this process has heard of the worker: one that was started again does not know its life."""

    def present(self, worker: int) -> int:
        """The life that is heard now, or would be."""
        return self._present[worker]

    def is_over(self, worker: int, life: int) -> bool:
        """Whether a life is not heard any more."""
        return life < self._present[worker]

    def is_last(self, worker: int, life: int) -> bool:
        """Whether no life has come after this one, whose work may still be asked for."""
        return life + 1 >= self._present[worker]

    def untold(self, worker: int, life: int) -> m.Gone | None:
        """The death of the life before that nobody has told of, if that a life is heard says so.

        Its last update may have come to some shards alone.
        """
        is_news = self._is_heard[worker] and life > self._present[worker]
        return m.Gone(worker, life - 1, torn=True) if is_news else None

    def hear(self, worker: int, life: int) -> None:
        """A life is heard, and in."""
        self._present[worker], self._is_in[worker], self._is_heard[worker] = life, True, True

    def end(self, worker: int, life: int) -> bool:
        """A life is over, with all before it; whether the worker was in."""
        was_in, self._is_in[worker] = self._is_in[worker], False
        self._present[worker] = life + 1
        return was_in
