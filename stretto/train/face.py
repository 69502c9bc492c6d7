"""What a script calls: the one line, and little else."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import Dataset

from stretto import typed
from stretto.errors import LoaderError, ModelError, RecipeError, ScriptError, StaysOutError, StrettoError, explain
from stretto.recipe import Recipe
from stretto.train.evaluation import Evaluate, run
from stretto.train.model import trainable
from stretto.train.seat import Seat, find_seat, given_seat
from stretto.train.trainer import Trainer
from stretto.wire.server import ServerWire

_current: ContextVar[Trainer | Literal["plain"] | None] = ContextVar("current", default=None)


def distribute(
    model: nn.Module,
    optimizer: Optimizer,
    loader: Any,
    *,
    recipe: Recipe | str | None = None,
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
    evaluate_every: int | None = None,
) -> Any:
    """Let the loop that follows train together with other workers, when there are any.

    Returns the loader to iterate: one pass over it is one pass of all workers together over the data, each sample
    once. Neither model nor optimizer is wrapped. Started plainly, the loop computes bit for bit what it would without
    this line; `stretto run`, `torchrun` and the like make it one of N workers.

    Args:
        model: any nn.Module whose parameters the optimizer holds.
        optimizer: any torch optimizer.
        loader: a DataLoader, whose batch is one worker's batch, or any iterable of batches.
        recipe: how to learn together; a recipe given on the command line or in STRETTO_RECIPE wins. allreduce()
            when there is neither.
        evaluate: called by worker 0 with the agreed model; returns a dict of numbers. Its time is not training time.
        evaluate_every: evaluate each so many steps, not at the end of each pass.

    Raises:
        ScriptError: when called twice, or the arguments do not fit together.
        RecipeError: when the recipe is none.

    Example:
        >>> import torch, stretto
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
        >>> loader = torch.utils.data.DataLoader(data, batch_size=4)
        >>> loader = stretto.distribute(model, optimizer, loader)
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     torch.nn.functional.mse_loss(model(x), y).backward()
        ...     _ = optimizer.step()
    """
    _check_arguments(model, optimizer, loader, evaluate, evaluate_every)
    if _current.get() is not None:
        problem = "stretto.distribute was called twice"
        raise ScriptError(
            explain(
                problem,
                got="a second call",
                expected="one model, one optimizer, one call",
                to_type="distribute an nn.ModuleList of all models",
            )
        )
    scripted = _recipe(recipe)
    seat = find_seat()
    if seat is None:
        _current.set("plain")
        return PlainLoader(model, loader, evaluate, evaluate_every)
    try:
        trainer = _trainer(seat, model, optimizer, loader, _chosen(seat, scripted), evaluate, evaluate_every)
    except SystemExit:
        _current.set("plain")  # it came too late: the others need nobody any more
        raise
    _current.set(trainer)
    if seat.around.own_process:
        _leave_when_asked(trainer)
    if seat.recipe and scripted is not None and trainer.recipe != scripted and not seat.alone:
        trainer.journal.notice(f"the recipe asked for, {trainer.recipe}, goes before the script's, {scripted}")
    if given_seat.get() is None:
        _finish_at_exit(trainer)
    return SharedLoader(trainer, loader)


def _trainer(
    seat: Seat, model: nn.Module, optimizer: Optimizer, loader: Any, recipe: Recipe | None, *evaluation: Any
) -> Trainer:
    named = trainable(model, optimizer)
    seat.around.begins(model, loader)  # before the others are waited for
    wire = seat.wire_for(recipe, named[0][1].device if named else torch.device("cpu"))
    try:
        return Trainer(seat, wire, model, optimizer, loader, recipe, *evaluation)
    except BaseException as error:
        if isinstance(wire, ServerWire):
            wire.quit() if isinstance(error, StaysOutError) else wire.close()
        raise


def _leave_when_asked(trainer: Trainer) -> None:
    """SIGTERM, as a spot machine gets it before it is taken away: leave in good order, where others can go on."""
    if not trainer.presence.can_leave or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda _number, _frame: trainer.presence.ask_to_leave())


def log(**values: float | torch.Tensor) -> None:
    """Record numbers of this step, such as the loss, into the run; without a run it does nothing.

    A NaN or an infinity ends the run with an error that names it, the step and the worker.

    >>> log(loss=0.5)
    """
    trainer = _current.get()
    if isinstance(trainer, Trainer):
        trainer.journal.record(trainer.hands_done, trainer.samples, values)


def no_sync() -> AbstractContextManager[None]:
    """Accumulate gradients: the steps of the loop within it exchange nothing.

    Wrap all micro-batches but the last before each optimizer step; without a run it does nothing.

    >>> with no_sync():
    ...     pass
    """
    trainer = _current.get()
    return _accumulating(trainer) if isinstance(trainer, Trainer) else nullcontext()


@contextmanager
def _accumulating(trainer: Trainer) -> Iterator[None]:
    trainer.accumulate(True)
    try:
        yield
    finally:
        trainer.accumulate(False)


def finish() -> None:
    """End the run in good order: called by the launcher when the script is over, and at exit elsewhere. Idempotent."""
    trainer = _current.get()
    if trainer is None:
        problem = "the script ended without calling stretto.distribute"
        line = "loader = stretto.distribute(model, optimizer, loader)"
        raise ScriptError(explain(problem, got="no call", expected="one call before the loop", to_type=line))
    _current.set(None)
    if isinstance(trainer, Trainer):
        trainer.finish()


def abandon() -> float:
    """The script has failed: bring the log to the disk, leave a server; the seconds since the start of training."""
    trainer = _current.get()
    if not isinstance(trainer, Trainer):
        return 0.0
    with suppress(StrettoError):
        trainer.abandon()
    return trainer.journal.t()


class SharedLoader:
    """The script's loader, shared among workers: iterating it gives this worker's batches of a common pass."""

    def __init__(self, trainer: Trainer, loader: Any) -> None:
        self._trainer, self._loader = trainer, loader

    def __iter__(self) -> Iterator[Any]:
        self._trainer.begin_pass()
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        while (batch := self._trainer.next_batch()) is not None:
            yield batch

    def __len__(self) -> int:
        return self._trainer.dealer.length()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class PlainLoader:
    """The script's loader as it is, alone; only `evaluate` is called after each pass, or each so many batches."""

    def __init__(self, model: nn.Module, loader: Any, evaluate: Evaluate | None, every: int | None) -> None:
        self._model, self._loader, self._evaluate, self._every = model, loader, evaluate, every
        self._passes = self._batches = 0

    def __iter__(self) -> Iterator[Any]:
        if self._evaluate is None:
            return iter(self._loader)
        return self._evaluated()

    def _evaluated(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch
            self._batches += 1
            if self._every is not None and self._batches % self._every == 0:
                self._show(f"step {self._batches}")
        self._passes += 1
        if self._every is None:
            self._show(f"epoch {self._passes}")

    def _show(self, when: str) -> None:
        assert self._evaluate is not None
        metrics, _ = run(self._evaluate, self._model)
        shown = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        print(f"stretto: {when}: {shown}", file=sys.stderr)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _recipe(recipe: Recipe | str | None) -> Recipe | None:
    if recipe is None or isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        return typed.parse(recipe)
    raise RecipeError(
        explain(
            "recipe= is no recipe",
            got=f"{recipe!r:.100}",
            expected="a Recipe, or its text",
            to_type="recipe=stretto.recipes.local_sgd(every=16)",
        )
    )


def _chosen(seat: Seat, scripted: Recipe | None) -> Recipe | None:
    if seat.alone:
        return None
    return typed.parse(seat.recipe) if seat.recipe else scripted or typed.parse("allreduce")


def _check_arguments(model: object, optimizer: object, loader: object, evaluate: object, every: object) -> None:
    if not isinstance(model, nn.Module):
        problem = "stretto.distribute needs the model first"
        raise ModelError(explain(problem, got=type(model).__name__, expected="an nn.Module", to_type=_CALL))
    if not isinstance(optimizer, Optimizer):
        problem = "stretto.distribute needs the optimizer second"
        raise ModelError(explain(problem, got=type(optimizer).__name__, expected="a torch optimizer", to_type=_CALL))
    if isinstance(model, DistributedDataParallel | DataParallel):
        problem, wrapper = "the model is wrapped to be distributed already", type(model).__name__
        raise ModelError(
            explain(problem, got=wrapper, expected="the plain model", to_type="distribute the model itself")
        )
    if isinstance(loader, Dataset) or not isinstance(loader, Iterable):
        problem, expected = "stretto.distribute needs the loader third", "a DataLoader, or an iterable of batches"
        raise LoaderError(
            explain(problem, got=type(loader).__name__, expected=expected, to_type="DataLoader(data, batch_size=32)")
        )
    if evaluate is not None and not callable(evaluate):
        problem = "evaluate= can't be called"
        raise ScriptError(
            explain(problem, got=type(evaluate).__name__, expected="a function of the model", to_type=_CALL)
        )
    if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
        problem = "evaluate_every= is no number of steps"
        raise ScriptError(
            explain(
                problem,
                got=repr(every),
                expected="a whole number of at least 1",
                to_type="evaluate_every=100",
            )
        )


_CALL = "stretto.distribute(model, optimizer, loader, evaluate=accuracy)"


def _finish_at_exit(trainer: Trainer) -> None:
    """Without a launcher of ours nobody calls `finish`: do it at exit, unless the script failed."""
    failed = []
    shown = sys.excepthook

    def note(*what: Any) -> None:
        failed.append(True)
        shown(*what)

    def end() -> None:
        if _current.get() is trainer and not failed:
            finish()

    sys.excepthook = note
    atexit.register(end)
