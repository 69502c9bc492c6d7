"""Root cause of a failed run: the first failure that is not the consequence of another one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.errors import UnevenLoopsError
from stretto.events import process_name
from stretto.launcher.engines.interface import Exited
from stretto.launcher.worker_main import EVICTED, OUT_OF_MEMORY, STAYS_OUT, UNREACHABLE, WAITS_OUT
from stretto.membership.loop_positions import COMING, LoopPosition
from stretto.membership.worker_status import ReportedError

HINTS = {
    "SIGKILL": "this launcher did not send it; a system that runs out of memory does",
    "SIGABRT": "a library ended the process; gloo does so where processes exchange tensors that differ: do all make "
    "the same calls, whatever their own losses are?",
}
"""Hints at the sender of a signal, by the name of the signal."""
TAIL_LINES = 20
DETAILS_LINES, DETAILS_CHARACTERS = 10, 4000
"""Largest size of the text of an error that is sent to the other machines of a run."""
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
    rank: int = 0
    """Rank of the process within its worker."""
    of_script: bool = True
    """False for a failure after which the run may continue on other machines."""


def first_cause(ends: Sequence[Exited], running: Mapping[int, ReportedError], failures: Sequence[Exited] = ()) -> Cause:
    """Return the cause of a failed run: the first root in the order of exits.

    The errors of `running` processes, which have not exited, come after the exits, and last come `failures` that the
    run has not recovered from. Without a root the first failure is the cause.
    """
    causes = [_of_exit(end) for end in ends if end.failed]
    causes += [_of_error(worker, 0, error) for worker, error in running.items()]
    causes += [_of_exit(failure) for failure in reversed(failures)]
    return next((cause for cause in causes if cause.root), None) or _with_finished(causes[0], ends)


def for_others(cause: Cause) -> str:
    """Return the text of a cause for the other machines of a run: its error, and the last lines of its traceback."""
    headline = cause.headline.removeprefix(f"{process_name(cause.worker, cause.rank)} failed: ")
    details = cause.details.splitlines()[-DETAILS_LINES:]
    return "\n".join([headline.replace("\n", " "), *details])[:DETAILS_CHARACTERS]


def _with_finished(cause: Cause, ends: Sequence[Exited]) -> Cause:
    """Add the workers that exited before without an error: others may have waited for them."""
    finished = [str(end.worker) for end in ends if not end.failed]
    if not finished:
        return cause
    hint = f"ended before that without an error: worker {', '.join(finished)}; do all leave the loop at the same step?"
    return replace(cause, details=f"{cause.details}\n{hint}".lstrip("\n"))


def _of_exit(end: Exited) -> Cause:
    if end.record.error is not None:
        return replace(_of_error(end.worker, end.rank, end.record.error), of_script=end.code != UNREACHABLE)
    if end.code in (EVICTED, STAYS_OUT, WAITS_OUT) and end.worker >= 0:
        return Cause(end.worker, f"{_name(end)} {in_words(end)}", "", True, False, end.rank)
    return _of_signal(end) if end.code < 0 else _of_silence(end)


def _name(end: Exited) -> str:
    return process_name(end.worker, end.rank)


def _of_error(worker: int, rank: int, error: ReportedError) -> Cause:
    is_bystander = error.kind == UnevenLoopsError.__name__  # which waits for the worker that left
    subject = "" if is_bystander else f"{process_name(worker, rank)} failed: "
    headline = f"{subject}{error.kind}: {error.text}".rstrip(": ")
    return Cause(worker, headline, error.traceback.rstrip("\n"), not error.consequence, True, rank)


def _of_signal(end: Exited) -> Cause:
    name = signal_name(-end.code)
    hint = "--faults sent it" if end.injected else HINTS.get(name, "")
    return Cause(end.worker, f"{_name(end)} was killed by {name}", hint, True, False, end.rank)


def _of_silence(end: Exited) -> Cause:
    how = "without finishing" if end.worker >= 0 and not end.code else "and named no error"
    headline = f"{_name(end)} ended with exit code {end.code}{_within(end.record.place)} {how}"
    details = NO_END if end.worker >= 0 and not end.code else ""
    return Cause(end.worker, headline, details, True, False, end.rank)


def _within(place: LoopPosition) -> str:
    return f" in epoch {place.epoch} at step {place.step}" if place.phase != COMING else ""


def in_words(end: Exited) -> str:
    """Return how a process exited.

    >>> in_words(Exited(1, -9)), in_words(Exited(1, 75)), in_words(Exited(-1, 0))
    ('killed by SIGKILL', 'was declared failed and ended', 'ended with exit code 0')
    """
    if end.code < 0:
        return f"killed by {signal_name(-end.code)}"
    if end.code == UNREACHABLE and end.worker >= 0:
        return "could not connect with others and ended"
    if end.code in (STAYS_OUT, WAITS_OUT) and end.worker >= 0:
        return "could not join the epoch under way and ended"
    if end.code == OUT_OF_MEMORY and end.worker >= 0:
        return "ran out of memory and ended"
    is_evicted = end.code == EVICTED and end.worker >= 0
    return "was declared failed and ended" if is_evicted else f"ended with exit code {end.code}"


def signal_name(number: int) -> str:
    """Return the name of a signal: SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def readable(cause: Cause, tail: Callable[[int, int], str], log: str) -> str:
    """Return the text of a cause: what failed, its traceback or last output, and the log file."""
    lines = [] if cause.reported else tail(cause.worker, cause.rank).splitlines()[-TAIL_LINES:]
    output_lines = ["the last lines of its output:", *(f"  {line}" for line in lines)] if lines else []
    return "\n".join(filter(None, [cause.headline, cause.details, *output_lines, f"the whole log: {log}"]))
