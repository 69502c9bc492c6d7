"""Functions of test modules that run in a process of their own, which changes no other test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
LIMIT_S = 120.0
MARK = "result of the child process: "


def call(module: str, function: str, *args: Any, limit_s: float = LIMIT_S) -> Any:
    """Return the result of a function of a module, which a child process calls with warnings as errors."""
    command = [sys.executable, "-c", f"import child_process; child_process.answer({module!r}, {function!r})"]
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    child = subprocess.run(
        command, input=json.dumps(args), capture_output=True, text=True, timeout=limit_s, env=environment
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.rpartition(MARK)[2])


def answer(module: str, function: str) -> None:
    """Call a function with the arguments on the standard input, and print its result."""
    import importlib
    import warnings

    warnings.simplefilter("error")
    found = getattr(importlib.import_module(module), function)(*json.loads(sys.stdin.read()))
    print(MARK + json.dumps(found), flush=True)
