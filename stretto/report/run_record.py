"""Run record: the flat summary of a run that `--json` writes and that all tables are computed from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from stretto.errors import LaunchError, LogError, explain
from stretto.events import process_name
from stretto.report import incidents, stages, staleness, traffic
from stretto.report.run_log import History, number, read, split_of
from stretto.whole_files import written_whole

Record = dict[str, Any]

STANDARD_OUTPUT = "-"
SINGLE_PROCESS = "single process"
GLOBAL_BATCH = "single process (global batch)"


def record(run_folder: Path) -> Record:
    """Return the record of a run directory, from run.json and events.jsonl only.

    `seconds` is training time without evaluations, in virtual time if the run is `simulated`. `samples` are those whose
    gradients are in the model, the sum of `samples_by_worker` and `samples_before`, those of the state that a resumed
    run continues from; work that was lost or repeated does not count. `evaluations` are sorted by samples, `metrics`
    has the last value of each metric. `failed` is None for a run that finished, and else the reason; `is_complete` is
    False if the log has no end, since the run failed or the disk was full: the numbers are those of what it has. Fields
    that only a comparison can fill are None. `steps` and `rounds` are the largest of any worker; workers of
    asynchronous runs differ. `bytes_sent`, `bytes_received` and `time_breakdown` have an entry for each of `processes`,
    the workers or their ranks; the bytes are measured at the transport. `stages` are the passes of a pipeline
    (`stages.summary`). `traffic.fields` describes the raw and encoded bytes and residuals.
    """
    history = read(run_folder)
    seconds, samples = _length(history)
    return {
        **_configuration(history),
        "failed": history.failure,
        "is_complete": history.ended,
        "metrics": _metrics(history),
        "evaluations": _evaluations(history),
        "seconds": seconds,
        "wall_seconds": _wall(history),
        "samples": samples,
        "samples_per_second": samples / seconds if seconds else None,
        **_counted(history),
        **traffic.fields(history),
        **_asynchronous(history),
        "stages": stages.summary(history),
        "sample_counts": [event.get("sample_counts") for event in history.epochs],
        "samples_left": [{name: one.get(name) for name in LEFT} for one in history.of("samples_left")],
        **BEYOND_ONE_RUN,
        "failures": incidents.failures(history),
        "folder": str(run_folder),
    }


BEYOND_ONE_RUN: Record = {
    "compared_with": None,
    "compared_at": None,
    "parameter_distance": None,
    "prediction_disagreement": None,
    "distances": [],
    "reached": None,
}
"""Fields of a record that a comparison fills."""


LEFT = ("epoch", "samples", "batches")
"""Fields of `samples_left`: samples of an epoch for which no loop asked; `batches` under recipes that do not wait."""
LISTS = (
    "processes",
    "evaluations",
    "bytes_sent",
    "bytes_received",
    "time_breakdown",
    "samples_by_worker",
    "sample_counts",
    "samples_left",
    "failures",
)


def unstarted(
    *, recipe: str, workers: int, global_batch_of: int, seed: int, script: str, folder: Path, failed: str
) -> Record:
    """Return the record of a run that left no log."""
    configuration = {
        "recipe": recipe,
        "workers": workers,
        "global_batch_of": global_batch_of,
        "seed": seed,
        "script": script,
        "args": [],
    }
    unknown = (
        "threads",
        "cores",
        "simulated",
        "seconds",
        "samples_per_second",
        "staleness",
        "blocked_seconds",
        "stages",
    )
    nothing = dict.fromkeys(unknown)
    counted = {
        "wall_seconds": 0.0,
        "samples": 0,
        "samples_before": 0,
        "steps": 0,
        "rounds": 0,
        "bytes_counted": True,
        "metrics": {},
    }
    lists: Record = {name: [] for name in LISTS}
    no_traffic = traffic.nothing()
    return {
        **configuration,
        **nothing,
        **counted,
        **lists,
        **no_traffic,
        **BEYOND_ONE_RUN,
        "failed": failed,
        "is_complete": False,
        "folder": str(folder),
    }


def _configuration(history: History) -> Record:
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
    """Return training seconds and samples of all workers at the same moment."""
    counts = history.last_counts()
    counted = sum(int(event.get("samples") or 0) for event in counts)
    if history.trained is not None:
        counted = history.trained_before + sum(history.trained)
        if not any(history.after_last_epoch):
            return number(history.epochs[-1].get("training_s")), counted
    elif history.epochs and history.ended:
        last = history.epochs[-1]
        beyond = 0 if history.has_returned else counted  # repeated samples count once
        return number(last.get("training_s")), max(beyond, int(last.get("samples") or 0))
    else:
        counted += history.trained_before
        latest = max(history.counted, key=lambda event: int(event.get("samples") or 0), default={})
        if int(latest.get("samples") or 0) > counted:
            return number(latest.get("training_s")), int(latest["samples"])
    trained = [event["t"] - split_of(event)["evaluating"] for event in counts if event]
    return (max(trained), counted) if trained else (None, counted)


def _wall(history: History) -> float:
    return max((event["t"] for events in history.events.values() for event in events), default=0.0)


def _metrics(history: History) -> Record:
    last: Record = {}
    for event in history.of("evaluation"):
        last |= {name: number(value) for name, value in (event.get("metrics") or {}).items()}
    return last


def _evaluations(history: History) -> list[Record]:
    """Return the evaluations by rising samples, and of each metric after equal samples the last: a rollback repeats it.

    A library evaluates several data sets one after the other.
    """
    by_samples: dict[int, Record] = {}
    for event in history.of("evaluation"):
        found = by_samples.setdefault(int(event.get("samples") or 0), {"metrics": {}})
        found["training_s"] = number(event.get("training_s")) or 0.0
        found["metrics"] |= {name: number(value) for name, value in (event.get("metrics") or {}).items()}
    return [{"samples": samples, **found} for samples, found in sorted(by_samples.items())]


def _counted(history: History) -> Record:
    counts = history.last_counts_by_process()
    return {
        "processes": [process_name(*place) for place in history.processes],
        "steps": max(int(event.get("step") or 0) for event in counts),
        "rounds": max(int(event.get("rounds") or 0) for event in counts),
        "bytes_sent": [int(event.get("bytes_sent") or 0) for event in counts],
        "bytes_received": [int(event.get("bytes_received") or 0) for event in counts],
        "bytes_counted": all(event.get("bytes_counted", True) for event in counts),
        "time_breakdown": [split_of(event) for event in counts],
    }


def _asynchronous(history: History) -> Record:
    """Return fields that differ between workers of asynchronous runs."""
    counts = history.last_counts()
    blocked = [number(event.get("blocked_s")) for event in counts]
    return {
        "samples_before": history.trained_before,
        "samples_by_worker": history.trained or [int(event.get("samples") or 0) for event in counts],
        "staleness": staleness.summary(history),
        "blocked_seconds": None if all(s is None for s in blocked) else [s or 0.0 for s in blocked],
    }


class _NotYetError(Exception):
    """The end of a file that is only tried."""


def check_target(target: Path | None, example: str) -> None:
    """Raise LaunchError if `write_json` could not write to `target` after the run; `example` is a valid file name."""
    if target is None or str(target) == STANDARD_OUTPUT:
        return
    if target.is_dir():
        problem = f"{target} is a folder"
    elif not target.parent.is_dir():
        problem = f"there is no folder {target.parent}"
    else:
        try:
            with written_whole(target) as part:
                part.touch()
                raise _NotYetError
        except _NotYetError:
            return
        except OSError as error:
            problem = f"{target} cannot be written: {error.strerror}"
    expected = "a file in a folder that exists and can be written to, or - for the standard output"
    raise LaunchError(explain(problem, got=target, expected=expected, to_type=f"--json {example}"))


def write_json(target: Path, value: object) -> None:
    """Write a value as JSON to a file, whole or not at all, or to the standard output for "-". Raises LogError."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"
    if str(target) == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    try:
        with written_whole(target) as part:
            part.write_text(text)
    except OSError as error:
        raise LogError(f"{target} cannot be written: {error.strerror}") from error
