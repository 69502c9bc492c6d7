"""Files from before a resumed or restarted run stay under another name when the script replaces them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.launcher.replaced_files import ReplacedFiles

OLD_S = 100.0
KEPT = ".before-resume"


def old(path: Path, text: str = "old") -> Path:
    """Write a file that is older than this process."""
    path.write_text(text)
    os.utime(path, (time.time() - OLD_S,) * 2)
    return path


def watched(own: Path, since: float | None = None) -> tuple[ReplacedFiles, list[str]]:
    notes: list[str] = []
    return ReplacedFiles([own], time.time() - 1 if since is None else since, notes.append), notes


def opened(files: ReplacedFiles, path: Path, mode: str = "w") -> None:
    """Open a file as the audit hook of this process would see it."""
    flags = {"w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "a": os.O_WRONLY | os.O_APPEND, "r+": os.O_RDWR}[mode]
    files._audit("open", (str(path), mode, flags))
    with path.open(mode) as file:
        file.write("new")


def renamed(files: ReplacedFiles, path: Path) -> None:
    part = path.with_name("part")
    part.write_text("new")
    files._audit("os.rename", (str(part), str(path), -1, -1))
    part.replace(path)


@pytest.mark.parametrize("replace", [opened, renamed])
def test_an_older_file_stays_under_another_name_once(replace: Callable[..., None], tmp_path: Path) -> None:
    path = old(tmp_path / "best.pt")
    path.chmod(0o640)
    files, notes = watched(tmp_path / "run")
    for _ in range(2):
        replace(files, path)
    assert path.read_text() == "new"
    assert (tmp_path / f"best.pt{KEPT}").read_text() == "old"
    assert len(notes) == 1 and "best.pt.before-resume" in notes[0]
    assert replace is renamed or path.stat().st_mode & 0o777 == 0o640
    again = old(path, "second")
    replace(watched(tmp_path / "run")[0], again)  # another resume
    assert (tmp_path / f"best.pt{KEPT}").read_text() == "old"
    assert (tmp_path / f"best.pt{KEPT}-2").read_text() == "second"


def test_files_that_are_not_replaced_or_not_from_before_stay_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    files, notes = watched(tmp_path / "run")
    opened(files, old(tmp_path / "log.txt"), "a")
    opened(files, old(tmp_path / "table.bin"), "r+")
    opened(files, old(tmp_path / "run" / "own.txt"))
    opened(files, tmp_path / "absent.txt")
    (tmp_path / "new.txt").write_text("of this run")
    opened(files, tmp_path / "new.txt")
    files.keep("/dev/null", is_emptied=True)
    files.keep(3, is_emptied=True)
    assert not notes and not list(tmp_path.rglob(f"*{KEPT}*"))


def test_a_link_stays_and_the_file_that_it_names_is_kept(tmp_path: Path) -> None:
    target = old(tmp_path / "target.txt")
    (tmp_path / "link").symlink_to(target)
    files, _ = watched(tmp_path / "run")
    opened(files, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and target.read_text() == "new"
    assert (tmp_path / f"target.txt{KEPT}").read_text() == "old"


def test_a_file_that_cannot_be_linked_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    files, _ = watched(tmp_path / "run")
    opened(files, old(tmp_path / "best.pt"))
    assert (tmp_path / f"best.pt{KEPT}").read_text() == "old"
    assert (tmp_path / "best.pt").read_text() == "new"


def _open_together(path: Path, own: Path, since: float, begin: Any) -> None:
    files = ReplacedFiles([own], since, lambda _: None)
    begin.wait(60.0)
    opened(files, path)


def test_several_processes_keep_one_old_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for number in range(8):
        path, begin = old(tmp_path / f"{number}.txt"), context.Barrier(3)
        arguments = (path, tmp_path / "run", time.time() - 1, begin)
        processes = [context.Process(target=_open_together, args=arguments) for _ in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60.0)
        assert [process.exitcode for process in processes] == [0] * 3
        assert (tmp_path / f"{number}.txt{KEPT}").read_text() == "old"
        assert not (tmp_path / f"{number}.txt{KEPT}-2").exists()


@pytest.mark.plain_processes
def test_calls_that_replace_files_are_seen(tmp_path: Path) -> None:
    paths = [old(tmp_path / name) for name in ("open", "text", "torch.pt", "whole")]
    # in a process of its own, since an audit hook cannot be removed
    script = f"""
import time
from pathlib import Path
from stretto.launcher.replaced_files import ReplacedFiles
ReplacedFiles([], time.time() - 1, print).begin()
import torch
from stretto.whole_files import written_whole
open({str(paths[0])!r}, "w").write("new")
Path({str(paths[1])!r}).write_text("new")
torch.save(1, {str(paths[2])!r})
with written_whole(Path({str(paths[3])!r})) as part:
    part.write_text("new")
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert found.stdout.count("was there before") == 4
    assert all(Path(f"{path}{KEPT}").read_text() == "old" for path in paths)
    assert torch.load(paths[2]) == 1
