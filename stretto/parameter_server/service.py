"""A service: its request handler, the incarnations of its workers and their sessions. The same over any connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.parameter_server import messages as m
from stretto.parameter_server.framing import Chunks, blobs_of, chunks_of, concatenated, layout_of, reason_of
from stretto.parameter_server.handler import OutgoingMessage, RequestHandler
from stretto.parameter_server.incarnations import Incarnations
from stretto.parameter_server.sessions import WorkerSession
from stretto.parameter_server.state_log import SessionState, State, StateLog


class Service:
    """Processes the messages of workers, each once. With a `log` a restarted process continues where this one was."""

    def __init__(self, handler: RequestHandler, log: StateLog | None = None) -> None:
        self.handler, self._log = handler, log
        self._incarnations = Incarnations()
        """Messages of ended incarnations are refused."""
        self._sessions: dict[int, WorkerSession] = {}
        self.problem = ""
        """Reason why the last message was refused; empty if it was not."""
        if log is not None:
            log.restore(self)

    def incarnation(self, worker: int) -> int:
        """Return the incarnation whose messages are accepted."""
        return self._incarnations.current(worker)

    def is_ended(self, worker: int) -> bool:
        """Return True if the worker's last incarnation has ended, and no later one has sent a message."""
        return not self._incarnations.is_member(worker)

    def admit(self, worker: int, incarnation: int) -> list[OutgoingMessage] | None:
        """Note that a message of this incarnation arrives; return None if the incarnation has ended.

        An earlier incarnation has ended by then: the messages that follow from it are returned.
        """
        if self._incarnations.is_over(worker, incarnation):
            return None
        ended = self._incarnations.implied_end(worker, incarnation)
        messages = self.end(ended)[1] if ended is not None else []
        self._incarnations.note(worker, incarnation)
        return messages

    def take(self, worker: int, incarnation: int, header: m.Header, tensors: list[Chunks]) -> list[OutgoingMessage]:
        """Process a complete message of an admitted incarnation. A repeated message gets the same reply."""
        if self._log is not None:
            self._log.received(worker, incarnation, header, tensors)
        messages = self.process(worker, incarnation, header, tensors)
        if self._log is not None:
            self._log.compact(self)
        return messages

    def process(self, worker: int, incarnation: int, header: m.Header, tensors: list[Chunks]) -> list[OutgoingMessage]:
        """Process a message, new or read from the log."""
        self.problem = ""
        self._incarnations.note(worker, incarnation)
        session = self._sessions.setdefault(worker, WorkerSession())
        if session.is_repeated(header.request_id, header.answered_below):
            return session.repeat(header.request_id)
        if isinstance(header.body, m.Leave):
            return self._stored(self.handler.leave(worker))
        try:
            return self._stored(self.handler.take(worker, header, tensors))
        except Exception as error:
            self.problem = reason_of(error)
            return self._stored([OutgoingMessage(worker, header.request_id, m.Refused(self.problem))])

    def end(self, notice: m.IncarnationEnded) -> tuple[m.CountedWork, list[OutgoingMessage]]:
        """Process the end of an incarnation, and of all earlier ones, once.

        Returns its work at this service, and the messages that follow.
        """
        if self._log is not None:
            self._log.ended(notice)
        return self.process_end(notice)

    def process_end(self, notice: m.IncarnationEnded) -> tuple[m.CountedWork, list[OutgoingMessage]]:
        """Process the end of an incarnation, new or read from the log."""
        worker, incarnation = notice.worker, notice.incarnation
        is_last = self._incarnations.is_last(worker, incarnation)
        work = self.handler.work_of(worker) if is_last else m.CountedWork(0, [])
        if self._incarnations.is_over(worker, incarnation):
            return work, []
        self._sessions.pop(worker, None)
        if not self._incarnations.end(worker, incarnation):
            return work, []
        return work, self._stored(self.handler.remove(worker, notice))

    def close(self) -> None:
        """Close the log. Idempotent."""
        if self._log is not None:
            self._log.close()

    def state(self, now: float, handler: Any) -> State:
        """Return the state of the service, with that of its handler."""
        places: dict[int, int] = {}
        """Position in `results` by the identity of a reply's tensors: many workers have one result."""
        results, sessions = list[list[bytes]](), dict[int, SessionState]()
        for worker, session in self._sessions.items():
            replies = []
            for reply in session.replies.values():
                place = places.setdefault(id(reply.tensors), len(results))
                if place == len(results):
                    results.append(blobs_of([[tensor] for tensor in reply.tensors]))
                replies.append((m.Header(reply.request_id, reply.body, layout_of(reply.tensors)), place))
            sessions[worker] = SessionState(session.last, replies)
        return State(now, handler, self._incarnations.state(), sessions, results)

    def load_state(self, state: State) -> None:
        """Load a state."""
        self._incarnations.load_state(state.incarnations)
        self._sessions = {worker: WorkerSession(stored.last) for worker, stored in state.sessions.items()}
        for worker, stored in state.sessions.items():
            for header, place in stored.replies:
                dtypes = (dtype for dtype, _ in header.tensors)
                tensors = list(map(concatenated, chunks_of(header, state.results[place]), dtypes))
                self._sessions[worker].store(OutgoingMessage(worker, header.request_id, header.body, tensors))

    def _stored(self, messages: Sequence[OutgoingMessage]) -> list[OutgoingMessage]:
        for message in messages:
            self._sessions.setdefault(message.worker, WorkerSession()).store(message)
        return list(messages)
