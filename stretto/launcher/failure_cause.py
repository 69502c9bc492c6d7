"""Root cause of a failed run: the first failure that is not the consequence of another one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from stretto.errors import UnevenLoopsError
from stretto.events import Event
from stretto.launcher.processes import Exited
from stretto.launcher.worker_main import EVICTED, UNLOGGED
from stretto.membership.loop_positions import COMING, LoopPosition
from stretto.report.run_log import process_name

TAIL_LINES = 20
NO_END = (
    "its script, or a library, has called os._exit: what the others exchange with it is lost, and so is the model\n"
    "  try: end the script by its last line, or by sys.exit()"
)


@dataclass(frozen=True)
class Cause:
    """Failure of one process. `root` is True if it is not the consequence of another failure."""

    worker: int
    headline: str
    details: str
    root: bool
    reported: bool
    """True if the process reported its error, so that the tail of its output is not needed."""


def first_cause(ends: Sequence[Exited], events: Iterable[Event], failures: Sequence[Exited] = ()) -> Cause:
    """Return the cause of a failed run: the first root in the order of exits.

    A worker that has written its error but has not exited comes after the exits, and last come `failures` that the run
    has not recovered from. Without a root the first failure is the cause.
    """
    errors: dict[int, Event] = {}
    for event in events:
        if event.get("event") == "error":
            errors.setdefault(event["worker"], event)
    causes = [_of_exit(end, errors.get(end.worker)) for end in ends if end.failed]
    causes += [_of_error(error) for error in errors.values()]
    causes += [_of_exit(failure, None) for failure in reversed(failures)]
    return next((cause for cause in causes if cause.root), None) or _with_finished(causes[0], ends)


def is_recovered(worker: int, life: int, events: Iterable[Event]) -> bool:
    """Return True if the others have formed a generation without a failed process, or if it has been restarted.

    >>> of = {"event": "membership", "worker": 1, "incarnation": 0}
    >>> failed, formed = of | {"what": "failed"}, of | {"what": "formed"}
    >>> is_recovered(1, 0, [formed, failed]), is_recovered(1, 0, [failed, formed])
    (False, True)
    """
    is_known = False
    for event in events:
        what, of = event.get("what"), event.get("incarnation", 0)
        if event["event"] != "membership":
            continue
        is_known = is_known or (what == "failed" and (event["worker"], of) == (worker, life))
        if (is_known and what == "formed") or (what == "joined" and event["worker"] == worker and of > life):
            return True
    return False


def _with_finished(cause: Cause, ends: Sequence[Exited]) -> Cause:
    """Add the workers that exited before without an error: others may have waited for them."""
    finished = [str(end.worker) for end in ends if not end.failed]
    if not finished:
        return cause
    hint = f"ended before that without an error: worker {', '.join(finished)}; do all leave the loop at the same step?"
    return replace(cause, details=f"{cause.details}\n{hint}".lstrip("\n"))


def _of_exit(end: Exited, error: Event | None) -> Cause:
    if error is not None:
        return _of_error(error)
    if end.code == EVICTED and end.worker >= 0:
        return Cause(end.worker, f"{process_name(end.worker)} {in_words(end)}", "", True, False)
    return _of_signal(end) if end.code < 0 else _of_silence(end)


def _of_error(error: Event) -> Cause:
    is_bystander = error.get("kind") == UnevenLoopsError.__name__  # which waits for the worker that left
    who = "" if is_bystander else f"{process_name(error['worker'])} failed: "
    headline = f"{who}{error.get('kind')}: {error.get('text')}"
    details = str(error.get("traceback") or "").rstrip("\n")
    return Cause(error["worker"], headline.rstrip(": "), details, not error.get("consequence"), True)


def _of_signal(end: Exited) -> Cause:
    name = signal_name(-end.code)
    hint = "this launcher did not send it; a system that runs out of memory does" if name == "SIGKILL" else ""
    hint = "--faults sent it" if end.injected else hint
    return Cause(end.worker, f"{process_name(end.worker)} was killed by {name}", hint, True, False)


def _of_silence(end: Exited) -> Cause:
    if end.code == UNLOGGED:
        failed = f"{process_name(end.worker)} failed{_within(end.place)}"
        return Cause(end.worker, f"{failed}, and its error could not be written to the event log", "", True, False)
    how = "without finishing" if end.worker >= 0 and not end.code else "and named no error"
    headline = f"{process_name(end.worker)} ended with exit code {end.code}{_within(end.place)} {how}"
    return Cause(end.worker, headline, NO_END if end.worker >= 0 and not end.code else "", True, False)


def _within(place: LoopPosition) -> str:
    return f" in epoch {place.epoch} at step {place.step}" if place.phase != COMING else ""


def in_words(end: Exited) -> str:
    """Return how a process exited.

    >>> in_words(Exited(1, -9)), in_words(Exited(1, 75)), in_words(Exited(-1, 0))
    ('killed by SIGKILL', 'was declared failed and stopped itself', 'ended with exit code 0')
    """
    if end.code < 0:
        return f"killed by {signal_name(-end.code)}"
    again = end.code == EVICTED and end.worker >= 0
    return "was declared failed and stopped itself" if again else f"ended with exit code {end.code}"


def signal_name(number: int) -> str:
    """Return the name of a signal: SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def readable(cause: Cause, tail: Callable[[int], str], log: str) -> str:
    """Return the text of a cause: what failed, its traceback or last output, and the log file."""
    lines = [] if cause.reported else tail(cause.worker).splitlines()[-TAIL_LINES:]
    last = ["the last lines of its output:", *(f"  {line}" for line in lines)] if lines else []
    return "\n".join(filter(None, [cause.headline, cause.details, *last, f"the whole log: {log}"]))
