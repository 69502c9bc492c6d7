"""One run as one flat record: what `--json` writes and every table is made of."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from stretto.errors import LaunchError, LogError, explain
from stretto.report import incidents, staleness, traffic
from stretto.report.run_log import History, number, read, split_of

Record = dict[str, Any]

STANDARD_OUTPUT = "-"
SINGLE_PROCESS = "single process"
GLOBAL_BATCH = "single process (global batch)"


def record(run_folder: Path) -> Record:
    """The record of a run folder, from run.json and events.jsonl alone.

    `seconds` is training time, evaluations not counted, and virtual where something is `simulated`; `samples` counts
    all workers. `failed` is None for a run that came to its end, and else the reason. What only a comparison knows
    stays None. `steps` and `rounds` are those of the worker that made most; in asynchronous runs others made fewer.
    `bytes_sent` and `bytes_received` are those of the wire; `accounts.fields` says what was exchanged raw and encoded,
    and what is owed.
    """
    history = read(run_folder)
    seconds, samples = _length(history)
    return {
        **_asked(history),
        "failed": history.failure,
        "metrics": _metrics(history),
        "seconds": seconds,
        "wall_seconds": _wall(history),
        "samples": samples,
        "samples_per_second": samples / seconds if seconds else None,
        **_counted(history),
        **traffic.fields(history),
        **_uneven(history),
        "sample_counts": [event.get("sample_counts") for event in history.passes],
        **BEYOND_ONE_RUN,
        "failures": incidents.deaths(history),
        "folder": str(run_folder),
    }


BEYOND_ONE_RUN: Record = {
    "compared_with": None,
    "parameter_distance": None,
    "prediction_disagreement": None,
    "distances": [],
    "reached": None,
}
"""What a record gets from a comparison."""


LISTS = ("bytes_sent", "bytes_received", "time_breakdown", "samples_by_worker", "sample_counts", "failures")


def unstarted(
    *, recipe: str, workers: int, global_batch_of: int, seed: int, script: str, folder: Path, failed: str
) -> Record:
    """The record of a run that left nothing to read."""
    asked = {
        "recipe": recipe,
        "workers": workers,
        "global_batch_of": global_batch_of,
        "seed": seed,
        "script": script,
        "args": [],
    }
    unknown = ("threads", "cores", "simulated", "seconds", "samples_per_second", "staleness", "blocked_seconds")
    nothing = dict.fromkeys(unknown)
    counted = {
        "wall_seconds": 0.0,
        "samples": 0,
        "steps": 0,
        "rounds": 0,
        "bytes_counted": True,
        "metrics": {},
    }
    lists: Record = {name: [] for name in LISTS}
    unsaid = traffic.nothing()
    return {**asked, **nothing, **counted, **lists, **unsaid, **BEYOND_ONE_RUN, "failed": failed, "folder": str(folder)}


def _asked(history: History) -> Record:
    run, start = history.run, (history.of("start") or [{}])[0]
    return {
        "recipe": _name(run, start),
        "workers": history.workers,
        "global_batch_of": int(run.get("global_batch_of") or 1),
        "seed": run.get("seed", 0),
        "script": run.get("script"),
        "args": run.get("args", []),
        "threads": start.get("threads") or run.get("threads"),
        "cores": (run.get("machine") or {}).get("cores"),
        "simulated": run.get("simulated"),
    }


def _name(run: Record, start: Record) -> str:
    if run.get("single_process"):
        return GLOBAL_BATCH if (run.get("global_batch_of") or 1) > 1 else SINGLE_PROCESS
    return str(start.get("recipe") or run.get("recipe") or SINGLE_PROCESS)


def _length(history: History) -> tuple[float | None, int]:
    """Training seconds and samples of all workers, both taken at the same moment."""
    counts = history.last_counts()
    counted = sum(int(event.get("samples") or 0) for event in counts)
    if history.passes and history.ended:
        last = history.passes[-1]
        beyond = 0 if history.has_returned else counted  # what was done again counted once
        return number(last.get("training_s")), max(beyond, int(last.get("samples") or 0))
    trained = [event["t"] - split_of(event)["evaluating"] for event in counts if event]
    return (max(trained), counted) if trained else (None, counted)


def _wall(history: History) -> float:
    return max((event["t"] for events in history.events.values() for event in events), default=0.0)


def _metrics(history: History) -> Record:
    last: Record = {}
    for event in history.of("evaluation"):
        last |= {name: number(value) for name, value in (event.get("metrics") or {}).items()}
    return last


def _counted(history: History) -> Record:
    counts = history.last_counts()
    return {
        "steps": max(int(event.get("step") or 0) for event in counts),
        "rounds": max(int(event.get("rounds") or 0) for event in counts),
        "bytes_sent": [int(event.get("bytes_sent") or 0) for event in counts],
        "bytes_received": [int(event.get("bytes_received") or 0) for event in counts],
        "bytes_counted": all(event.get("bytes_counted", True) for event in counts),
        "time_breakdown": [split_of(event) for event in counts],
    }


def _uneven(history: History) -> Record:
    """What differs between workers that do not keep step."""
    counts = history.last_counts()
    held = [number(event.get("blocked_s")) for event in counts]
    return {
        "samples_by_worker": history.trained or [int(event.get("samples") or 0) for event in counts],
        "staleness": staleness.summary(history),
        "blocked_seconds": None if all(one is None for one in held) else [one or 0.0 for one in held],
    }


def check_target(target: Path | None, example: str) -> None:
    """Refuse before a run what `write_json` could not write after it. Raises LaunchError; `example` is a good name."""
    if target is None or str(target) == STANDARD_OUTPUT or (target.parent.is_dir() and not target.is_dir()):
        return
    problem = f"{target} is a folder" if target.is_dir() else f"there is no folder {target.parent}"
    expected = "a file in a folder that exists, or - for the standard output"
    raise LaunchError(explain(problem, got=target, expected=expected, to_type=f"--json {example}"))


def write_json(target: Path, found: object) -> None:
    """Write records, or whatever else is asked for as JSON, to a file or with "-" to the standard output."""
    text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"
    if str(target) == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    try:
        target.write_text(text)
    except OSError as error:
        raise LogError(f"{target} cannot be written: {error.strerror}") from error
