"""A user's script in the simulation: compiled once, run by every worker with names of its own."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import TextIO

from stretto.errors import LaunchError, explain
from stretto.sim.own import Own, sow
from stretto.sim.world import Worker
from stretto.train import finish
from stretto.train.surroundings import Enough


class Nowhere(io.StringIO):
    """Takes what workers say that nobody listens to."""

    def write(self, text: str) -> int:
        """Forget it."""
        return len(text)


class Program:
    """A script and its arguments."""

    def __init__(self, path: Path, arguments: Sequence[str], seed: int) -> None:
        self.path = path
        self._arguments, self._seed = [str(path), *arguments], seed
        self._code = _compiled(path)
        self.mains: dict[int, ModuleType] = {}
        """The names of each worker's script."""

    def own(self, worker: Worker, out: TextIO, err: TextIO) -> Own:
        """What a worker begins with: `__main__`, the arguments, and random states that depend on the seed alone."""
        main = ModuleType("__main__")
        vars(main)["__file__"] = str(self.path)
        vars(main)["__builtins__"] = __builtins__
        self.mains[worker.number] = main
        sow(self._seed)
        return Own(main, list(self._arguments), out, err)

    def live(self, worker: Worker) -> None:
        """Run the script, then close the run."""
        try:
            exec(self._code, vars(self.mains[worker.number]))  # noqa: S102 (the file that the user asked to run)
        except Enough:
            pass
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        finish()


def _compiled(path: Path) -> CodeType:
    try:
        return compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        problem = f"{path} is no Python: {error}"
        raise LaunchError(
            explain(problem, got="a syntax error", expected="a script that runs alone", to_type=f"python {path}")
        ) from None


def importable(path: Path) -> None:
    """Let scripts import what lies beside them, as Python does."""
    sys.path.insert(0, str(path.resolve().parent))


class Heard(io.StringIO):
    """What a worker says, handed on line by line."""

    def __init__(self, say: Callable[[bytes], None]) -> None:
        super().__init__()
        self._say = say

    def write(self, text: str) -> int:
        """Hand it on."""
        self._say(text.encode())
        return len(text)
