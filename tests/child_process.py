"""Functions of test modules that run in a process of their own, which changes no other test."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

LIMIT_S = 120.0
MARK = "result of the child process: "


def call(module: str, function: str, *args: Any, limit_s: float = LIMIT_S) -> Any:
    """Return the result of a function of a module, which a child process calls with warnings as errors."""
    command = [sys.executable, "-c", f"import child_process; child_process.answer({module!r}, {function!r})"]
    child = subprocess.run(command, input=json.dumps(args), capture_output=True, text=True, timeout=limit_s)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.rpartition(MARK)[2])


def answer(module: str, function: str) -> None:
    """Call a function with the arguments on the standard input, and print its result."""
    import importlib
    import warnings

    warnings.simplefilter("error")
    found = getattr(importlib.import_module(module), function)(*json.loads(sys.stdin.read()))
    print(MARK + json.dumps(found), flush=True)
