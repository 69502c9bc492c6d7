"""Scripts that run a function of a notebook on a cluster, whose own package packs and unpacks the function."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from stretto.errors import LaunchError, explain
from stretto.launcher.engines.clusters import kind_of

PACKED = "function.packed"
SCRIPT = """from pathlib import Path

import {packer} as packer

function, args = packer.loads((Path(__file__).parent / "{packed}").read_bytes())
function(*args)
"""


def script_of(function: Callable[..., object], args: tuple[object, ...], on: str | None, folder: Path) -> Path:
    """Write a script that calls a function into an empty folder, and return it. Raises LaunchError."""
    name = function.__name__ if function.__name__.isidentifier() else "function"
    if on is None:
        problem, expected = "a function runs on a cluster only, whose package sends it", "a script, or a cluster"
        to_type = 'stretto.run("train.py"), or on=stretto.ray()'
        raise LaunchError(explain(problem, got=f"the function {name}", expected=expected, to_type=to_type))
    packer = kind_of(on).packer
    try:
        packed: bytes = importlib.import_module(packer).dumps((function, args))
    except Exception as error:
        problem, got = f"the function {name} cannot be sent to the cluster", f"{type(error).__name__}: {error}"
        expected, to_type = "a function whose values can be pickled", f"def {name}(): ... that opens files within it"
        raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type)) from error
    (folder / PACKED).write_bytes(packed)
    script = folder / f"{name}.py"
    script.write_text(SCRIPT.format(packer=packer, packed=PACKED))
    return script
