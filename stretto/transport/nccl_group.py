"""NCCL among the GPUs of one generation of workers: any wait ends within a limit, whatever a GPU does.

Any call to a communicator may hang: connecting, if a rank is missing; an operation, if a rank has failed; even the
abort. So a thread of the group makes all calls, callers wait for it within a limit, and an abort has its own thread:

    caller                       thread of the group             membership client, or a late caller
      |-- submit ----------------->| begin on the GPU
      |   wait                     | ask the GPU until done
      |                            |                               |-- abort --> thread that aborts
      |<-- "it was aborted" -------|------- once nothing of this generation can write to a tensor any more

States: forming, ready, then closed, or aborting and aborted. An operation that the GPU ends counts only if the group is
still ready: an aborted operation looks complete to the GPU, with half of its result. After an abort no wait returns.

| wait | limit |
| --- | --- |
| connecting | `CONNECTING` failure timeouts: the first one loads NCCL and probes the machine |
| an operation | `timeout_s`, as with gloo; a failed worker ends the operation earlier, by an abort |
| an abort | a failure timeout; a worker whose abort hangs has to restart, since its GPU may still write to tensors |
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor

CONNECTING = 6
"""Failure timeouts within which a communicator has to connect."""
POLL_S = 0.0001
"""Seconds between two questions to the GPU."""


class Operation(Protocol):
    """Operation on the GPU."""

    def is_completed(self) -> bool:
        """Return True if the GPU has ended the operation, with a result, with an error or because of an abort."""
        ...

    def wait(self) -> object:
        """Raise the error of an ended operation, if any."""
        ...


class Communicator(Protocol):
    """One worker's end of a NCCL communicator. Any call may hang; `abort` may be called from another thread."""

    def connect(self) -> None:
        """Connect with all ranks."""
        ...

    def mark(self) -> object:
        """Return the present point of the caller's stream, which an operation waits for."""
        ...

    def begin(self, verb: str, arguments: Sequence[Any], mark: object) -> Operation:
        """Begin an `allreduce` or `allgather`, after a point of a stream."""
        ...

    def shutdown(self) -> None:
        """Complete the operations, and disconnect."""
        ...

    def abort(self) -> None:
        """End the operations, and disconnect. Idempotent, also before or while the communicator connects."""
        ...

    def release(self) -> None:
        """Free the rest of its resources after an end."""
        ...


class State(enum.Enum):
    """State of a group."""

    FORMING, READY, ABORTING, ABORTED, CLOSED = "forming", "ready", "aborting", "aborted", "closed"


class NcclWork:
    """Operation of a group. It has the methods of torch's `Work` that a transport uses."""

    def __init__(self, group: NcclGroup, verb: str, arguments: Sequence[Any], mark: object, until: float) -> None:
        self.verb, self.arguments, self.mark, self.until = verb, arguments, mark, until
        self.operation: Operation | None = None
        self.is_done = False
        self._group = group

    def complete(self) -> None:
        """Note the result, and drop the tensors: a transport keeps ended operations for a time."""
        self.is_done, self.arguments, self.operation, self.mark = True, (), None, None

    def is_completed(self) -> bool:
        """Return True if `wait` returns or raises immediately."""
        return self._group.has_ended(self)

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait for the result. Raise RuntimeError if the group has failed, or after the limit."""
        self._group.wait_for(self, math.inf if limit is None else limit.total_seconds())


class NcclGroup:
    """Owner of the communicator of one generation. All methods may be called from any thread."""

    def __init__(self, communicator: Communicator, timeout_s: float, failure_timeout_s: float) -> None:
        self._communicator = communicator
        self._timeout_s, self._failure_timeout_s = timeout_s, failure_timeout_s
        self._changed = threading.Condition()
        self._state, self._why = State.FORMING, ""
        self._connected_until = time.monotonic() + CONNECTING * failure_timeout_s
        self._ended_until = math.inf
        self._is_settled = False
        self._waiting: deque[NcclWork] = deque()
        self._begun: deque[NcclWork] = deque()
        self._owner = threading.Thread(target=self._run, name="stretto-nccl", daemon=True)
        self._owner.start()

    @property
    def state(self) -> State:
        """State of the group."""
        return self._state

    def allreduce(self, tensors: Sequence[Tensor]) -> NcclWork:
        """Start to sum a tensor of all workers in place."""
        return self._submit("allreduce", tensors)

    def allgather(self, found: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]) -> NcclWork:
        """Start to gather the tensors of all workers, which have one length."""
        return self._submit("allgather", found, tensors)

    def abort(self, why: str = "it was aborted") -> None:
        """End all operations, now and later. Idempotent. Returns immediately."""
        with self._changed:
            self._abort(why)

    def close(self) -> bool:
        """Disconnect, within two failure timeouts. Return False if the GPU may still write to tensors."""
        with self._changed:
            if self._state is State.READY and not self._waiting and not self._begun:
                self._end(State.CLOSED, "it is closed", "shutdown")
                self._changed.wait_for(lambda: self._is_settled, self._failure_timeout_s)
            self._abort("it is closed")
        return self.settle()

    def settle(self) -> bool:
        """Wait until an ended group can write to no tensor any more. Return False if the limit of an abort passes."""
        with self._changed:
            while not self._is_settled and time.monotonic() < self._ended_until:
                self._sleep(self._ended_until)
            return self._is_settled

    # --- waits ----------------------------------------------------------------------------------------------------

    def has_ended(self, work: NcclWork) -> bool:
        """Return True if an operation has a result, or never will."""
        with self._changed:
            return self._look(work)

    def wait_for(self, work: NcclWork, limit_s: float) -> None:
        """Wait for an operation. Raise RuntimeError if it has no result."""
        end = time.monotonic() + limit_s
        with self._changed:
            while not self._look(work):
                if end <= time.monotonic():
                    raise RuntimeError(f"no result of {work.verb} after {limit_s:g} s")
                self._sleep(min(end, self._next_limit(work)))
            if not (work.is_done and self._is_live):
                raise RuntimeError(self._why)

    def _look(self, work: NcclWork) -> bool:
        now = time.monotonic()
        if self._is_live and not work.is_done and now >= self._next_limit(work):
            what = "NCCL did not connect" if self._state is State.FORMING else f"no result of {work.verb}"
            self._abort(f"{what} within the limit")
        return work.is_done if self._is_live else self._is_settled or now >= self._ended_until

    def _next_limit(self, work: NcclWork) -> float:
        if not self._is_live:
            return self._ended_until
        return min(work.until, self._connected_until) if self._state is State.FORMING else work.until

    def _sleep(self, until: float) -> None:
        """Wait for a change, at most a second, which is shorter than any limit of a lock."""
        self._changed.wait(min(max(until - time.monotonic(), 0.0), 1.0))

    # --- the thread of the group ------------------------------------------------------------------------------------

    @property
    def _is_live(self) -> bool:
        return self._state in (State.FORMING, State.READY)

    def _submit(self, verb: str, *arguments: Any) -> NcclWork:
        mark = self._communicator.mark() if self._is_live else None
        with self._changed:
            if not self._is_live:
                raise RuntimeError(self._why)
            work = NcclWork(self, verb, arguments, mark, time.monotonic() + self._timeout_s)
            self._waiting.append(work)
            self._changed.notify_all()
        return work

    def _run(self) -> None:
        try:
            self._communicator.connect()
            with self._changed:
                if self._state is State.FORMING:
                    self._state = State.READY
                self._changed.notify_all()
            while self._has_begun_all():
                self._advance()
        except Exception as error:
            self.abort(str(error) or type(error).__name__)

    def _has_begun_all(self) -> bool:
        """Begin the submitted operations, or wait for the next one. Return False once the group has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._begun or self._state is not State.READY)
            new = tuple(self._waiting)
            if self._state is not State.READY:
                return False
        for work in new:
            work.operation = self._communicator.begin(work.verb, work.arguments, work.mark)
            with self._changed:
                self._begun.append(self._waiting.popleft())
        return True

    def _advance(self) -> None:
        """Take the results that the GPU has, in the order of the operations."""
        while self._begun:
            operation = self._begun[0].operation
            assert operation is not None
            if not operation.is_completed():
                time.sleep(POLL_S)
                return
            operation.wait()
            with self._changed:
                if self._state is not State.READY:
                    return
                self._begun.popleft().complete()
                self._changed.notify_all()

    # --- the thread of an end ---------------------------------------------------------------------------------------

    def _abort(self, why: str) -> None:
        is_shutting = self._state is State.CLOSED and not self._is_settled
        if self._is_live or is_shutting:
            self._end(State.ABORTING, why, "abort")

    def _end(self, state: State, why: str, verb: str) -> None:
        self._state, self._why = state, why
        self._ended_until = time.monotonic() + self._failure_timeout_s
        threading.Thread(target=self._disconnect, args=(verb,), name=f"stretto-nccl-{verb}", daemon=True).start()
        self._changed.notify_all()

    def _disconnect(self, verb: str) -> None:
        """Shut down or abort, and wait until no operation can write to a tensor. After an error that is not certain."""
        try:
            self._shut_down() if verb == "shutdown" else self._abort_all()
        except Exception as error:
            self._why = f"{self._why}; {verb} failed: {error}"
            return
        with self._changed:
            self._is_settled = True
            self._state = State.ABORTED if self._state is State.ABORTING else self._state
            self._waiting.clear()
            self._begun.clear()
            self._changed.notify_all()
        self._communicator.release()

    def _shut_down(self) -> None:
        self._owner.join()
        self._communicator.shutdown()

    def _abort_all(self) -> None:
        """Abort, and again after the group's thread has ended, since it may have connected after the first."""
        self._communicator.abort()
        self._owner.join()
        self._communicator.abort()
        for work in tuple(self._begun):
            while work.operation is not None and not work.operation.is_completed():
                time.sleep(POLL_S)
