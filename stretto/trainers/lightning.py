"""Lightning's Trainer under `stretto run`: a strategy of Lightning's, by which each worker is its only process.

    process_dataloader          the training loader in windows of `accumulate_grad_batches` micro-batches; `distribute`
                                is called at the first of them, when the optimizers exist
    backward                    exchanges gradients at the last micro-batch only; weighs micro-batches of unequal sizes
    optimizer_step              makes the passes before the step, which needs exchanged gradients
    on_validation_start         every worker evaluates the agreed model, so that all have its metrics
    lightning_module_state_dict the agreed model, for files that the main worker writes
    reduce, broadcast, ...      over the run's transport: `sync_dist`, early stopping and best models decide alike

The progress of the loops and the states of the callbacks are in each checkpoint of the run, from which a restarted
worker continues.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import PurePath
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from stretto.api import agreed, finish, log, no_sync, training
from stretto.errors import ScriptError, explain
from stretto.identity import broadcast, is_main, main_first, rank
from stretto.notices import say_once
from stretto.trainers.together import gathered, lockstep_training, meet
from stretto.trainers.windows import WindowedLoader, expected_length, sizes_of
from stretto.training.checkpointed import checkpointed
from stretto.training.worker_context import find_context

TRIED = "2."
"""Beginning of the versions of Lightning that were tried."""
CALLBACKS = ("GradientAccumulationScheduler", "BatchSizeFinder", "LearningRateFinder")
"""Callbacks that change the windows, or train within the training."""


@functools.cache
def install(module: ModuleType) -> None:
    """Give every Trainer that is made from now on the strategy of a run."""
    package = module.__name__.removesuffix(".trainer.trainer")
    version = importlib.import_module(package.split(".")[0]).__version__
    if not version.startswith(TRIED):
        say_once(f"lightning {version}: tried with 2.4 to 2.6")
    made = module.Trainer.__init__

    @functools.wraps(made)
    def init(trainer: Any, *given: Any, **named: Any) -> None:
        made(trainer, *given, **named)
        take(trainer)

    module.Trainer.__init__ = init


def take(trainer: Any) -> Any:
    """Give one Trainer the strategy of a run, unless it has it; return it."""
    package = next(one.__module__ for one in type(trainer).__mro__ if one.__module__.endswith(".trainer.trainer"))
    package = package.removesuffix(".trainer.trainer")
    strategy = trainer.strategy
    if find_context() is None or hasattr(strategy, "is_of_run"):
        return trainer
    strategies = importlib.import_module(f"{package}.strategies")
    if type(strategy) is not strategies.SingleDeviceStrategy:
        name, devices = type(strategy).__name__, getattr(trainer, "num_devices", 1)
        raise _refusal(
            "this Trainer divides the training itself",
            got=f"{name} with devices={devices}, num_nodes={getattr(trainer, 'num_nodes', 1)}",
            to_type='Trainer(strategy="auto", devices=1, num_nodes=1); stretto run -n 2 starts the workers',
        )
    base = strategies.SingleDeviceStrategy
    kind: Any = type("StrettoStrategy", (StrettoStrategy, base), {})
    trainer._accelerator_connector.strategy = kind(
        device=strategy.root_device,
        accelerator=strategy.accelerator,
        checkpoint_io=strategy._checkpoint_io,
        precision_plugin=strategy.precision_plugin,
    )
    trainer.callbacks.insert(0, _ends(importlib.import_module(f"{package}.callbacks").Callback)())
    trainer.strategy.renumber()
    return trainer


_Strategy: Any = object
"""Superclass of the methods below, which the library's strategy follows in the order of resolution."""


class StrettoStrategy(_Strategy):  # type: ignore[misc]
    """One worker of a run, before the library's strategy for a single device."""

    strategy_name, is_distributed, is_of_run = "stretto", False, True
    lightning_module: Any
    checkpoint_io: Any
    _batches: _Batches | None = None
    _shown: ExitStack | None = None
    _write: Callable[[Mapping[str, float]], None]

    @property
    def is_global_zero(self) -> bool:
        """True at the main worker, which writes files and logs."""
        return is_main()

    def renumber(self) -> None:
        """Tell the library the number of this worker: 0 at the main worker."""
        from lightning_utilities.core.rank_zero import rank_zero_only

        self.global_rank = self.local_rank = 0 if is_main() else max(rank(), 1)
        rank_zero_only.rank = self.global_rank

    def process_dataloader(self, loader: Any) -> Any:
        """Return the distributed micro-batches of a loader for training; others are each worker's own."""
        trainer = self.lightning_module.trainer
        is_other = trainer.validating or trainer.testing or trainer.predicting or trainer.sanity_checking
        if is_other or trainer.state.fn != "fit":
            return loader
        _refuse(trainer, loader)
        self._batches = _Batches(trainer, loader)
        return self._batches

    def training_step(self, *given: Any, **named: Any) -> Any:
        """Make the forward pass of a micro-batch."""
        found = super().training_step(*given, **named)
        if self._batches is not None:
            self._batches.refuse_weights()
        return found

    def backward(self, closure_loss: Tensor, optimizer: Any, *given: Any, **named: Any) -> Tensor:
        """Make the backward pass, with the exchange in the last micro-batch of a window."""
        trainer = self.lightning_module.trainer
        waits = self.lightning_module.automatic_optimization and trainer.fit_loop._should_accumulate()
        factor = self._batches.factor if self._batches is not None else 1.0
        with no_sync() if waits else nullcontext():
            loss = closure_loss if factor == 1 else closure_loss * factor
            found: Tensor = super().backward(loss, optimizer, *given, **named)
        return found

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **named: Any) -> Any:
        """Make the passes, then the step."""
        done = closure()
        return super().optimizer_step(optimizer, lambda: done, model, **named)

    def _agreed(self) -> AbstractContextManager[None]:
        return nullcontext() if self._shown is not None else agreed()

    def on_validation_start(self) -> None:
        """Put the agreed model in place."""
        self.renumber()
        shown = ExitStack()
        shown.enter_context(self._agreed())
        if (current := training()) is not None:
            self._write = shown.enter_context(current.evaluator.of_library())
        self._shown = shown

    def on_validation_end(self) -> None:
        """Write the numbers of the evaluation to the run, and continue with this worker's own model."""
        if self._shown is not None:
            if training() is not None and self.is_global_zero:
                self._write(_numbers(self.lightning_module.trainer._results.metrics(on_step=False)["callback"]))
            shown, self._shown = self._shown, None
            shown.close()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the agreed model. All workers call it."""
        with self._agreed():
            return {
                name: one.detach().clone() if isinstance(one, Tensor) else one
                for name, one in super().lightning_module_state_dict().items()
            }

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        """Write a file at the main worker, or at the next one if that fails."""
        with main_first() if lockstep_training() is not None else nullcontext(is_main()) as acts:
            if acts:
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or the sum over the workers."""
        if not isinstance(tensor, Tensor):
            return tensor
        each = gathered(tensor, lockstep_training())
        if len(each) == 1:
            return tensor
        name, stacked = str(reduce_op).lower(), torch.stack(each)
        for end, of in (("sum", torch.sum), ("max", torch.amax), ("min", torch.amin)):
            if name.endswith(end):
                return of(stacked, 0)
        total = stacked.sum(0)
        return total / len(each) if total.is_floating_point() else (total / len(each)).to(tensor.dtype)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all workers, stacked; without gradients."""
        each = gathered(tensor, lockstep_training())
        return torch.stack(each) if len(each) > 1 else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return True if all workers, or any, have decided so."""
        told = [bool(one) for one in gathered(torch.tensor(bool(decision), device="cpu"), lockstep_training())]
        return min(told) if all else max(told)

    def barrier(self, *given: Any, **named: Any) -> None:
        """Wait for all workers."""
        meet()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the main worker's object."""
        if training() is not None and lockstep_training() is None:
            return obj
        return broadcast(str(obj) if isinstance(obj, PurePath) else obj)


@functools.cache
def _ends(base: Any) -> Any:
    class Ends(base):  # type: ignore[misc]
        """Ends the epoch and the run's section before other callbacks act on the model of their ends."""

        def on_train_batch_end(self, trainer: Any, module: Any, *given: Any) -> None:
            if trainer._logger_connector.should_update_logs:
                _log(trainer)
            if trainer.fit_loop.epoch_loop._num_ready_batches_reached() and (current := training()) is not None:
                current.epochs.end_epoch()

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            _log(trainer)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            finish()

    return Ends


def _log(trainer: Any) -> None:
    if training() is not None:
        log(**_numbers(trainer.callback_metrics))


def _numbers(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    values = {name: float(value) for name, value in metrics.items() if value.numel() == 1}
    return {name: value for name, value in values.items() if math.isfinite(value)}


class _Batches:
    """The loader of the loop: micro-batches, in windows that are distributed when the first one is asked for."""

    def __init__(self, trainer: Any, loader: DataLoader[Any]) -> None:
        self._trainer, self._loader = trainer, loader
        self.dataset, self.sampler, self.batch_sampler = loader.dataset, loader.sampler, loader.batch_sampler
        self.batch_size, self.num_workers = loader.batch_size, loader.num_workers
        self._accumulation = trainer.accumulate_grad_batches
        self._length = expected_length(loader, self._accumulation)
        self._shared: WindowedLoader | None = None
        self.factor = 1.0
        """Weight of the micro-batch under way in the mean over its window."""

    def __len__(self) -> int:
        return self._length if self._shared is None else len(self._shared)

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the epoch to the sampler."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def refuse_weights(self) -> None:
        """Raise ScriptError if the script has weighed one of several micro-batches of a window."""
        if self._shared is not None and self._shared.is_weighed:
            raise _refusal(
                "stretto.weight in a training_step weighs a whole window, whose other micro-batches are not known yet",
                got=f"stretto.weight with accumulate_grad_batches={self._accumulation}",
                to_type="accumulate_grad_batches=1 with larger batches; or a mean over samples, without stretto.weight",
            )

    def __iter__(self) -> Iterator[Any]:
        if self._shared is None:
            self._begin()
        assert self._shared is not None
        window: list[Any] = []
        for window in self._shared.windows():
            self._trainer.strategy.renumber()
            self._counters.restore()
            for micro, factor in self._shared.weighed(window, sizes_of(window)):
                self.factor = factor
                yield micro
        current = training()
        is_over = current is None or current.is_over
        if not window:  # the others have ended the training
            self._trainer.should_stop = is_over or self._trainer.should_stop
        ready = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if ready < len(self) and not is_over and not self._trainer.should_stop:
            self._shared.refuse_early_end("Trainer", f"{ready} of {len(self)} batches of an epoch")

    def _begin(self) -> None:
        trainer = self._trainer
        combined = trainer.fit_loop._combined_loader
        if len(combined.flattened) > 1:
            raise _refusal(
                "a Trainer with several loaders for training is not supported",
                got=f"a CombinedLoader of {len(combined.flattened)}",
                to_type="one DataLoader, over a data set that returns both samples",
            )
        optimizers = trainer.strategy.optimizers
        for one in optimizers:
            if isinstance(one, torch.optim.LBFGS):
                raise _refusal(
                    "this optimizer makes several passes in each step",
                    got="LBFGS",
                    to_type="torch.optim.AdamW; or a plain loop with stretto.distribute",
                )
        batches, accumulation = trainer.num_training_batches, self._accumulation
        if batches % accumulation and batches < len(self):
            raise _refusal(
                "the limit of batches ends within the micro-batches of one optimizer step",
                got=f"{batches} batches with accumulate_grad_batches={accumulation}",
                to_type=f"limit_train_batches={max(batches // accumulation, 1) * accumulation}",
            )
        only = optimizers[0] if len(optimizers) == 1 else optimizers
        self._shared = WindowedLoader(trainer.strategy.lightning_module, only, self._loader, accumulation)
        if len(self._shared) != self._length:
            raise _refusal(
                "the epochs of this run have another length than those of its first workers",
                got=f"{len(self._shared)} micro-batches in place of {self._length}",
                to_type="--resume with as many workers as before",
            )
        current = training()
        if current is not None and current.strategy.asynchronous and not self._shared.is_alone:
            raise ScriptError(
                explain(
                    "Lightning validates after as many batches of an epoch as it has counted beforehand, and workers "
                    "that do not wait share them by their speeds",
                    got=f"--recipe {current.recipe}",
                    expected="a recipe whose workers wait for each other",
                    to_type='--recipe allreduce, or "local_sgd(every=16)"',
                )
            )
        self._counters = _Counters(trainer)
        checkpointed(lightning=self._counters)


class _Counters:
    """The progress of the loops and the states of the callbacks, which each checkpoint of the run contains."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._received: Mapping[str, Any] | None = None
        self._calls = importlib.import_module(type(trainer.fit_loop).__module__.split(".loops.")[0] + ".trainer.call")

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as the library's checkpoints have it."""
        trainer = self._trainer
        loops = {name: one for name, one in trainer.fit_loop.state_dict().items() if "val_loop" not in name}
        return {"loops": loops, "callbacks": self._calls._call_callbacks_state_dict(trainer)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take the state of another worker, or of a checkpoint of the run, for the next batch."""
        self._received = saved

    def restore(self) -> None:
        """Continue with the state that was received, if any: the loop has just asked for a batch."""
        if self._received is None:
            return
        saved, self._received = self._received, None
        trainer, loop = self._trainer, self._trainer.fit_loop
        loop.load_state_dict(saved["loops"])
        for one in (loop, loop.epoch_loop, *vars(loop.epoch_loop).values()):
            for name in ("_restarting", "_loaded_from_state_dict", "_resuming_from_checkpoint"):
                if name in getattr(one, "__dict__", {}):
                    setattr(one, name, False)
        loop._data_fetcher.fetched = loop.epoch_loop.batch_progress.current.ready
        self._calls._call_callbacks_load_state_dict(trainer, {"callbacks": saved["callbacks"]})


def _refuse(trainer: Any, loader: Any) -> None:
    """Raise ScriptError for what cannot be trained in this way, before the first step."""
    kinds = {kind.__name__ for one in trainer.callbacks for kind in type(one).__mro__}
    changing = next((name for name in CALLBACKS if name in kinds), None)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        got = type(loader.dataset).__name__ if isinstance(loader, DataLoader) else type(loader).__name__
        raise _refusal(
            "the loader for training has no samples that can be divided",
            got=got,
            to_type="a DataLoader over a data set with __getitem__ and __len__",
        )
    if changing is not None:
        raise _refusal(
            "a callback changes the batches of a step, or trains by itself",
            got=changing,
            to_type="a Trainer without it",
        )
    if trainer.reload_dataloaders_every_n_epochs:
        raise _refusal(
            "the loader for training is made again during the training",
            got=f"reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}",
            to_type="reload_dataloaders_every_n_epochs=0",
        )


def _refusal(problem: str, got: str, to_type: str) -> ScriptError:
    expected = 'a Trainer with strategy="auto", one device, and one loader for training'
    return ScriptError(explain(problem, got=got, expected=expected, to_type=to_type))
