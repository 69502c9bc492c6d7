"""transformers.Trainer and its subclasses (TRL's SFT, DPO, Reward and others) under `stretto run`.

Methods are wrapped on the object, at the end of `Trainer.__init__`, so that those which a subclass overrides are
wrapped, too. To the library each worker is the only process, whose number alone is that of the worker: the main worker
writes files, logs and trackers.

    _inner_training_loop   distributes the loader; continues from the run's state, through a folder for
                           `resume_from_checkpoint` that has the counters
    get_batch_samples      one window: weighs the worker by its labels (`num_items_in_batch`) or samples
    training_step          exchanges gradients at the last micro-batch only
    compute_loss           weighs micro-batches of unequal sizes, where the library takes the mean of their means
    evaluation_loop        the main worker evaluates the agreed model; all have its metrics, and decide alike
    _save_checkpoint       the main worker writes first
    log                    mean losses of all workers; numbers for the page of the run
"""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import __version__
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from stretto.api import agreed, finish, log, no_sync, training, weight
from stretto.errors import ScriptError, explain
from stretto.identity import is_main, main_first, rank
from stretto.notices import say_once
from stretto.process_config import VARIABLE
from stretto.trainers.accelerate import acts_for_main, be_only_process, number_processes, renumber
from stretto.trainers.together import lockstep_training
from stretto.trainers.windows import Empty, WindowedLoader, early_end, items_in
from stretto.training.checkpointed import checkpointed
from stretto.training.schedule import Mode
from stretto.training.trainer import Trainer as Training
from stretto.training.worker_context import current_context, find_context

TRIED = ("4.", "5.")
"""Beginnings of the versions of transformers that were tried."""
STATE = "trainer_state.json"
METHODS = (
    *("_inner_training_loop", "get_train_dataloader", "get_batch_samples", "training_step", "compute_loss"),
    *("evaluation_loop", "_maybe_log_save_evaluate", "_save_checkpoint", "_save_rng_state", "_load_rng_state", "log"),
    "hyperparameter_search",
)
GENERATING = ("GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer", "PPOTrainer", "NashMDTrainer", "XPOTrainer")
Plain = Callable[..., Any]


def install(module: ModuleType) -> None:
    """Wrap every Trainer that is made from now on. Does nothing in a process that the script has started."""
    if not __version__.startswith(TRIED):
        say_once(f"transformers {__version__}: tried with 4.46 to 5.24")
    number_processes()
    made, skip = module.Trainer.__init__, module.skip_first_batches

    @functools.wraps(made)
    def init(trainer: Any, *given: Any, **named: Any) -> None:
        be_only_process()
        made(trainer, *given, **named)
        Hooks(trainer)

    def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
        return loader.begun_at(num_batches) if isinstance(loader, _Batches) else skip(loader, num_batches)

    module.Trainer.__init__, module.skip_first_batches = init, skip_first_batches  # type: ignore[attr-defined]


def take(trainer: Any) -> Any:
    """Wrap one Trainer, unless it is; return it."""
    context = find_context()
    if context is None or "_stretto" in vars(trainer):
        return trainer
    if current_context.get() is None and VARIABLE not in os.environ:
        raise ScriptError(
            explain(
                "under torchrun, transformers.Trainer divides the training among its processes itself",
                got=f"stretto.take({type(trainer).__name__}) in a process of torchrun",
                expected="a launcher of Stretto's",
                to_type="stretto run -n 4 train.py, without a change of the script",
            )
        )
    import transformers.trainer

    if not hasattr(transformers.trainer.Trainer.__init__, "__wrapped__"):
        install(transformers.trainer)
    Hooks(trainer)
    return trainer


class Hooks:
    """The wrapped methods of one Trainer, in which it trains with the other workers."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._batches = trainer, _Batches()
        self._shows_agreed = False
        self._part: float | None = None
        """Part of the micro-batch under way in the items of its window; None outside a step."""
        self._uses_items: bool | None = None
        """True if the model's loss is a sum over `num_items_in_batch`; None before the first step."""
        self._items = 0.0
        """Labels or samples of this worker in the window under way."""
        self._losses = _Losses()
        if (missing := [name for name in METHODS if not hasattr(trainer, name)]) != []:
            raise ScriptError(_missing(missing[0]))
        for name in METHODS:
            setattr(trainer, name, functools.partial(getattr(self, name.lstrip("_")), getattr(trainer, name)))
        trainer._stretto = self
        trainer.callback_handler.callbacks.insert(0, _end_of_epoch())

    # --- train() ------------------------------------------------------------------------------------------------

    def inner_training_loop(self, plain: Plain, *given: Any, **named: Any) -> Any:
        """Distribute the loader, train, and end the run's section."""
        trainer = self._trainer
        _refuse(trainer)
        loader = trainer.get_train_dataloader()
        trainer.create_optimizer()
        steps = trainer.args.gradient_accumulation_steps
        is_given = trainer.lr_scheduler is not None and not trainer._created_lr_scheduler
        schedule: Mode = "per-sample" if is_given and trainer.args.max_steps < 0 else "per-step"
        self._batches.loader = WindowedLoader(trainer.model, trainer.optimizer, loader, steps, schedule)
        self._losses = _Losses()
        counters = checkpointed(trainer=_Counters(trainer), losses=self._losses).trainer
        renumber()
        with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
            self._batches.is_continued = counters.write(Path(folder) / STATE)
            if self._batches.is_continued:
                named["resume_from_checkpoint"] = folder
            try:
                done = plain(*given, **named)
                self._refuse_early_end()
            finally:
                self._batches.loader = None
        finish()
        mean = self._losses.mean
        return done._replace(training_loss=mean) if mean is not None else done

    def _refuse_early_end(self) -> None:
        """Raise ScriptError if the loader has ended before the announced steps, which the library allows."""
        state, current = self._trainer.state, training()
        is_stopped = self._trainer.control.should_training_stop or current is None or current.is_over
        if state.global_step < state.max_steps and not is_stopped:
            raise early_end("Trainer", f"{state.global_step} of {state.max_steps} steps")

    def hyperparameter_search(self, plain: Plain, *given: Any, **named: Any) -> Any:
        """Refuse a search: its trials belong to processes of their own."""
        raise ScriptError(
            explain(
                "a search for hyperparameters begins trainings that stretto cannot tell apart",
                got="Trainer.hyperparameter_search",
                expected="one training of a run",
                to_type="python train.py for the search, then stretto run with what it has found",
            )
        )

    def get_train_dataloader(self, plain: Plain) -> Any:
        """Return the distributed micro-batches while the loop trains."""
        return self._batches if self._batches.loader is not None else plain()

    # --- one step -----------------------------------------------------------------------------------------------

    def get_batch_samples(self, plain: Plain, batches: Iterator[Any], number: int, *device: Any) -> Any:
        """Return the micro-batches of one optimizer step, and weigh this worker by what its loss is a mean over."""
        if self._batches.is_alone:
            return plain(batches, number, *device)
        renumber()
        window = list(islice(batches, number))
        full = [batch for batch in window if not isinstance(batch, Empty)]
        found, items = plain(iter(full), len(full), *device)
        self._items = sum(map(items_in, found)) if items is None or self._is_mean(items) else float(items)
        if found:
            weight(self._items)
        return window[: len(window) - len(full)] + found, items

    def _is_mean(self, items: Any) -> bool:
        """Return True if the loss of a step is the mean of the losses of its micro-batches, not a sum over items."""
        trainer = self._trainer
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            of_model = trainer.model_accepts_loss_kwargs and items is not None
            is_scaled = of_model or getattr(trainer, "compute_loss_func", None) is not None
        return not is_scaled

    def training_step(self, plain: Plain, model: Any, inputs: Any, items: Any = None) -> Any:
        """Make the passes over a micro-batch; none over an empty one."""
        if self._batches.is_alone:
            return self._last_exchanges(plain, model, inputs, items)
        if isinstance(inputs, Empty):
            return torch.zeros((), device=self._trainer.args.device)
        self._part = items_in(inputs) / self._items if self._items else 0.0
        try:
            loss = self._last_exchanges(plain, model, inputs, items)
        finally:
            self._part = None
        self._losses.add(self._trainer.state.global_step, self._items, loss)
        return loss

    def _last_exchanges(self, plain: Plain, *given: Any) -> Any:
        with nullcontext() if self._trainer.accelerator.gradient_state.sync_gradients else no_sync():
            return plain(*given)

    def compute_loss(self, plain: Plain, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        """Return the loss of a micro-batch; a mean as large as its part of the window."""
        steps, part = self._trainer.args.gradient_accumulation_steps, self._part
        items = named.get("num_items_in_batch")
        is_mean = part is not None and steps > 1 and (self._is_mean(items) or not self._is_sum(model, inputs, items))
        found = plain(model, inputs, *given, **named)
        if part is None or not is_mean:
            return found
        factor = steps * part
        return (found[0] * factor, *found[1:]) if isinstance(found, tuple) else found * factor

    def _is_sum(self, model: Any, inputs: Any, items: Any) -> bool:
        """Return True if more items make the loss smaller: models may take `num_items_in_batch` and leave it unused."""
        trainer = self._trainer
        if getattr(trainer, "compute_loss_func", None) is not None or "labels" not in inputs:
            return True
        if trainer.label_smoother is not None:
            return False
        if self._uses_items is None:
            was_training = model.training
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                model.eval()
                once, twice = (float(model(**inputs, num_items_in_batch=items * k)["loss"]) for k in (1, 2))
                model.train(was_training)
            self._uses_items = not math.isclose(once, twice, rel_tol=1e-3)
        return self._uses_items

    # --- evaluation, files, logs --------------------------------------------------------------------------------

    @contextmanager
    def _agreed(self, is_needed: bool = True) -> Iterator[None]:
        """Put the agreed model in place, once for an evaluation and a checkpoint of one step."""
        if self._shows_agreed or not is_needed:
            yield
            return
        self._shows_agreed = True
        try:
            with agreed():
                yield
        finally:
            self._shows_agreed = False

    def maybe_log_save_evaluate(self, plain: Plain, *given: Any, **named: Any) -> None:
        """Log, evaluate and save with one exchange of the parameters."""
        control = self._trainer.control
        with self._agreed(control.should_evaluate or control.should_save):
            plain(*given, **named)

    def evaluation_loop(self, plain: Plain, *given: Any, **named: Any) -> Any:
        """Evaluate the agreed model at the main worker; the others wait for its metrics. Predictions are each one's."""
        together = lockstep_training()
        if together is None or named.get("description") == "Prediction":
            with self._agreed():
                return plain(*given, **named)
        found: list[Any] = []

        def at_main() -> bytes:
            found.append(plain(*given, **named))
            return json.dumps([found[0].metrics, found[0].num_samples], default=float).encode()

        with self._agreed():
            metrics, samples = json.loads(together.transport.broadcast_bytes(at_main))
        if found:
            return found[0]
        self._trainer.model.eval()
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=samples)

    def save_checkpoint(self, plain: Plain, *given: Any, **named: Any) -> None:
        """Write a checkpoint at the main worker, then what belongs to each other one."""
        with self._agreed(), main_first() if lockstep_training() is not None else nullcontext(is_main()) as acts:
            token = acts_for_main.set(acts)
            try:
                renumber()
                plain(*given, **named)
            finally:
                acts_for_main.reset(token)

    def save_rng_state(self, plain: Plain, folder: str) -> None:
        """Write this worker's random states: those of the main worker where the library looks for them."""
        plain(folder if acts_for_main.get() else _own_folder(folder))

    def load_rng_state(self, plain: Plain, folder: str | None) -> None:
        """Read this worker's random states of a checkpoint."""
        own = folder if folder is None or is_main() else _own_folder(folder)
        if own == folder or Path(str(own)).exists():
            plain(own)
        elif not self._batches.is_continued:
            say_once(f"{folder} has no random states of worker {rank()}: they are new")

    def log(self, plain: Plain, logs: dict[str, Any], *given: Any, **named: Any) -> None:
        """Log the mean losses of all workers, and the numbers of the main worker's evaluation."""
        together = lockstep_training()
        if together is not None and not self._batches.is_alone and ("loss" in logs or "train_loss" in logs):
            means = self._losses.agree(together)
            if "loss" in logs and means:
                logs["loss"] = sum(means) / len(means)
            if "train_loss" in logs and self._losses.mean is not None:
                logs["train_loss"] = self._losses.mean
        plain(logs, *given, **named)
        if together is not None and any(name.startswith("eval_") for name in logs):  # a subclass may have added some
            logs |= json.loads(together.transport.broadcast_bytes(lambda: json.dumps(logs, default=float).encode()))
        log(**{name: value for name, value in logs.items() if isinstance(value, int | float) and math.isfinite(value)})


class _Losses:
    """The losses of this worker since the last log, and the means of all workers before."""

    def __init__(self) -> None:
        self._own: dict[int, tuple[float, Any]] = {}
        """By step: this worker's weight, and its loss."""
        self._sum, self._count = 0.0, 0

    def add(self, step: int, items: float, loss: Any) -> None:
        """Add the loss of a micro-batch; those of a window add up to the mean over its items."""
        self._own[step] = items, self._own.get(step, (items, 0.0))[1] + loss

    @property
    def mean(self) -> float | None:
        """The mean loss of all steps and workers up to the last log."""
        return self._sum / self._count if self._count else None

    def agree(self, together: Training) -> list[float]:
        """Return the mean loss over all workers of each step since the last log."""
        each = [json.loads(one) for one in together.transport.all_gather_bytes(json.dumps(self._plain()).encode())]
        self._own = {}
        means = []
        for step in sorted({step for one in each for step in one}, key=int):
            weighed = [one[step] for one in each if step in one]
            means.append(sum(items * loss for items, loss in weighed) / sum(items for items, _ in weighed))
        self._sum, self._count = self._sum + sum(means), self._count + len(means)
        return means

    def _plain(self) -> dict[str, tuple[float, float]]:
        return {str(step): (items, float(loss)) for step, (items, loss) in self._own.items() if items}

    def state_dict(self) -> dict[str, Any]:
        """Return the losses as plain values."""
        return {"sum": self._sum, "count": self._count, "own": json.dumps(self._plain())}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take the losses of a checkpoint; those since the last log are another worker's where this one has joined."""
        self._sum, self._count = saved["sum"], saved["count"]
        trainer = training()
        if trainer is not None and not trainer.transport.arrives:
            self._own = {int(step): (items, loss) for step, (items, loss) in json.loads(saved["own"]).items()}


class _Batches:
    """The loader that a Trainer iterates: the distributed micro-batches while it trains."""

    loader: WindowedLoader | None = None
    is_continued = False
    """True if the training continues from the state of the run."""

    @property
    def is_alone(self) -> bool:
        """True if this process trains alone."""
        return self.loader is None or self.loader.is_alone

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        assert self.loader is not None
        return iter(self.loader)

    def __len__(self) -> int:
        assert self.loader is not None
        return len(self.loader)

    def begun_at(self, batches: int) -> _Batches:
        """Return this loader, whose next epoch begins after this number of micro-batches."""
        assert self.loader is not None
        self.loader.begin_at(batches, leave_out=not self.is_continued)
        return self


class _Counters:
    """The counters, best metric, log and callbacks of a Trainer, which each checkpoint of the run contains."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._received = trainer, ""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the Trainer, as its own checkpoints have it."""
        trainer = self._trainer
        state, found = trainer.state, dict[str, Any]()
        for one in (*trainer.callback_handler.callbacks, trainer.control):
            if isinstance(one, ExportableState):
                name, several = type(one).__name__, isinstance(state.stateful_callbacks.get(type(one).__name__), list)
                found[name] = [*found.get(name, []), one.state()] if several else one.state()
        return {"state": json.dumps(asdict(state) | {"stateful_callbacks": found}, default=float)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take the state of another worker, or of a checkpoint of the run."""
        self._received = saved["state"]

    def write(self, path: Path) -> bool:
        """Write the state that was received to a file of the library's kind; return False if there is none."""
        if self._received:
            path.write_text(self._received)
        return bool(self._received)


def _end_of_epoch() -> Any:
    class EndOfEpoch(TrainerCallback):  # type: ignore[misc]
        """Ends the epoch of all workers before the library evaluates or saves at its end."""

        def on_epoch_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if (trainer := training()) is not None:
                trainer.epochs.end_epoch()

    return EndOfEpoch()


def _own_folder(folder: str) -> str:
    return os.path.join(folder, f"worker-{rank()}")


def _refuse(trainer: Any) -> None:
    """Raise ScriptError for what cannot be trained in this way, before the first step."""
    args, kinds = trainer.args, [one.__name__ for one in type(trainer).__mro__]
    generating = next((name for name in GENERATING if name in kinds), None)
    optimizer = str(getattr(args.optim, "value", args.optim))
    deepspeed, fsdp = getattr(args, "deepspeed", None), getattr(args, "fsdp", None)
    plain = "python train.py, or the library's own launcher"
    cases: list[tuple[Any, str, str, str]] = [
        (
            deepspeed,
            "this Trainer divides the model itself",
            "DeepSpeed",
            f"no deepspeed=; or {plain}",
        ),
        (fsdp, "this Trainer divides the model itself", "FSDP", f"no fsdp=; or {plain}"),
        (
            getattr(trainer, "is_tp_enabled", False) or getattr(args, "parallelism_config", None),
            "this Trainer divides the model itself",
            "a parallelism config",
            f"no parallelism_config=; or {plain}",
        ),
        (
            args.n_gpu > 1 or trainer.is_model_parallel,
            "this Trainer uses several devices",
            f"{args.n_gpu} GPUs" if args.n_gpu > 1 else "a model over several devices",
            "CUDA_VISIBLE_DEVICES=0 before stretto run, or one GPU for each worker",
        ),
        (
            generating,
            "the batches of this trainer are groups of completions, which stretto would cut",
            str(generating),
            "python train.py; stretto run trains SFT, DPO, Reward and KTO",
        ),
        (
            args.auto_find_batch_size,
            "batch sizes that are found by running out of memory differ by worker",
            "auto_find_batch_size=True",
            "per_device_train_batch_size=8, gradient_accumulation_steps=4",
        ),
        (
            "layerwise" in optimizer or "lomo" in optimizer,
            "this optimizer steps within the backward pass",
            f'optim="{optimizer}"',
            'optim="adamw_torch"',
        ),
    ]
    for is_given, problem, got, to_type in cases:
        if is_given:
            expected = "a Trainer that trains a whole model on one device with batches of a fixed size"
            raise ScriptError(explain(problem, got=got, expected=expected, to_type=to_type))


def _missing(method: str) -> str:
    return explain(
        "this version of transformers has no method that stretto wraps",
        got=f"transformers {__version__}, whose Trainer has no {method}",
        expected="transformers 4.46 or newer, of the major versions 4 and 5",
        to_type='pip install "transformers>=4.46,<6"; or stretto run --no-trainers, and a loop of your own',
    )
