"""The folder of a run, and `run.json` in it: what was asked, of which versions, on which machine."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from stretto.errors import LaunchError, LogError, explain

RUNS = Path("runs")
CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints, in its own."""
SECTION = "section-"
"""The first letters of the names of sections' folders."""
GIB = 1 << 30


def version(package: str = "stretto") -> str:
    """The version of this package, or of an installed one, found without importing it."""
    if package == "stretto":
        return str(vars(sys.modules[package])["__version__"])
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def make_folder(name: str, out: Path | None, now: datetime) -> Path:
    """Make and return `out`, or else a new `runs/DATE-NAME`. Raises LaunchError when `out` is not empty."""
    try:
        return _chosen(out) if out is not None else _dated(RUNS, f"{now:%Y%m%d-%H%M%S}-{name}")
    except OSError as error:
        raise LogError(f"the run folder {error.filename} cannot be made: {error.strerror}") from error


def _chosen(out: Path) -> Path:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        problem = f"the run folder {out} exists" + (" and is not empty" if out.is_dir() else " and is a file")
        expected = "a folder that is new or empty: a run never writes over another"
        raise LaunchError(explain(problem, got=f"--out {out}", expected=expected, to_type=f"--out {_next(out)}"))
    out.mkdir(parents=True, exist_ok=True)
    return out


def _next(out: Path) -> Path:
    """The first of `out-2`, `out-3`, ... that does not exist."""
    number = 2
    while (free := out.parent / f"{out.name or 'run'}-{number}").exists():
        number += 1
    return free


def _dated(base: Path, name: str) -> Path:
    base.mkdir(parents=True, exist_ok=True)
    folder = base / name
    while True:
        try:
            folder.mkdir()
        except FileExistsError:
            folder = _next(base / name)
        else:
            return folder


def section_folder(run: Path, number: int) -> Path:
    """Return the folder of a section: the run's own for the first, one in it for each that follows.

    >>> str(section_folder(Path("run"), 1)), str(section_folder(Path("run"), 2))
    ('run', 'run/section-2')
    """
    return run if number == 1 else run / f"{SECTION}{number}"


def section_folders(run: Path) -> list[Path]:
    """Return the folders of all sections behind the first that a run has, in order."""
    found = [(one.name.removeprefix(SECTION), one) for one in run.glob(f"{SECTION}*") if one.is_dir()]
    return [one for _, one in sorted((int(number), one) for number, one in found if number.isdecimal())]


def write_section(run: Path, folder: Path, about: Mapping[str, Any]) -> None:
    """Make the folder of a section, whose `run.json` is that of the run and says what the section is `about`."""
    try:
        folder.mkdir(exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode({**read_run(run), **about}), indent=2)
        (folder / "run.json").write_bytes(text + b"\n")
    except OSError as error:
        raise LogError(f"the folder {folder} cannot be made: {error.strerror}") from error


def read_run(folder: Path) -> dict[str, Any]:
    """Return what `run.json` holds; nothing if there is none."""
    path = folder / "run.json"
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}


def write_run(folder: Path, asked: Mapping[str, Any], now: datetime) -> None:
    """Write `run.json`. Raises LogError when the disk does not take it."""
    text = msgspec.json.format(msgspec.json.encode(describe(asked, now)), indent=2)
    try:
        (folder / "run.json").write_bytes(text + b"\n")
    except OSError as error:
        raise LogError(f"{folder / 'run.json'} cannot be written: {error.strerror}") from error


def describe(asked: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """What `run.json` holds: what was asked, and with what it runs."""
    return {
        "stretto": version(),
        **asked,
        "started": now.astimezone().isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "torch": version("torch"),
            "numpy": version("numpy"),
        },
        "machine": machine(),
        "command": [_program(Path(sys.argv[0])), *sys.argv[1:]],
    }


def _program(path: Path) -> str:
    """What is typed to start this program."""
    return "stretto" if path == Path(__file__).parent / "cli" / "__main__.py" else path.name


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """The machine in four words."""
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
