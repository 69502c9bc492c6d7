"""Why a run failed: of all that went wrong, the one thing that the rest followed from."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from stretto.events import Event
from stretto.launcher.process_specs import called
from stretto.launcher.processes import Exited
from stretto.launcher.worker_main import AGAIN
from stretto.membership.loop_positions import COMING, LoopPosition

TAIL_LINES = 20
NO_END = (
    "its script, or a library, has called os._exit: what the others exchange with it is lost, and so is the model\n"
    "  try: end the script by its last line, or by sys.exit()"
)


@dataclass(frozen=True)
class Cause:
    """What one process's end was about. `root`: no other's failure led to it."""

    worker: int
    headline: str
    details: str
    root: bool
    said_so: bool
    """Whether the process itself told what was wrong, so that the end of its output is not needed."""


def first_cause(ends: Sequence[Exited], events: Iterable[Event], deaths: Sequence[Exited] = ()) -> Cause:
    """The cause of a failed run: the first root in the order of the workers' ends.

    A worker that has written its error but is still there counts after those that have ended, and last count `deaths`
    that nobody has recovered from yet. Without a root the first that failed is the cause.
    """
    errors: dict[int, Event] = {}
    for event in events:
        if event.get("event") == "error":
            errors.setdefault(event["worker"], event)
    causes = [_of_end(end, errors.get(end.worker)) for end in ends if end.failed]
    causes += [_of_error(error) for error in errors.values()]
    causes += [_of_end(death, None) for death in reversed(deaths)]
    return next((cause for cause in causes if cause.root), None) or _with_those_gone(causes[0], ends)


def is_recovered(worker: int, life: int, events: Iterable[Event]) -> bool:
    """Return whether the others have formed a group without a process that died, or it has been replaced.

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


def _with_those_gone(cause: Cause, ends: Sequence[Exited]) -> Cause:
    """A worker that waited in vain may have waited for one that had left the loop in peace."""
    gone = [str(end.worker) for end in ends if not end.failed]
    if not gone:
        return cause
    hint = f"ended before that without an error: worker {', '.join(gone)}; do all leave the loop at the same step?"
    return replace(cause, details=f"{cause.details}\n{hint}".lstrip("\n"))


def _of_end(end: Exited, error: Event | None) -> Cause:
    if error is not None:
        return _of_error(error)
    if end.code == AGAIN and end.worker >= 0:
        return Cause(end.worker, f"{called(end.worker)} {in_words(end)}", "", True, False)
    return _of_signal(end) if end.code < 0 else _of_silence(end)


def _of_error(error: Event) -> Cause:
    headline = f"{called(error['worker'])} failed: {error.get('kind')}: {error.get('text')}"
    details = str(error.get("traceback") or "").rstrip("\n")
    return Cause(error["worker"], headline.rstrip(": "), details, not error.get("consequence"), True)


def _of_signal(end: Exited) -> Cause:
    name = signal_name(-end.code)
    hint = "nothing here sent it; a system that runs out of memory does" if name == "SIGKILL" else ""
    hint = "--faults sent it" if end.struck else hint
    return Cause(end.worker, f"{called(end.worker)} was killed by {name}", hint, True, False)


def _of_silence(end: Exited) -> Cause:
    how = "without finishing" if end.worker >= 0 and not end.code else "and named no error"
    headline = f"{called(end.worker)} ended with exit code {end.code}{_within(end.place)} {how}"
    return Cause(end.worker, headline, NO_END if end.worker >= 0 and not end.code else "", True, False)


def _within(place: LoopPosition) -> str:
    return f" in epoch {place.epoch} at step {place.step}" if place.phase != COMING else ""


def in_words(end: Exited) -> str:
    """How a process came to its end.

    >>> in_words(Exited(1, -9)), in_words(Exited(1, 75)), in_words(Exited(-1, 0))
    ('killed by SIGKILL', 'was taken for dead and stopped by itself', 'ended with exit code 0')
    """
    if end.code < 0:
        return f"killed by {signal_name(-end.code)}"
    again = end.code == AGAIN and end.worker >= 0
    return "was taken for dead and stopped by itself" if again else f"ended with exit code {end.code}"


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def readable(cause: Cause, tail: Callable[[int], str], log: str) -> str:
    """The cause as a person is told it: what, where it happened or what was last said, where to read on."""
    said = [] if cause.said_so else tail(cause.worker).splitlines()[-TAIL_LINES:]
    last = ["the last lines of its output:", *(f"  {line}" for line in said)] if said else []
    return "\n".join(filter(None, [cause.headline, cause.details, *last, f"the whole log: {log}"]))
