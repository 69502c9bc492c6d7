"""Loops that other libraries own, such as `transformers.Trainer`: their scripts train under `stretto run` unchanged.

    module of the library          file here          acts when the script has imported the module
    transformers.trainer           hugging_face.py
    lightning (pytorch_lightning)  lightning.py
    accelerate.accelerator         accelerate.py

A file has two functions: `install(module)`, which wraps what the script makes from now on, and `take(trainer)`, which
wraps one object. Both hand the library's loader to `WindowedLoader` (windows.py), which distributes it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from stretto.errors import ScriptError, explain

FILES = {
    "transformers.trainer": "hugging_face",
    "lightning.pytorch.trainer.trainer": "lightning",
    "pytorch_lightning.trainer.trainer": "lightning",
    "accelerate.accelerator": "accelerate",
}
"""By module of another library whose import makes it act: the file of this package."""
Cancel = Callable[[], None]
After = Callable[[str, Callable[[ModuleType], None]], Cancel]


def watch(after_import: After) -> list[Cancel]:
    """Install the file of each library once the script has imported that. Nothing of a library is imported here.

    Return functions that end the watch. A library that is installed stays so, and does nothing outside a run.
    """
    return [
        after_import(name, lambda module, file=file: _file(file).install(module))  # type: ignore[misc]
        for name, file in FILES.items()
    ]


def take(trainer: Any) -> Any:
    """Train with the other workers in the `train()` of this trainer, or the loop of this Accelerator, and return it.

    Under `stretto run` nothing has to be called. A host that starts workers without it calls this after the trainer is
    made. In a single process it changes nothing.

    Raises ScriptError for an object of a class that no file here knows, and under torchrun, where the library divides
    the work itself.
    """
    for one in type(trainer).__mro__:
        if one.__module__ in FILES:
            return _file(FILES[one.__module__]).take(trainer)
    raise ScriptError(
        explain(
            "stretto.take does not know this trainer",
            got=f"{type(trainer).__module__}.{type(trainer).__qualname__}",
            expected="a transformers.Trainer, a Trainer of Lightning or an Accelerator, or one of a derived class",
            to_type="loader = stretto.distribute(model, optimizer, loader) in a loop of your own",
        )
    )


def _file(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")
