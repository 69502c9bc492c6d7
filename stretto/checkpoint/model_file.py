"""The model files in a run directory: `final.safetensors` of a complete run, `last.safetensors` of one that was not.

Only their headers are read here. That of the last model has the number of complete epochs, the optimizer's steps and
the cause of the end, with room for a cause that is known only later.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from stretto.run_dir import section_folders

FINAL, LAST = "final.safetensors", "last.safetensors"
UNKNOWN = "not known: the run is still training, or its launcher was killed"
"""Cause in the last model of a run whose end is not known."""
CAUSE_BYTES = 2000
"""Room in the header for a cause; longer ones are cut."""
_LENGTH_BYTES, LARGEST_HEADER = 8, 100_000_000


@dataclass(frozen=True)
class ModelFile:
    """A model in a run directory; epochs, steps and cause are those of the last model of an incomplete run."""

    path: Path
    epoch: int | None = None
    step: int | None = None
    cause: str | None = None

    @property
    def is_complete(self) -> bool:
        """True for the final model of a run, or of a section of it."""
        return self.path.name == FINAL

    def __str__(self) -> str:
        if self.is_complete:
            return f"the trained model: {self.path}"
        at = f", after epoch {self.epoch}, step {self.step}" if self.step is not None else ""
        return f"the last model on which the workers agreed{at}: {self.path}"


def in_section(folder: Path) -> ModelFile | None:
    """Return the model in the folder of a section; None without one. A damaged last model has no metadata."""
    if (folder / FINAL).exists():
        return ModelFile(folder / FINAL)
    path = folder / LAST
    if not path.exists():
        return None
    try:
        metadata = json.loads(_header(path)).get("__metadata__", {})
        return ModelFile(path, int(metadata["epoch"]), int(metadata["step"]), metadata["cause"])
    except (OSError, ValueError, KeyError, TypeError):
        return ModelFile(path)


def newest(run: Path) -> ModelFile | None:
    """Return the model of the last section of a run that has one."""
    found = (in_section(folder) for folder in (*reversed(section_folders(run)), run))
    return next((model for model in found if model is not None), None)


def saved_elsewhere(run: Path) -> Path | None:
    """Return the final model that the workers of a run on this machine have saved outside of its folder, or None."""
    began = (run / "run.json").stat().st_mtime
    patterns = [f"{glob.escape(one.name)}-{FINAL.replace('.', '*.')}" for one in (run, *section_folders(run))]
    places = [(folder, pattern) for folder in (Path.cwd(), Path(tempfile.gettempdir())) for pattern in patterns]
    near = [path for folder, pattern in places for path in folder.glob(pattern)]
    found = [path for path in near if path.stat().st_mtime >= began]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def left_in(run: Path, cause: str) -> str:
    """Note the cause of the end of a run in its last model. Return a line that names its newest model; "" without one.

    A disk that does not take the cause changes nothing.
    """
    model = newest(run)
    if model is None:
        return ""
    with contextlib.suppress(OSError, ValueError):
        note_cause(model, cause)
    return f"{model} (stretto export {model.path.parent} model.safetensors)"


def note_cause(model: ModelFile, cause: str) -> None:
    """Write the cause of the end into the header of a last model, in place. Raises OSError and ValueError."""
    if model.is_complete:
        return
    text = _header(model.path)
    head = json.loads(text)
    while True:
        head["__metadata__"]["cause"] = cause
        changed = json.dumps(head, ensure_ascii=False).encode()
        if len(changed) <= len(text):
            break
        cause = cause[: len(cause) // 2]
    with model.path.open("r+b") as file:
        os.pwrite(file.fileno(), changed.ljust(len(text)), _LENGTH_BYTES)


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > LARGEST_HEADER:
            raise ValueError(f"{path} is no safetensors file")
        return file.read(length)
