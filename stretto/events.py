"""Events of a run: one JSON object on each line of `events.jsonl`, written by its processes, read by the report.

A worker that does not see the run directory sends its lines to the coordinator (`stretto.membership.event_lines`).

No process reads the log to decide what to do: if the log cannot be written, the run continues without it.

Every event has `event` (its kind), `t` (seconds since the start of training, with one zero for all workers) and
`process` ("worker 3", "worker 3 rank 1", "server 0" or "coordinator"); those of workers have `worker` too, the number,
and `rank` unless the process is rank 0 of its worker. The kinds and their other fields:

| kind | fields |
| --- | --- |
| start | workers, servers, pid, host, device, threads, recipe; rank, ranks of a worker with several ranks; |
| | numbers: true if the loop is over numbers, and draws its batches |
| stages | layout, modules, micro_batches, predicted_s, computing, activations, balance: the stages of a pipeline |
| | that is measured or simulated, with the predicted seconds of a pass and the bytes that it keeps (worker 0) |
| warning | text: a message for the user |
| log | step, samples, values: the arguments of `stretto.log` |
| progress | step, samples, rounds, time_breakdown, bytes_sent, bytes_received, bytes_counted, blocked_s, traffic, |
| | values_sent, residual_norms: totals of this worker process so far; stage, memory of a rank of several |
| update_applied | updates: [round, version, staleness, samples] of each update of this worker that was applied |
| evaluation | epoch, step, samples, training_s, metrics: of the averaged model (written by worker 0); versions |
| epoch | epoch, step, samples, training_s, sample_counts, drift, workers: one summary per worker (written by |
| | worker 0); trained |
| check | step, round, equal: a comparison of replicas by hash (written by worker 0) |
| error | kind, text, traceback, consequence (true when the failure of another worker caused it) |
| end | the fields of progress, and training_s |
| membership | what (joined, failed, left, slow or formed), incarnation, generation, why, at; for formed: members; |
| | for failed: rank that failed first, of a worker with several ranks |
| fault_injected | verb, kind, numbers, text, at: a fault that was injected into a process; |
| | rank of that process, of a worker with several ranks |
| samples_reassigned | failed_worker, incarnation, samples: work of a failed worker that other workers repeat |
| batches_lost | epoch, text: batches of a stream that no worker has trained, or whose training was undone |
| samples_left | epoch, samples, batches: samples of an epoch for which no loop asked, and no later epoch had; of |
| | workers that wait for each other only samples of a failed worker, without `batches` |
| generation_changed | generation, departed, joined, members: workers of the generation that starts |
| shares | epoch, after, paces, members, shares, speeds, measured_s, predicted_s, even_s: shares by speed, which move |
| | after this global step of the epoch; null where they stay (written by the first worker) |
| interval | step, local_steps, step_s, exchange_s: a new number of local steps between rounds, from the seconds of a |
| | step and of an exchange, on which the workers have agreed (written by the first worker) |
| written | host, paths: files outside the run directory that this worker has opened for writing |
| checkpoint | step, round, samples: a checkpoint is being written |
| section | section, folder, at: a further `distribute` of the script has started, with its own log in this folder |

An epoch that is repeated after a rollback, or whose writer fails as it ends, has several `epoch` events: the last
counts.

`samples` of log, evaluation and epoch counts all workers; of progress and end it counts this worker only.
`time_breakdown` maps each of PHASES to seconds, which sum to `t`. `sample_counts` maps once, twice, never and dropped
to numbers of samples.

`trained` of epoch maps each worker to the number of its samples of the epoch that count, over all its incarnations.
Only the dispatcher of asynchronous workers knows this number.

`traffic` maps each purpose (gradients, updates, parameters, gradient_differences, momenta, state, counts,
evaluation_sync) to bytes so far [raw_sent, sent, raw_received, received]: as unencoded values and as encoded, before
the transport multiplies them or adds headers (bytes_sent and bytes_received are measured at the transport).
`values_sent` holds the number of values in this worker's messages and the number of values they were selected from.
`residual_norms` holds the norm of the last input of the codec and that of its residual afterwards. In a single process
all three are absent, and `residual_norms` is present only for codecs with a residual.

`stage` holds the number of passes (forward and back) of a rank's stage but the first, their seconds, and those in which
it waited for other ranks. `memory` holds bytes: of a rank's parameters, gradients and optimizer state, and the peak of
its process.

Only asynchronous runs have `update_applied` (about twice a second), `blocked_s` (seconds for which the staleness bound
blocked this worker, part of `waiting`) and `versions` (of each shard of the parameter server). `step` is then the step
of the worker that writes the event. `round` is the worker's own count of pushes, from 1; `version` is the version that
includes the update; `staleness` is the number of versions between the parameters it was computed on and that version.
`servers` is the number of shards.

`speeds` of shares lists [worker, seconds a step, seconds a sample] as measured, and `paces` those by which `shares`,
the samples of the members in a usual global step, were computed. `measured_s` is the time of the last steps, at the
slowest worker, `predicted_s` that of steps with these shares, and `even_s` that with even ones.

`process` of membership and fault_injected is the process concerned, the coordinator where a generation is formed.
Processes that do not train write these events, with a zero of time of their own: `at` is the machine's clock. A `start`
event that has `at` too makes the zeros comparable.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from stretto.errors import LogError
from stretto.notices import say

PHASES = ("computing", "encoding", "exchanging", "waiting", "loading", "evaluating", "other")
"""Phases of a worker's time. `waiting` is for a slower worker, `exchanging` is the transfer itself."""

OF_RANK_0 = ("log", "evaluation", "epoch", "check", "samples_reassigned", "generation_changed", "shares")
"""Kinds of events that a worker's rank 0 writes for the worker; readers skip those of its other ranks."""

COORDINATOR = -1000
"""Number of the coordinator. Workers are numbered by rank from 0; server s has the number -1 - s."""
RELAY = COORDINATOR - 1
"""Number of the relay between hosts that cannot reach each other."""

Event = dict[str, Any]
FLUSH_BYTES = 1 << 15
MAX_BUFFERED_BYTES = 1 << 24
"""Bytes of events that are kept in memory while they cannot be stored."""
TOO_SLOW = "events are written faster than they can be stored"


def process_name(number: int, rank: int = 0) -> str:
    """Return the name of a process of a run; a worker's rank is named unless it is 0.

    >>> process_name(3), process_name(3, 1), process_name(-1), process_name(COORDINATOR), process_name(RELAY)
    ('worker 3', 'worker 3 rank 1', 'server 0', 'coordinator', 'relay')
    """
    if number >= 0:
        return f"worker {number}" + f" rank {rank}" * (rank > 0)
    return {COORDINATOR: "coordinator", RELAY: "relay"}.get(number, f"server {-1 - number}")


def of_process(number: int, rank: int = 0) -> Event:
    """Return the fields of an event that name its process; `rank` is among them unless it is 0."""
    fields = {"worker": number} | ({"rank": rank} if rank else {}) if number >= 0 else {}
    return {"process": process_name(number, rank)} | fields


def counts_for_worker(event: Event) -> bool:
    """Return False for an event that another rank than 0 wrote, of a kind that rank 0 writes for its worker."""
    return not event.get("rank") or event.get("event") not in OF_RANK_0


class LineStore(Protocol):
    """Destination of the lines of an event log: a file, or the coordinator for workers that do not see the file."""

    def drain(self, lines: bytearray) -> None:
        """Remove lines from the buffer, as far as they can be stored now. Raises LogError if they cannot be stored."""
        ...

    def finish(self, lines: bytearray) -> None:
        """Store the last lines. Raises LogError if they cannot be stored."""
        ...


class LogFile:
    """A file to which several processes append whole lines, opened at the first. A full disk raises LogError.

    The next write ends a line that was cut off, so a cut-off write loses one line of one process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    @property
    def _file(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        return self._descriptor

    def append(self, lines: bytes) -> None:
        """Append lines, with one write if there is room."""
        self.drain(bytearray(lines))

    def drain(self, lines: bytearray) -> None:
        """Append lines and remove them from the buffer. After LogError the buffer holds the lines not yet written."""
        try:
            while lines:
                prefix = b"\n" * self._ends_within_line()
                written = max(os.write(self._file, prefix + lines) - len(prefix), 0)
                is_whole = lines[written : written + 1] == b"\n"  # only its end is missing: the next prefix adds it
                del lines[: written + 1 if is_whole else lines.rfind(b"\n", 0, written) + 1]
        except OSError as error:
            raise LogError(f"the event log {self.path} cannot be written: {error.strerror}") from error

    def _ends_within_line(self) -> bool:
        """Return True if the last write was cut off within a line."""
        size = os.fstat(self._file).st_size
        return size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def finish(self, lines: bytearray) -> None:
        """Append the last lines and close the file."""
        try:
            self.drain(lines)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file, if it was opened."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class EventLog:
    """Events of one rank of a worker, buffered and stored every `FLUSH_BYTES` and at `flush`.

    While they cannot be stored, since the disk is full or the coordinator is away, up to `max_buffered` bytes stay in
    the buffer; further events are lost.
    """

    def __init__(self, store: LineStore, worker: int, max_buffered: int = MAX_BUFFERED_BYTES, rank: int = 0) -> None:
        self._store, self._max_buffered = store, max_buffered
        self.worker, self._process = worker, of_process(worker, rank)
        self._lines = bytearray()
        self._is_blocked = False

    def write(self, kind: str, t: float, /, **fields: object) -> None:
        """Add one event; it is stored at the next flush."""
        event = {"event": kind, "t": round(t, 6), **self._process, **fields}
        self._lines += msgspec.json.encode(event) + b"\n"
        if len(self._lines) >= FLUSH_BYTES and not self._is_blocked:
            self.flush()

    def flush(self) -> None:
        """Store the buffered events. When they cannot be stored and the buffer is full, they are lost."""
        problem = self._drain()
        if self._lines and len(self._lines) >= self._max_buffered:
            self._say(f"{problem or TOO_SLOW}; {len(self._lines)} bytes of events are lost")
            self._lines.clear()
        if problem and not self._is_blocked:
            self._say(f"{problem}; training continues, and events stay in memory until there is room")
        elif self._is_blocked and not problem:
            self._say("the event log can be written again")
        self._is_blocked = bool(problem)

    def _drain(self) -> str:
        """Store the buffered events; return the reason if they cannot be stored."""
        try:
            self._store.drain(self._lines)
        except LogError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Store the buffered events and close the file. Raises LogError when they cannot be stored."""
        self._store.finish(self._lines)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal's output may be redirected to the full disk
            say(f"{self._process['process']}: {text}")


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a log in the order written. A cut-off last line, as after a crash, is skipped.

    Any other cut-off line, as after a full disk, becomes a warning event. Raises LogError when no line is whole.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise LogError(f"the event log {path} cannot be read: {error.strerror}") from error
    t, torn, whole = 0.0, "", False
    for number, line in enumerate(lines[:-1], 1):
        if not line:
            continue
        try:
            event = msgspec.json.decode(line, type=Event)
        except msgspec.DecodeError as error:
            torn = f"line {number} of {path} is not an event: {error}"
            event = {"event": "warning", "t": t, **of_process(0), "text": torn}
        else:
            t, whole = event.get("t", t), True
        yield event
    with contextlib.suppress(msgspec.DecodeError):
        yield msgspec.json.decode(lines[-1], type=Event)
    if torn and not whole:
        raise LogError(torn)
