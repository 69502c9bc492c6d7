"""A user's script in the simulation: compiled once, and run by each worker in a `__main__` module of its own."""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TextIO

from stretto.api import close
from stretto.errors import LaunchError, explain
from stretto.launcher.entry import module_file
from stretto.launcher.worker_main import end_forked
from stretto.runtime.runtime import StopTraining
from stretto.simulator.engine import Worker
from stretto.simulator.isolation.process_state import OWN_MODULES, ProcessState, sow


class _RawOutput(io.RawIOBase):
    """Raw stream that forwards the output of a worker immediately. `number` returns its file number."""

    name = "<output of a simulated worker>"

    def __init__(self, forward: Callable[[bytes], object], file_number: Callable[[], int]) -> None:
        super().__init__()
        self._forward, self.fileno = forward, file_number  # type: ignore[method-assign]

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Forward the data."""
        self._forward(bytes(data))
        return len(data)


class ForwardedOutput(io.TextIOWrapper):
    """Text stream that forwards the output of a worker immediately, and need not be a file."""

    def __init__(self, forward: Callable[[bytes], object], file_number: Callable[[], int] = lambda: 1) -> None:
        super().__init__(
            _RawOutput(forward, file_number), encoding="utf-8", errors="backslashreplace", write_through=True
        )


class DiscardedOutput(ForwardedOutput):
    """Text stream that discards the output of workers."""

    def __init__(self) -> None:
        super().__init__(len, _devnull)


@functools.cache
def _devnull() -> int:
    return os.open(os.devnull, os.O_WRONLY)


class Program:
    """A script and its arguments; or a module, whose name `path` is."""

    def __init__(self, path: Path, arguments: Sequence[str], seed: int, module: bool = False) -> None:
        self._name: str | None = None
        if module:
            self._name, path = module_file(str(path))
        self.path = path.absolute()
        self._arguments, self._seed = [str(path), *arguments], seed
        self._code = _compiled(path, self.path)
        self.mains: dict[int, ModuleType] = {}
        """The `__main__` module of each worker."""

    def make_state(self, worker: Worker, out: TextIO, err: TextIO) -> ProcessState:
        """Return a worker's initial state: `__main__`, arguments, and random states that depend on the seed only."""
        main = ModuleType("__main__")
        vars(main)["__file__"] = str(self.path)
        vars(main)["__builtins__"] = __builtins__
        if self._name is not None:
            spec = spec_from_file_location(self._name, self.path)
            assert spec is not None
            vars(main).update(__spec__=spec, __package__=spec.parent, __loader__=spec.loader, __cached__=spec.cached)
        self.mains[worker.number] = main
        sow(self._seed)
        return ProcessState(main, list(self._arguments), out, err)

    def run(self, worker: Worker) -> None:
        """Run the script, then close the run. A process that the script has forked ends before that."""
        own_pid = os.getpid()
        try:
            self._import_package()
            exec(self._code, vars(self.mains[worker.number]))  # noqa: S102 (the file that the user asked to run)
        except BaseException as error:
            if os.getpid() != own_pid:
                end_forked(error, exit_functions=False)
            if not isinstance(error, StopTraining) and not (isinstance(error, SystemExit) and error.code in (None, 0)):
                raise
        if os.getpid() != own_pid:
            end_forked(None, exit_functions=False)
        close()

    def _import_package(self) -> None:
        """Import the package that a module is in, as `python -m` does."""
        package = self._name.rpartition(".")[0] if self._name is not None else ""
        if package:
            import_module(package)


def _compiled(path: Path, absolute: Path) -> CodeType:
    try:
        return compile(path.read_bytes(), str(absolute), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        problem = f"{path} is not valid Python: {error}"
        raise LaunchError(
            explain(problem, got="a syntax error", expected="a script that runs alone", to_type=f"python {path}")
        ) from None


def extend_path(path: Path, module: bool = False) -> None:
    """Extend sys.path as Python does: by a script's directory, or by the working directory for a module.

    The modules in it are each worker's own.
    """
    folder = str(Path.cwd() if module else path.resolve().parent)
    sys.path.insert(0, folder)
    OWN_MODULES.begin(folder)
