"""One event, one line of `events.jsonl`: written by whoever trains, read by the report.

Every event has `event` (its kind), `t` (seconds since the start of training, a zero that all workers share) and
`worker`. The kinds and what else they carry:

| kind | carries |
| --- | --- |
| start | workers, servers, pid, host, device, threads, recipe |
| notice | text: something that the user should know |
| log | step, samples, values: what the script gave to `stretto.log` |
| progress | step, samples, rounds, split, bytes_sent, bytes_received, bytes_counted, held_s: this worker, until now; |
| | exchanged, entries, norms |
| applied | updates: [round, version, staleness, samples] of each update of this worker that the model took up |
| evaluation | epoch, step, samples, training_s, metrics: the agreed model (written by worker 0); versions |
| epoch | epoch, step, samples, training_s, seen, drift, workers: one summary a worker (written by worker 0); |
| | trained |
| check | step, round, equal: a comparison of replicas by hash (written by worker 0) |
| error | kind, text, traceback, consequence (true when another worker's failure caused it) |
| end | what progress carries, and training_s |
| member | what (joined, gone, left, slow or formed), life, generation, why, at; of formed: members |
| fault_injected | verb, kind, numbers, text, at: what was done to a process on purpose |
| reissued | of, life, samples: what others do again for a worker that is gone |
| regrouped | generation, gone, came, members: others exchange from now on |
| written | host, paths: the files that this worker has opened for writing, outside the run folder |
| checkpoint | step, round, samples: the state is being written |
| section | section, folder, at: a further `distribute` of the script has begun, with a log of its own in this folder |

`samples` of log, evaluation and epoch counts all workers, of progress and end this worker alone. `split` maps each of
PHASES to seconds; they sum to `t`. `seen` maps once, twice, never and dropped to numbers of samples.

`trained` of epoch maps each worker to the samples of the epoch that count and that it has trained, in all its
incarnations; only the coordinator of workers that do not wait for each other knows it.

`exchanged` maps each purpose (gradients, updates, parameters, gradient_differences, momenta, state, counts, looks) to
bytes until now [raw_sent, sent, raw_received, received]: as exact numbers, and as encoded, before a wire multiplies
them or adds its heads (bytes_sent and bytes_received are those of the wire). `entries` are the numbers that this
worker's messages spoke of, and of how many; `norms` those of what was last given to the codec and of what it owed then.
A worker that is alone has none of the three, and `norms` is only there where a codec keeps a residual.

Only asynchronous runs have `applied` (about twice a second), `held_s` (seconds that the bound made this worker wait,
part of `waiting`) and `versions` (of each shard of the server); in them `step` is that of the worker that writes.
`round` is the worker's own count of exchanges, from 1; `version` the one that the update became part of; `staleness`
how many versions came between the one it was computed on and that. `servers` is the number of shards; shard s writes
its errors as worker -1 - s, the coordinator its own as worker -1000.

`worker` of member and fault_injected is the process that they are about, -1000 where a generation is formed. They are
written by processes that do not train, with a zero of their own: `at` is the machine's clock, and where `start` carries
it too the zeros can be compared.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from stretto.errors import LogError
from stretto.notices import say

PHASES = ("computing", "encoding", "exchanging", "waiting", "loading", "evaluating", "other")
"""What a worker's time is spent on. `waiting` is for a later worker, `exchanging` for the bytes."""

Event = dict[str, Any]
FLUSH_BYTES = 1 << 15
KEPT_BYTES = 1 << 24
"""So much is kept for a disk that may have room again."""


class LogFile:
    """A file to which whole lines are appended, so that several can share it. A full disk raises LogError.

    What is torn there is ended by what comes next: only one line of one writer is lost.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LogError(f"the event log {path} cannot be opened: {error.strerror}") from error

    def append(self, lines: bytes) -> None:
        """Append lines, with one write if there is room."""
        self.take(bytearray(lines))

    def take(self, lines: bytearray) -> None:
        """The same, and take off what was appended: with LogError, what is left has not been."""
        try:
            while lines:
                before = b"\n" * self._ends_torn()
                taken = max(os.write(self._file, before + lines) - len(before), 0)
                is_whole = lines[taken : taken + 1] == b"\n"  # but for its end, which comes next time
                del lines[: taken + 1 if is_whole else lines.rfind(b"\n", 0, taken) + 1]
        except OSError as error:
            raise LogError(f"the event log {self.path} cannot be written: {error.strerror}") from error

    def _ends_torn(self) -> bool:
        """Whether whoever wrote last was cut off within a line."""
        size = os.fstat(self._file).st_size
        return size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def close(self) -> None:
        """Let go of it."""
        os.close(self._file)


class EventLog:
    """One worker's events: collected, and appended to a file each `FLUSH_BYTES` or at `flush`.

    What a full disk does not take is kept, and brought there when it has room again.
    """

    def __init__(self, file: LogFile, worker: int, keeps: int = KEPT_BYTES) -> None:
        self._file, self._keeps = file, keeps
        self.worker = worker
        self._lines = bytearray()
        self._is_held_up = False

    def write(self, kind: str, t: float, /, **carries: object) -> None:
        """Add one event; it reaches the disk at the next flush."""
        event = {"event": kind, "t": round(t, 6), "worker": self.worker, **carries}
        self._lines += msgspec.json.encode(event) + b"\n"
        if len(self._lines) >= FLUSH_BYTES and not self._is_held_up:
            self.flush()

    def flush(self) -> None:
        """Append what has been collected. Raises LogError when the disk takes nothing and too much is kept already."""
        try:
            self._file.take(self._lines)
        except LogError as error:
            if len(self._lines) >= self._keeps:
                raise
            if not self._is_held_up:
                self._say(f"{error}; training goes on, and what belongs there is kept until there is room")
            self._is_held_up = True
        else:
            if self._is_held_up:
                self._say("the event log is written again")
            self._is_held_up = False

    def close(self) -> None:
        """Append what is left, and close. Raises LogError when the disk does not take it."""
        try:
            self._file.take(self._lines)
        finally:
            self._file.close()

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal's output may go to the same disk
            say(f"worker {self.worker}: {text}")


def read_events(path: Path) -> Iterator[Event]:
    """The events of a log in the order written. A torn last line, as a crash leaves it, is passed over.

    For a line that is torn elsewhere, as a full disk leaves it, there is a notice. Raises LogError when none is whole.
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
            event = {"event": "warning", "t": t, "worker": 0, "text": torn}
        else:
            t, whole = event.get("t", t), True
        yield event
    with contextlib.suppress(msgspec.DecodeError):
        yield msgspec.json.decode(lines[-1], type=Event)
    if torn and not whole:
        raise LogError(torn)
