"""The functions that a script calls."""

from __future__ import annotations

import atexit
import inspect
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import Dataset

from stretto.checkpoint.model_file import in_section, note_cause
from stretto.errors import LoaderError, ModelError, ScriptError, StrettoError, explain
from stretto.loader.epoch_batches import AssignedEpoch, Assignment
from stretto.notices import say
from stretto.parallel.meta_start import build, build_states, place_meta
from stretto.process_config import VARIABLE
from stretto.recipe.layout import Layout
from stretto.recipe.recipe import Recipe
from stretto.strategies.model_sync import SeveralModels
from stretto.strategies.optimizers import Optimizers, refuse_shared_parameters
from stretto.strategies.parameter_view import refuse_foreign_shards
from stretto.training import other_libraries
from stretto.training import schedule as schedules
from stretto.training.arguments import Arguments
from stretto.training.checkpointed import script_state
from stretto.training.chosen import chosen_layout, chosen_recipe, given_layout, given_recipe, overruled
from stretto.training.epochs import Epochs
from stretto.training.evaluation import Evaluate, run
from stretto.training.iterators import Batches
from stretto.training.loop_exits import place_of
from stretto.training.plain_loop import PlainBatches, PlainLoop
from stretto.training.sections import Sections
from stretto.training.termination import heed_termination
from stretto.training.trainer import Trainer
from stretto.training.worker_context import WorkerContext, current_context, find_context

Found = TypeVar("Found")
_current: ContextVar[Trainer | Literal["plain"] | None] = ContextVar("current", default=None)
_sections: ContextVar[Sections | None] = ContextVar("sections", default=None)
_plain_loop: ContextVar[PlainLoop | None] = ContextVar("plain_loop", default=None)


def distribute(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    loader: Any = None,
    *,
    recipe: Recipe | str | None = None,
    layout: Layout | str | None = None,
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
    evaluate_every: int | None = None,
    schedule: schedules.Mode = "per-sample",
    deal: Assignment | None = None,
) -> Any:
    """Train the loop that follows together with the other workers of the run, if there are any.

    Returns the loader to iterate: one iteration is one epoch of all workers together, with each sample
    once. Neither model nor optimizer is wrapped. Started plainly, the loop computes bit for bit what it would without
    this line; `stretto run`, `torchrun` or another launcher makes it one of N workers.

    A second call ends the run before it, as `finish` does, and begins another with its own evaluations, counts and
    folder, `section-2` in the run folder: folds of a cross-validation, training before fine-tuning, a cell run again.

    Args:
        model: any nn.Module whose parameters the optimizer holds; or a list of several, such as [encoder, head].
        optimizer: any torch optimizer; or a list of several, each with steps (and rounds) of its own.
        loader: a DataLoader, whose batch is one worker's batch, or any iterable of batches; numbers, such as
            range(1000), for a loop that makes its batches itself; or the loader that an earlier call has returned.
        recipe: how the workers synchronise; a recipe on the command line or in STRETTO_RECIPE takes precedence.
            Default: allreduce().
        layout: what one worker is; whole() by default. A single process runs whole. A layout of several processes is
            started with `stretto run --layout`, which takes precedence.
        evaluate: called by worker 0 with the averaged model; returns a dict of numbers. Its time is not training time.
        evaluate_every: number of steps between two evaluations; without it, evaluate at the end of each epoch.
        schedule: "per-sample" advances a learning-rate scheduler that is stepped once a batch by the batches of all
            workers, so that one written for one process reaches its end; "per-step" once a call.
        deal: which batches of an epoch are a worker's. "round-robin", the default, is one in N; "contiguous" is one
            stretch of them in order, for models that carry state from batch to batch; "own" is all of this worker's
            loader, for streams that are a shard of their own.

    Raises:
        ScriptError: when the arguments do not fit together, or not to those of an earlier call.
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
    loader = _DistributedLoader.scripts(loader)
    _check_arguments(model, optimizer, loader, evaluate, evaluate_every)
    other_libraries.refuse_wrapped(_each(model), _each(optimizer), loader)
    whole = model if isinstance(model, nn.Module) else SeveralModels(model)
    optimizers = Optimizers([other_libraries.unwrapped(one) for one in _each(optimizer)])
    schedules.check_mode(schedule)
    _check_assignment(deal)
    scripted, scripted_layout = given_recipe(recipe), given_layout(layout)
    context = find_context()
    _current.set("plain")  # a worker that comes too late has no run
    place_meta(whole, torch.get_default_device())
    if context is None:
        build(whole)
        build_states(optimizers)
        _plain_loop.set(loop := PlainLoop(loader, list(whole.parameters())))
        return PlainLoader(whole, loader, evaluate, evaluate_every, loop)
    _refuse_child()
    refuse_shared_parameters(whole, optimizers)
    refuse_foreign_shards(whole)
    workers, sections = chosen_layout(context, scripted_layout), _sections_of(context)
    chosen = chosen_recipe(context, scripted, workers)
    arguments = Arguments(whole, optimizers, loader, chosen, evaluate, evaluate_every, schedule, deal, workers)
    trainer = sections.begin(arguments)
    if trainer is None:
        return OverLoader(loader, sections.first_workers * context.global_batch_of)
    _current.set(trainer)
    schedules.intercept(_schedules)
    if context.runtime.own_process and trainer.agent.can_leave:
        heed_termination(sections.ask_to_leave)
    for line in overruled(context, (scripted, trainer.recipe), (scripted_layout, workers)):
        trainer.events.notice(line)
    return SharedLoader(trainer, loader)


def _refuse_child() -> None:
    """Refuse a process that the script has started: only the launcher starts workers."""
    if current_context.get() is None and VARIABLE in os.environ and multiprocessing.parent_process() is not None:
        raise ScriptError(
            explain(
                "a process that the script has started cannot train in place of the worker that started it",
                got=f"stretto.distribute in {multiprocessing.current_process().name}",
                expected="the loop in the process that the launcher started; one that is spawned imports the script",
                to_type='if __name__ == "__main__": before the part that trains, and no process around the loop: '
                "stretto run -n 2 starts the workers",
            )
        )


def _sections_of(context: WorkerContext) -> Sections:
    """Return the sections of this process; the first call creates them."""
    sections = _sections.get()
    if sections is None:
        sections = Sections(context)
        _sections.set(sections)
        if current_context.get() is None:
            _finish_at_exit(sections)
    return sections


def _schedules() -> schedules.Schedules | None:
    trainer = training()
    return trainer.schedules if trainer is not None else None


def is_distributed() -> bool:
    """Return True if `distribute` was called and the run has not ended."""
    return _current.get() is not None


def training() -> Trainer | None:
    """Return the trainer of this worker; None before `distribute`, after the end, and in a script that runs alone."""
    trainer = _current.get()
    return trainer if isinstance(trainer, Trainer) else None


def connected() -> Trainer | None:
    """Return the trainer of the last `distribute`, though `finish` has ended it; None if this worker has left."""
    sections = _sections.get()
    return training() or (sections.last if sections is not None and _current.get() is not None else None)


def skipped() -> tuple[int, int] | None:
    """Return the number of a section that this worker skips, and how many exchanges it has begun; None in others."""
    sections = _sections.get()
    return sections.skipped if sections is not None else None


def log(**values: float | torch.Tensor) -> None:
    """Record numbers of this step, such as the loss, into the run; without a run it does nothing.

    A NaN or an infinity ends the run with an error that names it, the step and the worker. While finished epochs are
    passed (`is_resuming`), nothing is recorded, and in a global step that has no batch for this worker, either.

    >>> log(loss=0.5)
    """
    trainer = _current.get()
    if isinstance(trainer, Trainer) and not script_state().is_passing and not trainer.global_steps.is_weightless:
        trainer.events.record(trainer.progress.global_steps, trainer.progress.samples, values)


def steps() -> int:
    """Return the number of global batches of this training before the one that the loop has, or by now between epochs.

    A global batch is one step of all workers, the unit of `len(loader)`. Those before a resume, a restart or an epoch
    left early count. Use it in place of `epoch * len(loader) + i`. Under recipes whose workers wait for each other it
    is the same at all workers; under others it follows the batches that all workers have received. It begins at 0 with
    each `distribute`.

    >>> if steps() % 1000 == 999:
    ...     print("a thousand more")
    """
    return _position(lambda loop: loop.global_batches(of_epoch=False), 0)


def epoch_step() -> int:
    """Return the number of global batches of this epoch before the one that the loop has; after it, those of the epoch.

    Use it in place of `i` in `for i, batch in enumerate(loader)`, which begins at 0 after a resume within an epoch.

    >>> if epoch_step() == 100:
    ...     print("a hundred batches of this epoch are trained")
    """
    return _position(lambda loop: loop.global_batches(of_epoch=True), 0)


def is_last_batch() -> bool:
    """Return True in the last global step of an epoch: accumulated gradients are stepped there.

    A worker that has no batch in that step, since the batches do not divide by the workers, steps with the others.
    Where the length is not known (a stream, or workers that do not wait), the worker's next batch is read or leased to
    find out. Where a worker fails in that step, its batches follow, and the last of these is marked, too.

    >>> is_last_batch()
    False
    """
    return _position(lambda loop: loop.is_last_batch(), False)


def _position(of: Callable[[Epochs | PlainLoop], Found], without: Found) -> Found:
    """Return what the loop over the distributed loader says, of this run or of a plain script."""
    if (trainer := connected()) is not None:
        return of(trainer.epochs)
    plain = _plain_loop.get()
    return of(plain) if plain is not None else without


def is_resuming() -> bool:
    """Return True while the script passes epochs that were trained before, in a resumed run or at a restarted worker.

    Their loops are empty, and the code between them runs again. False from the first epoch with batches on, or from the
    end of the epoch at whose end the checkpoint was written; always False in a single process.

    >>> is_resuming()
    False
    """
    return script_state().is_passing


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
    trainer.global_steps.accumulate(True)
    try:
        yield
    finally:
        trainer.global_steps.accumulate(False)


def weight(number: float | Tensor | None = None, *, sum: bool = False) -> None:
    """Weigh this worker's batch in the next exchange by a number of your own, in place of its samples.

    With the batches of all workers since the last exchange weighed by n_i, gradients, parameters or updates x_i are
    averaged as sum_i n_i x_i / sum_i n_i. So a loss that is the mean over tokens gives the gradient of one process with
    all batches in one: `stretto.weight((labels != -100).sum())`. Call it in each batch before its backward pass, at all
    workers; where gradients are accumulated, once for all the batches of a step, or in each. A batch of weight 0
    contributes nothing to gradients, also where its loss is NaN. It costs one message of 8 bytes for each exchange.

    With `sum=True` the loss is a sum, and gradients are added, not averaged, from now on. Recipes that exchange
    parameters or updates refuse that with ModelError. Recipes that do not wait apply each update without a
    weight. Without a run it does nothing.

    >>> weight(128)
    """
    if (number is None) != sum:
        raise TypeError("stretto.weight takes a number, or sum=True")
    value = None if number is None else float(number)
    if value is not None and not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"stretto.weight({value:g}): expected a finite number that is not negative")
    if isinstance(trainer := _current.get(), Trainer):
        trainer.global_steps.weigh(value, sum)


def agreed() -> AbstractContextManager[None]:
    """Put the agreed model in place within a loop, to evaluate or save it by hand between two steps.

    That is the mean of the workers' parameters, weighted by their samples since the last exchange; where gradients are
    exchanged, the present parameters; where workers do not wait, the server's newest ones. After the block each
    worker continues with its own. All workers that wait for each other enter it, and pay for one exchange of the
    parameters. Between two epochs, without a run and for one worker it changes nothing.

    >>> with agreed():
    ...     pass
    """
    trainer = _current.get()
    return trainer.global_steps.agreed() if isinstance(trainer, Trainer) else nullcontext()


def finish() -> None:
    """End the run of the last `distribute`: write the last evaluation, the sample counts and the final state.

    All workers call it, and continue with the same random numbers. Without a run, and a second time, it does nothing.

    >>> finish()
    """
    if _current.get() is None:
        return
    _current.set("plain")
    if (sections := _sections.get()) is not None:
        sections.end()


def close() -> None:
    """End the last run and disconnect: called by the launcher when the script has ended, elsewhere at exit."""
    if _current.get() is None:
        raise other_libraries.never_distributed()
    _current.set(None)
    if (sections := _sections.get()) is not None:
        sections.close()


def abandon(cause: str | None = None) -> float:
    """Flush the log and leave a server after the script has failed; return the seconds since the start of training.

    With the `cause`, the last model that the workers agreed on is written first.
    """
    if (sections := _sections.get()) is None:
        return 0.0
    with suppress(StrettoError):
        return sections.abandon(cause)
    return 0.0


def uneven_share() -> tuple[int, int, bool] | None:
    """Return the samples of this worker's share of the global step under way and of the script's batches.

    And if batches are split. None outside a step, for a share of this size and where whole batches are assigned.
    """
    trainer = _current.get()
    if not isinstance(trainer, Trainer) or (step := trainer.global_step) is None:
        return None
    batch, current = getattr(trainer.loader, "batch_size", None), trainer.epoch_batches
    is_share = isinstance(current, AssignedEpoch) and current.has_shares and batch is not None and step.own != batch
    return (step.own, int(batch or 0), trainer.batch_source.splits) if is_share else None


class _DistributedLoader:
    """A loader that `distribute` has returned. It has all attributes of the script's loader."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    @staticmethod
    def scripts(loader: Any) -> Any:
        """Return the script's loader of a distributed one; any other loader unchanged."""
        return loader._loader if isinstance(loader, _DistributedLoader) else loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class SharedLoader(_DistributedLoader):
    """The script's loader, shared among workers: iterating it gives this worker's batches of an epoch."""

    def __init__(self, trainer: Trainer, loader: Any) -> None:
        super().__init__(loader)
        self._trainer = trainer

    def __iter__(self) -> Iterator[Any]:
        schedules.intercept(_schedules)  # classes of the script may have been made since
        calls = sys._getframe(1)
        other_libraries.refuse_loops(calls)
        return Batches(self._trainer, place_of(calls))

    def __len__(self) -> int:
        self._trainer.schedules.asked_length()
        return self._trainer.batch_source.length()


class OverLoader(_DistributedLoader):
    """Loader of a section that ended before this worker joined: it has a length, and no batches."""

    def __init__(self, loader: Any, share: int) -> None:
        super().__init__(loader)
        self._share = share

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return -(-len(self._loader) // self._share)


class PlainLoader(_DistributedLoader):
    """Loader of the script, unchanged, for a single worker; calls `evaluate` after each epoch or number of batches."""

    def __init__(
        self, model: nn.Module, loader: Any, evaluate: Evaluate | None, every: int | None, loop: PlainLoop
    ) -> None:
        super().__init__(loader)
        self._model, self._evaluate, self._every, self._loop = model, evaluate, every, loop
        self._epochs = self._batches = 0

    def __iter__(self) -> Iterator[Any]:
        other_libraries.refuse_loops(sys._getframe(1))
        batches = PlainBatches(self._loop, iter(self._loader))
        return batches if self._evaluate is None else self._evaluated(batches)

    def _evaluated(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            self._batches += 1
            if self._every is not None and self._batches % self._every == 0:
                self._show(f"step {self._batches}")
        self._epochs += 1
        if self._every is None:
            self._show(f"epoch {self._epochs}")

    def _show(self, when: str) -> None:
        assert self._evaluate is not None
        metrics, _ = run(self._evaluate, self._model)
        shown = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        say(f"{when}: {shown}")

    def __len__(self) -> int:
        return len(self._loader)


def _check_arguments(model: object, optimizer: object, loader: object, evaluate: object, every: object) -> None:
    models, optimizers = _each(model), _each(optimizer)
    if not models or not all(isinstance(one, nn.Module) for one in models):
        problem, expected = "stretto.distribute needs the model first", "an nn.Module, or a list of several"
        raise ModelError(explain(problem, got=_kinds(model), expected=expected, to_type=_CALL))
    if not optimizers or not all(isinstance(one, Optimizer) for one in optimizers):
        problem, expected = "stretto.distribute needs the optimizer second", "a torch optimizer, or a list of several"
        around = [
            one
            for one in optimizers
            if any(isinstance(held, Optimizer) for held in getattr(one, "__dict__", {}).values())
        ]
        to_type = f"class {type(around[0]).__name__}(torch.optim.Optimizer): ..." if around else _CALL
        got = f"{_kinds(optimizer)}, which holds an optimizer and is none" if around else _kinds(optimizer)
        raise ModelError(explain(problem, got=got, expected=expected, to_type=to_type))
    wrapped = [one for one in models if isinstance(one, DistributedDataParallel | DataParallel)]
    if wrapped:
        problem, wrapper = "the model is wrapped to be distributed already", type(wrapped[0]).__name__
        raise ModelError(
            explain(problem, got=wrapper, expected="the plain model", to_type="distribute the model itself")
        )
    is_columns = isinstance(loader, tuple) and bool(loader) and all(isinstance(one, torch.Tensor) for one in loader)
    if isinstance(loader, Dataset | torch.Tensor) or is_columns or not isinstance(loader, Iterable):
        problem, expected = "stretto.distribute needs the loader third", "a DataLoader, or an iterable of batches"
        got, to_type = type(loader).__name__, "DataLoader(data, batch_size=32)"
        if callable(loader):
            got = f"the function {getattr(loader, '__name__', got)}"
            to_type = _DRAWS
            if inspect.isgeneratorfunction(loader):
                to_type = f'stretto.distribute(model, optimizer, {got.split()[-1]}(), deal="own")'
        elif loader is None:
            got, to_type = "none", f"{to_type}; or {_DRAWS} where the script draws its batches"
        elif isinstance(loader, int):
            to_type = f"stretto.distribute(model, optimizer, range({loader}))"
        elif is_columns or isinstance(loader, torch.Tensor):
            got = f"{_kinds(loader)}, whose rows are samples"
            to_type = "for x, y in stretto.distribute(model, optimizer, [(x, y)]), with --batch split; or "
            to_type += "DataLoader(TensorDataset(x, y), batch_size=32)"
        raise LoaderError(explain(problem, got=got, expected=expected, to_type=to_type))
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


def _each(given: object) -> Sequence[object]:
    return given if isinstance(given, list | tuple) else [given]


def _kinds(given: object) -> str:
    names = ", ".join(type(one).__name__ for one in _each(given))
    return f"[{names}]" if isinstance(given, list | tuple) else names


def _check_assignment(deal: object) -> None:
    if deal is not None and deal not in get_args(Assignment):
        problem, expected = "deal= is no assignment of batches", 'deal="round-robin", "contiguous" or "own"'
        raise ScriptError(
            explain(problem, got=repr(deal), expected=expected, to_type='stretto.distribute(..., deal="contiguous")')
        )


_CALL = "stretto.distribute(model, optimizer, loader, evaluate=accuracy)"
_DRAWS = "for step in stretto.distribute(model, optimizer, range(1000)): x, y = get_batch()"


def _finish_at_exit(sections: Sections) -> None:
    """Close the sections at exit if the script did not fail: only Stretto's launcher calls `close` itself."""
    failed, own_pid = [], os.getpid()
    shown = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed.append(True)
        shown(kind, error, trace)
        cause = f"{kind.__name__}: {error}"
        folder = sections.write_last_model(cause) if _sections.get() is sections else None
        if folder is not None and (found := in_section(folder)) is not None:
            with suppress(OSError, ValueError):
                note_cause(found, cause)
            say(str(found))

    def end() -> None:
        is_forked = os.getpid() != own_pid  # the run is the parent's
        if _sections.get() is sections and _current.get() is not None and not failed and not is_forked:
            close()

    sys.excepthook = note
    atexit.register(end)
