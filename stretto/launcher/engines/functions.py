"""Scripts that run a function of a program or a notebook, packed by cloudpickle or by the cluster's own package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from stretto.errors import LaunchError, explain
from stretto.launcher.engines.clusters import kind_of

PACKED = "function.packed"
SCRIPT = """import sys
from pathlib import Path

import {packer} as packer

sys.path += {paths}
function, args = packer.loads((Path(__file__).parent / "{packed}").read_bytes())
function(*args)
"""


def script_of(function: Callable[..., object], args: tuple[object, ...], on: str | None, folder: Path) -> Path:
    """Write a script that calls a function into an empty folder, and return it. Raises LaunchError.

    On this machine (`on` is None) modules are found where this process finds them.
    """
    name = function.__name__ if function.__name__.isidentifier() else "function"
    packer = kind_of(on).packer if on is not None else "cloudpickle"
    try:
        packed: bytes = importlib.import_module(packer).dumps((function, args))
    except Exception as error:
        problem, got = f"the function {name} cannot be sent to the workers", f"{type(error).__name__}: {error}"
        expected, to_type = "a function whose values can be pickled", f"def {name}(): ... that opens files within it"
        raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type)) from error
    (folder / PACKED).write_bytes(packed)
    script = folder / f"{name}.py"
    script.write_text(SCRIPT.format(packer=packer, packed=PACKED, paths=[] if on is not None else sys.path))
    return script
