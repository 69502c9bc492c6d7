"""Other libraries that train: what of theirs `distribute` takes, and what it refuses with the way to go.

Nothing here imports them: they are known by the names of their classes and modules.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from stretto.errors import LoaderError, ModelError, ScriptError, explain

TRAINERS = {
    "transformers.trainer": "transformers.Trainer",
    "lightning.pytorch.trainer.trainer": "Lightning's Trainer",
    "pytorch_lightning.trainer.trainer": "Lightning's Trainer",
    "lightning.fabric.fabric": "Lightning Fabric",
    "accelerate.accelerator": "Accelerate",
}
"""Modules whose presence says that a script may train with them, and what a person calls them; one that another
imports comes after it."""
LOOPS = ("transformers.trainer", "lightning.pytorch.", "pytorch_lightning.")
"""Modules whose loops iterate over a loader with a way of their own."""
_WRAPPED_LOADERS = {
    "DataLoaderShard": "Accelerate",
    "DataLoaderDispatcher": "Accelerate",
    "PreparedLoader": "Accelerate",
}
_OF_ACCELERATE = ("accelerate.", "stretto.trainers.accelerate")
_OF_FABRIC = ("_FabricModule", "_FabricOptimizer", "_FabricDataLoader")


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that Accelerate has wrapped, whose steps are those of the wrapper; else the optimizer.

    Classes of optimizers around another one often leave out `Optimizer.__init__`: their steps get hooks here.
    Raise ModelError for an object that is no optimizer of torch.
    """
    is_wrapped = _is_of(optimizer, "accelerate.", "AcceleratedOptimizer")
    own = optimizer.optimizer if is_wrapped else optimizer
    if (
        isinstance(own, Optimizer)
        and hasattr(own, "param_groups")
        and not (hasattr(own, "_optimizer_step_pre_hooks") and getattr(type(own).step, "hooked", False))
    ):
        vars(own).setdefault("defaults", {})
        Optimizer.__setstate__(own, {})  # makes what __init__ would have made, as for one that was unpickled
    if not hasattr(own, "_optimizer_step_pre_hooks"):
        missing = "which has no param_groups" if isinstance(own, Optimizer) else "which is no torch.optim.Optimizer"
        raise ModelError(
            explain(
                "the optimizer has no hooks, by which stretto sees its steps",
                got=f"{type(own).__name__}, {missing}",
                expected="an optimizer with param_groups, whose class is derived from torch.optim.Optimizer",
                to_type="class ...(torch.optim.Optimizer), or the optimizer within it as the second argument",
            )
        )
    return own


def refuse_wrapped(models: Sequence[object], optimizers: Sequence[object], loader: object) -> None:
    """Raise an error that names the library if an argument of `distribute` is a wrapper that shares out data itself."""
    given = [*((one, ModelError) for one in (*models, *optimizers)), (loader, LoaderError)]
    for one, error in given:
        names = [name for name in _OF_FABRIC if _is_of(one, "lightning", name)]
        if names:
            problem = "stretto.distribute was given what Lightning Fabric has set up"
            to_type = "stretto.distribute(model, optimizer, loader) instead of fabric.setup and setup_dataloaders"
            expected = "the plain model, optimizer and loader"
            raise error(explain(problem, got=names[0].lstrip("_"), expected=expected, to_type=to_type))
    for name, library in _WRAPPED_LOADERS.items():
        if _is_of(loader, _OF_ACCELERATE, name):
            problem = (
                f"the loader was prepared by {library}, whose loaders share out samples and draw orders themselves"
            )
            expected = "the plain DataLoader"
            to_type = (
                "model, optimizer = accelerator.prepare(model, optimizer); "
                "loader = stretto.distribute(model, optimizer, loader)"
            )
            raise LoaderError(explain(problem, got=f"accelerate's {name}", expected=expected, to_type=to_type))


def refuse_loops(calls: FrameType | None) -> None:
    """Raise ScriptError if another library's loop is about to iterate over the distributed loader.

    Such a loop takes batches ahead of its steps and makes iterators of its own, so batches would count as trained
    that no step has used.
    """
    while calls is not None:
        module = str(calls.f_globals.get("__name__", ""))
        found = next((one for one in LOOPS if module.startswith(one)), None)
        if found is not None:
            library = "transformers.Trainer" if found.startswith("transformers") else "Lightning's Trainer"
            problem = f"{library} iterates over the loader that stretto.distribute returned"
            expected = "a loop of the script's own over it"
            to_type = f"a plain loop, or the plain loader with {library} and `python` instead of `stretto run`"
            raise ScriptError(explain(problem, got=f"a loop in {module}", expected=expected, to_type=to_type))
        calls = calls.f_back


def never_distributed() -> ScriptError:
    """The error of a script that ended without `distribute`; names the library that it may have trained with."""
    problem = "the script ended without calling stretto.distribute"
    library = next((name for module, name in TRAINERS.items() if module in sys.modules), None)
    if library is None:
        line = "loader = stretto.distribute(model, optimizer, loader)"
        return ScriptError(explain(problem, got="no call", expected="one call before the loop", to_type=line))
    got = f"no call, and {library} imported, whose loop stretto does not share out"
    expected = "one call before a plain loop; each worker has trained alone"
    to_type = "python SCRIPT, which trains in one process; or a plain loop with stretto.distribute"
    return ScriptError(explain(problem, got=got, expected=expected, to_type=to_type))


def _is_of(one: object, module: str | tuple[str, ...], name: str) -> bool:
    return any(each.__name__ == name and each.__module__.startswith(module) for each in type(one).__mro__)
