"""Entry point of a worker process: runs the script as `python SCRIPT` would, and reports how it ended.

Started as `python -P -m stretto.launcher.worker_main file SCRIPT ARGS` or `... module NAME ARGS`, with its
configuration in the environment.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import importlib
import io
import os
import re
import resource
import runpy
import shutil
import socket
import sys
import sysconfig
import time
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import NoReturn

import msgspec

from stretto import trainers
from stretto.data.shares import smaller_share
from stretto.errors import (
    BrokenTransportError,
    LogError,
    MemberOutError,
    StaysOutError,
    StrettoError,
    TransportError,
    UnreachableError,
)
from stretto.events import Event, LineStore, LogFile, of_process, process_name
from stretto.launcher.entry import module_file, module_name
from stretto.launcher.private_files import PrivateFiles, hidden
from stretto.launcher.replaced_files import ReplacedFiles, began_again_at
from stretto.launcher.script_watch import Written, notice_steps_alone, own_folders
from stretto.launcher.seeding import after_import, seed_libraries
from stretto.membership.worker_status import ReportedError, status
from stretto.notices import say
from stretto.process_config import ConfigT, WorkerConfig, with_keys, worker_config

FILE, MODULE = "file", "module"
EVICTED = 75
"""Exit code of a worker that is no longer a member and asks to be restarted."""
UNREACHABLE = 76
"""Exit code of a worker that could not connect with others: it is not restarted, and the others continue."""
STAYS_OUT, WAITS_OUT = 77, 78
"""Exit codes of a worker that can't continue any work of the run, and of a worker that may in a later epoch."""
OUT_OF_MEMORY = 79
"""Exit code of a worker that has run out of memory, and asks to be restarted with a smaller share."""
PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
TORCH = os.path.join(sysconfig.get_path("purelib"), "torch") + os.sep
STARTERS = (__file__, str(Path(__file__).with_name("shard_main.py")), PACKAGE + "simulator", "<frozen runpy>")


def main() -> None:
    """Run the script, then close the run.

    An error goes to the launcher and the event log, and the process exits immediately.
    """
    kind, script, *args = sys.argv[1:]
    config = worker_config()
    assert config is not None
    config = begin(config)
    seed_libraries(config.options.seed)
    after_import("torch", _record_creation)
    if config.options.trainers:
        trainers.watch(after_import)
    if config.options.private_files is not None:
        files = PrivateFiles(config.options.private_files, os.getcwd(), config.worker)
        files.begin()
        script, args = script if kind == MODULE else str(files.place(Path(script))), files.arguments(args)
    if (since := began_again_at(config, time.time())) is not None:
        ReplacedFiles(own_folders(config.run), since, functools.partial(_note_replaced, config)).begin()
    written = _watch(config)
    sys.argv = [script, *args]
    own_pid = os.getpid()
    try:
        STARTS[kind](script)
        if os.getpid() != own_pid:
            end_forked(None)
        _finish()
        _report_written(written, config)
        status.finish()
    except BaseException as error:
        if os.getpid() != own_pid:
            end_forked(error)
        _report_written(written, config)
        fail(
            error, config.worker, log_of(config), config.rank, config.coordinator is not None and config.world_size > 1
        )


def _record_creation(_torch: ModuleType) -> None:
    """Record the script's learning-rate schedulers and gradient scalers in the order of their creation."""
    importlib.import_module("stretto.runtime.creation_order")


def _watch(config: WorkerConfig) -> Written:
    """Notice files that the script writes and steps outside the loader. Only worker 0's lines reach the terminal."""
    private = config.options.private_files
    written = Written([*own_folders(config.run), *([private] if private is not None else [])])
    if config.world_size > 1:
        written.begin()
        if config.worker == 0 and config.rank == 0:
            notice_steps_alone(config.world_size)
    return written


def _note_replaced(config: WorkerConfig, text: str) -> None:
    """Print what became of a file that the script replaces, and write it to the event log where it is on this disk."""
    say(text)
    if not config.sends_events:
        event = {"event": "warning", "t": 0.0, **of_process(config.worker, config.rank), "text": text}
        with contextlib.suppress(LogError):
            _append(log_of(config), event)


def _report_written(written: Written, config: WorkerConfig) -> None:
    """Write the files that the script has written to the event log. A full disk there fails no run."""
    if written.paths:
        about = {"host": socket.gethostname(), "paths": list(written.paths)}
        event = {"event": "written", "t": 0.0, **of_process(config.worker, config.rank), **about}
        with contextlib.suppress(LogError):
            _append(log_of(config), event)


def begin(config: ConfigT) -> ConfigT:
    """Open the record of this process; return the configuration with the keys that stand there.

    Output is flushed at the end of each line, although it is a pipe, and only there, also with `PYTHONUNBUFFERED`: no
    line of another process or of the launcher comes within it.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    _have_terminal_size()
    if config.status_fd is None:
        return config
    keys = status.open(config.status_fd)
    return with_keys(config, keys) if keys else config


def _have_terminal_size() -> None:
    """Let scripts ask for the size of the terminal, though their output is a pipe: COLUMNS x LINES, or 80 x 24.

    `shutil` has an answer of its own where there is none.
    """
    ask = os.get_terminal_size

    def get_terminal_size(fd: int = 1, /) -> os.terminal_size:
        try:
            return ask(fd)
        except OSError:
            if sys._getframe(1).f_globals.get("__name__") == "shutil":
                raise
            found = shutil.get_terminal_size((80, 24))
            return os.terminal_size((max(found.columns, 1), max(found.lines, 1)))

    os.get_terminal_size = get_terminal_size


def _run_file(script: str) -> None:
    """Run a file as `python FILE` does."""
    sys.path.insert(0, str(Path(script).resolve().parent))
    file = str(Path(script).absolute())
    _run(lambda: runpy.run_path(file, run_name="__main__"), file)


def _run_module(name: str) -> None:
    """Run a module as `python -m NAME` does."""
    sys.path.insert(0, os.getcwd())
    _run(lambda: runpy.run_module(name, run_name="__main__", alter_sys=True), str(module_file(name)[1]))


STARTS: dict[str, Callable[[str], None]] = {FILE: _run_file, MODULE: _run_module}


def _run(start: Callable[[], dict[str, object]], script: str) -> None:
    """Run the script. Its globals stay those of `__main__`, for objects that are pickled by name later."""
    try:
        names = start()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        names = _globals_at(end.__traceback__, script)
    main = ModuleType("__main__")
    vars(main).update(names)
    sys.modules["__main__"] = main


def _globals_at(trace: TracebackType | None, script: str) -> dict[str, object]:
    while trace is not None:
        frame: FrameType = trace.tb_frame
        if frame.f_code.co_filename == script:
            return frame.f_globals
        trace = trace.tb_next
    return {}


def _finish() -> None:
    from stretto.api import close

    close()


def end_forked(error: BaseException | None, exit_functions: bool = True) -> NoReturn:
    """End a process that the script has forked as `python` does: the run, its connections and threads are its parent's.

    Objects are not destroyed: those of a connection would wait for threads that a fork does not copy. Without
    `exit_functions` those that its parent has registered with atexit are not called.
    """
    code: object = error.code if isinstance(error, SystemExit) else None
    if error is not None and not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    elif not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    if exit_functions:
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else 0)


def fail(error: BaseException, number: int, log: LineStore, rank: int = 0, may_shrink: bool = False) -> NoReturn:
    """Record the error and exit, without waiting for threads or exit handlers, which may hang.

    `number` is that of the process, or that of its worker. A worker that was evicted is no failure of the run, and
    writes a warning instead; so does a worker that has run out of memory and `may_shrink`, if its share allows it.
    """
    is_evicted, is_unreachable = (
        isinstance(error, kinds) for kinds in (MemberOutError | BrokenTransportError, UnreachableError)
    )
    is_out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's
    returns_smaller = may_shrink and is_out_of_memory and smaller_share(*status.shares) > 0
    try:
        is_consequence = isinstance(error, TransportError) and not is_unreachable
        report = ReportedError(type(error).__name__, _text(error), short(error), is_consequence)
        if not is_evicted:
            status.fail(report)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        event: Event = {"event": "error", **msgspec.structs.asdict(report), "at": round(time.perf_counter(), 6)}
        if is_evicted or returns_smaller:
            event = {"event": "warning", "text": f"{process_name(number, rank)} stops itself: {report.text}"}
        cause = None if is_evicted or is_unreachable or returns_smaller else f"{report.kind}: {report.text}"
        _append(log, {**event, "t": _leave_training(cause), **of_process(number, rank)})
    except BaseException as problem:
        print(f"{failure(error)}\nNot in the event log: {problem}", file=sys.stderr)
        sys.stderr.flush()
    if isinstance(error, StaysOutError):
        os._exit(WAITS_OUT if error.returns else STAYS_OUT)
    if returns_smaller:
        os._exit(OUT_OF_MEMORY)
    os._exit(EVICTED if is_evicted else UNREACHABLE if is_unreachable else 1)


def _leave_training(cause: str | None) -> float:
    """Write the pending events of the training to disk, and its last model; return the time on the events' clock."""
    leave = getattr(sys.modules.get("stretto.api"), "abandon", None)
    return 0.0 if leave is None else float(leave(cause))


def log_in(run: str | None) -> LogFile:
    """Return the event log in a run directory."""
    return LogFile(Path(run or ".") / "events.jsonl")


def log_of(config: WorkerConfig) -> LineStore:
    """Return the event log of the whole run, as this worker reaches it."""
    if not config.sends_events:
        return log_in(config.run)
    from stretto.membership.event_client import remote_log  # imports zmq

    return remote_log(config, 1)


def _append(log: LineStore, event: Event) -> None:
    log.finish(bytearray(msgspec.json.encode(event) + b"\n"))


def _text(error: BaseException) -> str:
    if isinstance(error, SystemExit) and not isinstance(error.code, str):
        return f"the script called sys.exit({error.code!r})"
    advice = (_as_module, _of_missing_file, _of_shared_files, _of_parts, _of_limits, _of_shares, _of_iterators)
    return hidden(f"{error}{''.join(one(error) for one in advice)}")


def _as_module(error: BaseException) -> str:
    """Return how to start a script whose relative imports need a package, where that is the error."""
    if not (isinstance(error, ImportError) and "no known parent package" in str(error)):
        return ""
    name = module_name(Path(sys.argv[0]))
    return f"; start it as a module: stretto run -m {name}" if name is not None else ""


def _of_shares(error: BaseException) -> str:
    """Return how a script gets batches of a fixed size, where a smaller one seems to be the cause of the error."""
    find = getattr(sys.modules.get("stretto.api"), "uneven_share", None)
    text = str(error)
    is_of_shapes = isinstance(error, RuntimeError | ValueError) and re.search("shape|size", text) is not None
    if find is None or not is_of_shapes or "memory" in text or (found := find()) is None:
        return ""
    samples, batch, is_split = found
    whole = "without --batch split" if is_split else "with DataLoader(..., drop_last=True)"
    return (
        f"; a worker's share of this step has {samples} sample{'s' * (samples != 1)}, where the script's batches "
        f"have {batch}: {whole} each worker has whole batches of {batch}; x.size(0) in place of a fixed number fits any"
    )


def _of_iterators(error: BaseException) -> str:
    """Return how a script asks for batches, where an iterator of its loader may have ended before its count."""
    if not isinstance(error, StopIteration) or "stretto.api" not in sys.modules:
        return ""
    return (
        "; an iterator has ended before the loop's count: workers that do not wait for each other get as many batches "
        "of an epoch as they are fast, and len(loader) is their mean; an epoch that was trained before a resume or a "
        "restart has none; `for batch in loader:` ends with the iterator, and so does next(iterator, None)"
    ).removeprefix("" if str(error) else "; ")


def _of_missing_file(error: BaseException) -> str:
    """Return where a joined worker looks for files, if one is missing."""
    config = worker_config()
    if not isinstance(error, FileNotFoundError) or config is None or config.options.launched_from is None:
        return ""
    return (
        f"; the working folder of this worker on {socket.gethostname()} is {os.getcwd()}, that of the run's launcher "
        f"{config.options.launched_from}: files that were not sent with the code have to be here; stretto join "
        "--workdir PATH takes another folder"
    )


def _of_shared_files(error: BaseException) -> str:
    """Return what to type where several workers make one folder, or read a file that another one is writing."""
    config = worker_config()
    if config is None or config.world_size == 1:
        return ""
    if isinstance(error, FileExistsError):
        return (
            "; several workers run the script: `with stretto.main_first():` around what makes it, with exist_ok=True, "
            "or `if stretto.is_main():`"
        )
    frames = traceback.extract_tb(error.__traceback__)
    is_reading = any(frame.name == "load" and frame.filename.endswith("torch/serialization.py") for frame in frames)
    if is_reading and _is_damaged_file(error):
        return (
            "; if several workers write this file it may be torn: write it with stretto.save(obj, path), or make it "
            "within `with stretto.main_first():`"
        )
    return ""


def _of_parts(error: BaseException) -> str:
    """Return what to type where a script computes with the parts of a sharded model's parameters."""
    if "mixed torch.Tensor and DTensor" not in str(error):
        return ""
    return (
        "; under the layout sharded() a process has a part of every parameter, and whole ones only while model(...) "
        "runs their layer: type model(...) in place of another method of it, weight_decay= of the optimizer in place "
        "of a penalty in the loss, a call of the layer in place of its weight, and parameter.full_tensor() at all "
        "processes to read a parameter"
    )


def _of_limits(error: BaseException) -> str:
    """Return what to type where the system gives this process, or its loader processes, no file or no shared memory."""
    text = str(error)
    if getattr(error, "errno", None) == errno.EMFILE or "Too many open files" in text or "of ancdata" in text:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"; a process may open {limit} files: `ulimit -n 65536` before stretto run, or a smaller num_workers="
    is_shared = "shared memory" in text or "/dev/shm" in f"{text} {getattr(error, 'filename', '')}"
    if not is_shared or not any(sign in text for sign in ("No space left", "Bus error", "out of shared memory")):
        return ""
    megabytes = shutil.disk_usage("/dev/shm").total / 1e6
    return (
        f"; loader processes hand over batches in /dev/shm, of {megabytes:,.0f} MB: docker run --shm-size=8g, or a "
        "smaller num_workers= or prefetch_factor="
    )


def _is_damaged_file(error: BaseException) -> bool:
    """Return True for the errors of torch.load at a damaged file."""
    is_unpickling = type(error).__name__ == "UnpicklingError"
    return is_unpickling or isinstance(error, EOFError | RuntimeError | zipfile.BadZipFile)


def failure(error: BaseException) -> str:
    """Return the text of an error: the script's part of the traceback, its class and message."""
    return f"{short(error)}{type(error).__name__}: {_text(error)}"


def short(error: BaseException) -> str:
    """Return the traceback from the first frame of the script, without the last line that repeats the message.

    For an error that Stretto raises on purpose, frames of Stretto and torch are left out. A script that exits with a
    text has no traceback.
    """
    if isinstance(error, SystemExit) and isinstance(error.code, str):
        return ""
    report = traceback.TracebackException.from_exception(error)
    _shorten(report, (*STARTERS, PACKAGE, TORCH) if isinstance(error, StrettoError) else STARTERS)
    lines, message = list(report.format()), list(report.format_exception_only())
    if len(message) == 1 and lines[-1:] == message:
        lines.pop()
    return hidden("".join(lines)) if len(lines) > 1 else ""


def _shorten(report: traceback.TracebackException, without: tuple[str, ...]) -> None:
    """Remove frames whose file has one of these prefixes, and earlier errors that have no other frames."""
    frames = [frame for frame in report.stack if not frame.filename.startswith(without)]
    report.stack = traceback.StackSummary.from_list(frames)
    for name in ("__cause__", "__context__"):
        if (earlier := getattr(report, name)) is not None:
            _shorten(earlier, without)
            if PACKAGE in without and not earlier.stack:
                setattr(report, name, None)


if __name__ == "__main__":
    main()
