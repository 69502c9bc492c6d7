"""Run directory, and `run.json` in it: options of the run, versions of packages, and the machine."""

from __future__ import annotations

import os
import platform
import re
import stat
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from stretto.errors import LaunchError, LogError, explain
from stretto.masking import masked

RUNS = Path("runs")
CHECKPOINTS = "checkpoints"
"""Name of the checkpoint folder in a run directory."""
SECTION = "section-"
"""Prefix of the names of section folders."""
URI = re.compile(r"[a-z][a-z0-9+.-]+:/")
"""Beginning of a URI, whose second slash a Path has dropped."""
GIB = 1 << 30
PRIVATE = 0o700
"""Mode of a run directory: it has keys, arguments and logs, and no other user may put links into it."""

OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH
"""Modes with which other users may write into a folder."""


def version(package: str = "stretto") -> str:
    """Return the version of this package, or of an installed one without importing it."""
    if package == "stretto":
        return str(vars(sys.modules[package])["__version__"])
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Return the versions of Stretto and of what a script runs on."""
    packages = {name: version(name) for name in ("stretto", "torch", "numpy")}
    return {"python": platform.python_version(), **packages}


def make_folder(name: str, out: Path | None, now: datetime) -> Path:
    """Create and return `out`, or else a new `runs/DATE-NAME`. Raises LaunchError when `out` is not empty."""
    try:
        return _chosen(out) if out is not None else _dated(RUNS, f"{now:%Y%m%d-%H%M%S}-{name}")
    except OSError as error:
        raise LogError(
            explain(
                f"the run folder {error.filename} cannot be created: {error.strerror}",
                got=f"--out {out}" if out is not None else f"the folder {RUNS.absolute()}",
                expected="a new folder, in one that this user may write to",
                to_type="--out FOLDER/run",
            )
        ) from error


def _chosen(out: Path) -> Path:
    if URI.match(str(out)):
        problem, expected = (
            "the folder of a run is on this machine",
            "a path; --copy-to copies the run elsewhere as it proceeds",
        )
        (place,) = masked([str(out).replace(":/", "://", 1)])
        raise LaunchError(explain(problem, got=f"--out {place}", expected=expected, to_type=f"--copy-to {place}"))
    _check_new_or_empty(out)
    out.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    check_owner(out, "--out", modes=stat.S_IWOTH)
    out.chmod(PRIVATE)
    _check_new_or_empty(out)  # until now its group could put links into it
    return out


def _check_new_or_empty(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        problem = f"the run folder {out} exists" + (" and is not empty" if out.is_dir() else " and is a file")
        expected = "a folder that is new or empty: a run never overwrites another"
        raise LaunchError(explain(problem, got=f"--out {out}", expected=expected, to_type=f"--out {_next(out)}"))


def check_owner(folder: Path, option: str, instead: str = "a copy of it", modes: int = OF_OTHERS) -> None:
    """Raise LaunchError if another user owns the folder that an option names, or may write into it."""
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & modes:
        problem, expected = (
            f"the folder {folder} may be written by other users",
            "a folder of your own, without that mode",
        )
        got = f"{option} {folder}, owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}"
        raise LaunchError(explain(problem, got=got, expected=expected, to_type=f"chmod go-w {folder}, or {instead}"))


def _next(out: Path) -> Path:
    """Return the first of `out-2`, `out-3`, ... that does not exist."""
    number = 2
    while (free := out.parent / f"{out.name or 'run'}-{number}").exists():
        number += 1
    return free


def _dated(base: Path, name: str) -> Path:
    base.mkdir(parents=True, exist_ok=True)
    folder = base / name
    while True:
        try:
            folder.mkdir(mode=PRIVATE)
        except FileExistsError:
            folder = _next(base / name)
        else:
            return folder


def section_folder(run: Path, number: int) -> Path:
    """Return the folder of a section: the run directory for the first section, a folder in it for each further one.

    >>> str(section_folder(Path("run"), 1)), str(section_folder(Path("run"), 2))
    ('run', 'run/section-2')
    """
    return run if number == 1 else run / f"{SECTION}{number}"


def section_folders(run: Path) -> list[Path]:
    """Return the folders of all sections of a run after the first, in order."""
    numbered = [(path.name.removeprefix(SECTION), path) for path in run.glob(f"{SECTION}*") if path.is_dir()]
    return [path for _, path in sorted((int(number), path) for number, path in numbered if number.isdecimal())]


def section_number(folder: Path) -> int:
    """Return the number of a section after the first, given its folder."""
    return int(folder.name.removeprefix(SECTION))


def write_section(run: Path, folder: Path, fields: Mapping[str, Any]) -> None:
    """Create the folder of a section and its `run.json`: that of the run, updated by `fields`."""
    try:
        folder.mkdir(exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode({**read_run(run), **fields}), indent=2)
        (folder / "run.json").write_bytes(text + b"\n")
    except OSError as error:
        raise LogError(f"the folder {folder} cannot be created: {error.strerror}") from error


def read_run(folder: Path) -> dict[str, Any]:
    """Return the content of `run.json`, or an empty dict if the file does not exist."""
    path = folder / "run.json"
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}


def write_run(folder: Path, options: Mapping[str, Any], now: datetime) -> None:
    """Write `run.json`. Raises LogError when it cannot be written."""
    text = msgspec.json.format(msgspec.json.encode(describe(options, now)), indent=2)
    try:
        (folder / "run.json").write_bytes(text + b"\n")
    except OSError as error:
        raise LogError(f"{folder / 'run.json'} cannot be written: {error.strerror}") from error


def describe(options: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """Return the content of `run.json`: the options, versions of packages, the machine and the command line.

    Arguments that look like secrets, and passwords in the place of the copy, are masked.
    """
    args: dict[str, Any] = {"args": tuple(masked(options["args"]))} if "args" in options else {}
    if options.get("copy_to"):
        args["copy_to"] = masked([options["copy_to"]])[0]
    return {
        "stretto": version(),
        **options,
        **args,
        "started": now.astimezone().isoformat(timespec="seconds"),
        "versions": {name: number for name, number in versions().items() if name != "stretto"},
        "machine": machine(),
        "command": [_program(Path(sys.argv[0])), *masked(sys.argv[1:])],
    }


def _program(path: Path) -> str:
    """Return the name under which this program is started."""
    return "stretto" if path == Path(__file__).parent / "cli" / "__main__.py" else path.name


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Return the operating system, the processor, the number of cores and the memory in GiB."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": cores(),
        "memory_gib": round(memory / GIB, 1),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
