"""The program of a run: a Python file, a module (`-m`), or a console script of the environment."""

from __future__ import annotations

import difflib
import os
import pkgutil
import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from stretto.errors import mistyped

SHEBANG_BYTES = 1024
MAIN = "__main__"


def typed(script: Path, module: bool, args: Sequence[str] = ()) -> list[str]:
    """Return the words that are typed for a program, after the options.

    >>> typed(Path("pkg.train"), True, ["--lr", "1"]), typed(Path("-x.py"), False)
    (['-m', 'pkg.train', '--lr', '1'], ['--', '-x.py'])
    """
    ended = ["--"] if str(script).startswith("-") else []
    return [*["-m"] * module, *ended, str(script), *args]


def title(script: Path, module: bool) -> str:
    """Return the program's name, for the name of a run folder."""
    return str(script) if module else script.stem


def located(script: Path) -> Path:
    """Return the file of a script: the path that was typed, or a console script of that name."""
    if script.is_file() or script.parent != Path() or script.name != str(script):
        return script
    console_script = _console_script(script.name)
    return console_script if console_script is not None and _is_python(console_script) else script


def _console_script(name: str) -> Path | None:
    """Return the command of this name in the environment's folder, or else on the PATH."""
    beside = Path(sys.executable).with_name(name)
    path = str(beside) if name and os.access(beside, os.X_OK) and beside.is_file() else shutil.which(name)
    return Path(path) if path is not None else None


def _is_python(file: Path) -> bool:
    """Return True if the first line calls Python; pip writes two lines where the interpreter's path is long."""
    try:
        with file.open("rb") as opened:
            lines = opened.read(SHEBANG_BYTES).split(b"\n")[:2]
    except OSError:
        return False
    calls = lines[:2] if lines[0] == b"#!/bin/sh" else lines[:1]
    return lines[0].startswith(b"#!") and any(b"python" in line for line in calls)


def check(script: Path, module: bool) -> None:
    """Raise LaunchError if there is no such program. Nothing of it is executed."""
    if module:
        module_file(str(script))
    elif not (file := located(script)).is_file():
        _refuse_script(file)


def file_of(script: Path, module: bool) -> Path:
    """Return the Python file that is executed. Raises LaunchError if there is none."""
    return module_file(str(script))[1] if module else located(script)


def _refuse_script(script: Path) -> None:
    problem = f"the script {script} is a folder" if script.is_dir() else f"there is no script {script}"
    command = _console_script(script.name) if script.name == str(script) else None
    if command is not None:
        problem += f", and the command {command} is not written in Python"
    near = _near(script)
    to_type = f"stretto run {near[0]}" if near else "stretto run path/to/train.py, or stretto run -m package.module"
    expected = "a Python file" + (f"; near it are {', '.join(near)}" if near else "")
    raise mistyped(problem, script, expected, to_type)


def _near(script: Path) -> list[str]:
    """Return Python files with a name like a missing script's: beside it, here, or in the examples."""
    folders = dict.fromkeys((script if script.is_dir() else script.parent, Path(), Path("examples")))
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
    names = difflib.get_close_matches(script.stem, [file.stem for file in files], n=3, cutoff=0.5)
    return [str(file) for name in dict.fromkeys(names) for file in files if file.stem == name][:3]


# Modules


def module_file(name: str) -> tuple[str, Path]:
    """Return the name and the file of the module that `python -m` would execute in this folder.

    No package is imported to find it. Raises LaunchError if there is none.
    """
    names = name.split(".")
    if not all(part.isidentifier() for part in names):
        raise _no_module(name, "the name of a module, as package.module", module_name(Path(name)))
    locations = [str(Path.cwd()), *sys.path]
    for depth, part in enumerate(names, 1):
        spec = _spec(part, locations) or (_installed(part) if depth == 1 else None)
        if spec is None:
            raise _unfound(name, names[: depth - 1], part, locations)
        locations = list(spec.submodule_search_locations or ())
    if locations:
        name, spec = f"{name}.{MAIN}", _spec(MAIN, locations)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        typed_name = name.removesuffix(f".{MAIN}")
        problem = f"is a package without {MAIN}.py" if spec is None else "is not written in Python"
        expected, to_type = "a module that `python -m` can start", f"stretto run -m {typed_name}.MODULE"
        raise mistyped(f"{typed_name} {problem}", f"-m {typed_name}", expected, to_type)
    return name, Path(spec.origin).absolute()


def _spec(name: str, locations: Iterable[str]) -> ModuleSpec | None:
    """Return where a module lies, or a package; the folders of a namespace package if it is one."""
    portions: list[str] = []
    for location in locations:
        finder = pkgutil.get_importer(location or os.curdir)
        spec = finder.find_spec(name) if finder is not None else None
        if spec is not None and spec.loader is not None:
            return spec
        portions += (spec.submodule_search_locations or ()) if spec is not None else ()
    if not portions:
        return None
    namespace = ModuleSpec(name, None, is_package=True)
    namespace.submodule_search_locations = portions
    return namespace


def _installed(name: str) -> ModuleSpec | None:
    """Return where a module outside the search path lies, as some packages are that are installed to be edited."""
    specs = (finder.find_spec(name, None) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _unfound(name: str, package: Sequence[str], part: str, locations: Sequence[str]) -> Exception:
    """Return the error of a module that is not there, with modules of similar names."""
    first_locations = locations if package else locations[:1]
    names = [module.name for module in pkgutil.iter_modules(first_locations)] if first_locations else []
    near = [".".join([*package, name]) for name in difflib.get_close_matches(part, names, n=3, cutoff=0.5)]
    expected = "a module that can be imported from this folder" + (f"; near it are {', '.join(near)}" if near else "")
    return _no_module(name, expected, near[0] if near else None)


def _no_module(name: str, expected: str, near: str | None) -> Exception:
    return mistyped(f"there is no module {name}", f"-m {name}", expected, f"stretto run -m {near or 'package.module'}")


def module_name(script: Path) -> str | None:
    """Return the name under which `-m` starts a file below this folder, or None if no name does.

    >>> module_name(Path("pkg/train.py")), module_name(Path("my-code/train.py"))
    ('pkg.train', None)
    """
    path = Path(os.path.relpath(script)).with_suffix("")
    return ".".join(path.parts) if path.parts and all(part.isidentifier() for part in path.parts) else None
