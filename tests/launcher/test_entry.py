"""Programs other than script files: modules, packages and console scripts; in runs, comparisons and simulations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_place import Place

from stretto.cli import main
from stretto.errors import LaunchError
from stretto.launcher import entry
from stretto.launcher.local import run
from stretto.launcher.progress_display import ProgressDisplay
from stretto.run_config import RunConfig

TELLS = """
import json, os, sys
from . import words
from .words import WORD

told = [__name__, __package__, __spec__.name, __file__, sys.argv, sys.path[0], WORD]
print(json.dumps(told))
sys.exit(0)
"""


@pytest.fixture
def package(place: Place) -> Path:
    """A package `pkg` with a module, a `__main__`, and another package without one."""
    (place.folder / "pkg" / "inner").mkdir(parents=True)
    for file in ("pkg/__init__.py", "pkg/inner/__init__.py"):
        (place.folder / file).write_text("import stub\nopen('imported', 'a').write(__name__ + ' ')\n")
    (place.folder / "pkg" / "words.py").write_text("WORD = 'found'")
    for file in ("pkg/train.py", "pkg/__main__.py"):
        place.script(TELLS, file)
    (place.folder / "namespace" / "deep").mkdir(parents=True)
    place.script("print(__name__, __package__)", "namespace/deep/train.py")
    return place.folder / "pkg"


def run_with_python(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=150, check=True)
    return done.stdout


@pytest.mark.parametrize("name", ["pkg.train", "pkg", "namespace.deep.train"])
def test_module_runs_as_under_python(package: Path, name: str) -> None:
    folder = run(RunConfig(Path(name), args=("--lr", "1", "-m"), module=True), ProgressDisplay(quiet=True))
    assert (folder / "worker-0.log").read_text() == run_with_python("-m", name, "--lr", "1", "-m")
    assert folder.name.endswith(f"-{name}")
    asked = json.loads((folder / "run.json").read_text())
    assert (asked["script"], asked["module"]) == (name, True)


def test_module_is_found_without_importing_its_package(package: Path) -> None:
    entry.check(Path("pkg.train"), module=True)
    assert entry.module_file("pkg") == ("pkg.__main__", package / "__main__.py")
    assert not Path("imported").exists()


def test_command_line_runs_modules_and_passes_all_later_words_on(
    package: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.command(["run", "--quiet", "--out", "here", "-m", "pkg.train", "-m", "--seed", "2", "--help"]) == 0
    *_, argv, path, word = json.loads(capfd.readouterr().out)
    assert argv == [str(package / "train.py"), "-m", "--seed", "2", "--help"]
    assert (path, word) == (os.getcwd(), "found")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pkg.trian", ("there is no module pkg.trian", "near it are pkg.train", "try: stretto run -m pkg.train")),
        ("pgk.train", ("there is no module pgk.train", "near it are pkg", "try: stretto run -m pkg")),
        ("pkg.inner", ("pkg.inner is a package without __main__.py",)),
        ("pkg.train.more", ("there is no module pkg.train.more",)),
        ("pkg/train.py", ("there is no module pkg/train.py", "try: stretto run -m pkg.train")),
        ("sys", ("sys is not written in Python",)),
    ],
)
def test_module_that_cannot_be_run_is_refused_before_any_process_starts(
    package: Path, name: str, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.command(["run", "-m", name]) == 1
    said = capsys.readouterr().err
    assert [word for word in words if word not in said] == []
    assert not Path("runs").exists() and not Path("imported").exists()


def test_error_of_relative_imports_names_the_command_to_use(package: Path) -> None:
    (package / "train.py").write_text("from .words import WORD")
    with pytest.raises(LaunchError, match=r"start it as a module: stretto run -m pkg\.train"):
        run(RunConfig(Path("pkg/train.py")), ProgressDisplay(quiet=True))


def test_console_script_is_found_on_the_path_and_run(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = place.folder / "commands"
    commands.mkdir()
    text = "#!{}\nimport sys\nsys.path.insert(0, {!r})\nimport stub\nprint(sys.argv)\nsys.exit(None)\n"
    place.script("")
    for name, interpreter in (("train", "/usr/bin/env python3"), ("compile", "/bin/sh")):
        (commands / name).write_text(text.format(interpreter, str(place.folder)))
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    folder = run(RunConfig(Path("train"), args=("--lr", "1")), ProgressDisplay(quiet=True))
    assert (folder / "worker-0.log").read_text() == f"['{commands}/train', '--lr', '1']\n"
    with pytest.raises(LaunchError, match=f"the command {commands}/compile is not written in Python"):
        run(RunConfig(Path("compile")), ProgressDisplay(quiet=True))
    place.script("print('mine')", "train")
    folder = run(RunConfig(Path("train")), ProgressDisplay(quiet=True))
    assert (folder / "worker-0.log").read_text() == "mine\n"


def test_long_interpreter_lines_of_console_scripts_are_read(tmp_path: Path) -> None:
    file = tmp_path / "long"
    file.write_text("#!/bin/sh\n'''exec' \"/a/long path/python\" \"$0\" \"$@\"\n' '''\nprint(1)\n")
    assert entry._is_python(file)
