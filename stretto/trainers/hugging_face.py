"""transformers.Trainer and its subclasses (TRL's SFT, DPO, Reward and others) under `stretto run`.

Methods are wrapped on the object, at the end of `Trainer.__init__`, so that those which a subclass overrides are
wrapped, too. To the library each worker is the only process, whose number alone is that of the worker: the main worker
writes files, logs and trackers.

    _inner_training_loop   distributes the loader; continues from the run's state, through a folder for
                           `resume_from_checkpoint` that has the counters
    get_batch_samples      one window: weighs the worker by its labels (`num_items_in_batch`) or samples
    training_step          exchanges gradients at the last micro-batch only
    compute_loss           weighs micro-batches, where the library adds their means, as one process does
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
from stretto.trainers.windows import Empty, WindowedLoader, items_in
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
GENERATING = (
    *("GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer", "PPOTrainer", "NashMDTrainer", "XPOTrainer"),
    *("SDPOTrainer", "A2POTrainer", "AsyncGRPOTrainer", "SDFTTrainer", "GOLDTrainer", "IWOPDTrainer"),
    *("DistillationTrainer", "AsyncDistillationTrainer"),
)
MIXING = {"sft", "aot", "aot_pair", "aot_unpaired"}
"""Losses of DPO that are no means over samples: over labels, or over what a batch holds in order."""
Plain = Callable[..., Any]


@functools.cache
def install(module: ModuleType) -> None:
    """Wrap every Trainer that a worker of a run makes from now on."""
    if not __version__.startswith(TRIED):
        say_once(f"transformers {__version__}: tried with 4.46 to 5.24")
    number_processes()
    made, skip = module.Trainer.__init__, module.skip_first_batches

    @functools.wraps(made)
    def init(trainer: Any, *given: Any, **named: Any) -> None:
        if find_context() is None:
            made(trainer, *given, **named)
            return
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

    install(transformers.trainer)
    Hooks(trainer)
    return trainer


class Hooks:
    """The wrapped methods of one Trainer, in which it trains with the other workers."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._batches = trainer, _Batches()
        self._shows_agreed = False
        self._loss = _Loss()
        self._factor = 1.0
        """Factor of the loss of the micro-batch under way."""
        self._factors: Iterator[float] = iter(())
        """Factors of the micro-batches after it."""
        self._items = 0.0
        """Weight of this worker in the window under way."""
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
        self._batches.loader = WindowedLoader(trainer.model, trainer.optimizer, loader, steps, schedule, by_groups=True)
        self._losses, self._loss = _Losses(), _Loss()
        counters = checkpointed(trainer=_Counters(trainer), losses=self._losses, loss=self._loss).trainer
        renumber()
        if getattr(trainer, "calculate_KL", False) and not self._batches.is_alone:
            say_once("KTO: the KL term of a loss is that of the worker's own micro-batch, not the mean of all workers")
        if (term := _mixed_term(trainer)) and not self._batches.is_alone:
            say_once(
                f"{term} is no mean over samples, by which the workers' parts of a step are weighed: the gradient is "
                "not that of one process, as among the processes of torchrun"
            )
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
        if self._batches.loader is not None and state.global_step < state.max_steps and not is_stopped:
            self._batches.loader.refuse_early_end("Trainer", f"{state.global_step} of {state.max_steps} steps")

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
        if not found:
            return window, items
        divides = self._divides(items)
        self._look_at_loss(found[0], items)
        if items is not None and not divides and self._loss.is_sum:
            self._items, factors = float(items) if self._batches.has_own else 0.0, [1.0] * len(found)
        else:
            weights, means = self._weights(found, number)
            weighed = [one for one in zip(found, weights, strict=True) if one[1]] or [(found[-1], 0.0)]
            found, self._items = [one for one, _ in weighed], sum(weights)
            times = number if divides else means
            factors = [times * one / self._items if self._items else 0.0 for _, one in weighed]
        self._factors = iter(factors)
        weight(self._items)
        return [Empty.like(found[0])] * (len(window) - len(found)) + found, items

    def _weights(self, found: list[Any], number: int) -> tuple[list[float], int]:
        """Return what each micro-batch adds to the sum of means of one process, and the number of these means.

        A mean of one process is over a group. Its items at all workers are known where they exchange gradients; in
        local steps each item of this worker weighs the same.
        """
        items = [items_in(one, self._loss.shifts) if self._batches.has_own else 0 for one in found]
        together, total = lockstep_training(), dict[int, float]()
        if number == 1 or together is None or not together.strategy.exchanges_gradients:
            return [float(one) for one in items], number
        own = dict[int, int]()
        for group, one in zip(self._batches.groups, items, strict=True):
            own[group] = own.get(group, 0) + one
        for message in together.transport.all_gather_bytes(json.dumps([*own.items()]).encode()):
            for group, one in json.loads(message):
                total[group] = total.get(group, 0) + one
        each = zip(self._batches.groups, items, strict=True)
        return [one and one / total[group] for group, one in each], sum(map(bool, total.values()))

    def _divides(self, items: Any) -> bool:
        """Return True if the library divides the sum of the losses of the micro-batches by their number."""
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
        self._factor = next(self._factors)
        try:
            loss = self._last_exchanges(plain, model, inputs, items)
        finally:
            self._factor = 1.0
        self._losses.add(self._trainer.state.global_step, self._items, loss)
        return loss

    def _last_exchanges(self, plain: Plain, *given: Any) -> Any:
        with nullcontext() if self._trainer.accelerator.gradient_state.sync_gradients else no_sync():
            return plain(*given)

    def compute_loss(self, plain: Plain, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        """Return the loss of a micro-batch; a mean as large as its part of the window."""
        found = plain(model, inputs, *given, **named)
        if self._factor == 1.0:
            return found
        return (found[0] * self._factor, *found[1:]) if isinstance(found, tuple) else found * self._factor

    def _look_at_loss(self, inputs: Any, items: Any) -> None:
        """Find out in the first step what the loss is, by passes over one micro-batch of each worker.

        A sum over `num_items_in_batch` is smaller for more of them, which models may take and leave unused. Where
        labels are shifted, the first label of a sample is never compared.
        """
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        if self._loss.is_known or not isinstance(labels, torch.Tensor):
            return
        trainer, first = self._trainer, labels.clone()
        first[..., :1] = -100
        was_training = trainer.model.training
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            trainer.model.eval()
            once, twice, later = (
                float(_loss(trainer)(trainer.model, given, num_items_in_batch=items and items * times))
                for given, times in ((inputs, 1), (inputs, 2), (dict(inputs) | {"labels": first}, 1))
                for given in [trainer._prepare_inputs(dict(given))]
            )
            trainer.model.train(was_training)
        is_clear = math.isfinite(once)
        own = [is_clear and math.isclose(once, twice, rel_tol=1e-3), is_clear and once != later]
        together = lockstep_training()
        message = json.dumps(own).encode()
        told = [message] if together is None else together.transport.all_gather_bytes(message)
        is_mean, has_first = (any(one) for one in zip(*map(json.loads, told), strict=True))
        self._loss.found = [not is_mean, not has_first]

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
        current, together = training(), lockstep_training()
        if current is None or named.get("description") == "Prediction":
            with self._agreed():
                return plain(*given, **named)
        found: list[Any] = []
        with self._agreed(), current.evaluator.of_library() as write:

            def evaluated() -> bytes:
                found.append(plain(*given, **named))
                if together is not None or is_main():
                    metrics = _numbers(found[0].metrics)
                    write({name: one for name, one in metrics.items() if not name.endswith("_preparation_time")})
                return json.dumps([found[0].metrics, found[0].num_samples], default=float).encode()

            metrics, samples = json.loads(
                evaluated() if together is None else together.transport.broadcast_bytes(evaluated)
            )
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
        log(**_numbers(logs))


class _Loss:
    """Properties of the loss, found by the workers in their first step; a restarted worker is told."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    @property
    def is_known(self) -> bool:
        """True after the first step."""
        return self.found != []

    @property
    def is_sum(self) -> bool:
        """True if the loss is a sum over `num_items_in_batch`."""
        return not self.found or self.found[0]

    @property
    def shifts(self) -> bool:
        """True if the loss has no place for the first label of a sample."""
        return self.found != [] and self.found[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the properties as plain values."""
        return {"found": list(self.found)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take the properties that another worker knows, or a checkpoint has."""
        self.found = list(saved["found"])


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


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: one for name, one in values.items() if isinstance(one, int | float) and math.isfinite(one)}


def _loss(trainer: Any) -> Plain:
    """Return the function of the losses of this Trainer; of TRL's, which count their calls, that of the library."""
    kind = next(one for one in type(trainer).__mro__ if "compute_loss" in vars(one))
    if kind.__module__.startswith("trl."):
        kind = next(one for one in kind.__mro__ if one.__module__ == "transformers.trainer")
    return functools.partial(vars(kind)["compute_loss"], trainer)


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


def _mixed_term(trainer: Any) -> str:
    """Return the term of a preference loss that is no mean over samples; an empty text without one."""
    kinds = {one.__name__ for one in type(trainer).__mro__}
    if "DPOTrainer" in kinds:
        given = trainer.args.loss_type
        found = sorted(MIXING & ({given} if isinstance(given, str) else {*given}))
        if getattr(trainer.args, "rpo_alpha", None) is not None:
            found.append("rpo_alpha")
        return f"DPO: the loss {found[0]}" if found else ""
    likelihood = sorted({"ORPOTrainer", "CPOTrainer"} & kinds)
    return f"{likelihood[0]}: the likelihood in the loss" if likelihood else ""


def _missing(method: str) -> str:
    return explain(
        "this version of transformers has no method that stretto wraps",
        got=f"transformers {__version__}, whose Trainer has no {method}",
        expected="transformers 4.46 or newer, of the major versions 4 and 5",
        to_type='pip install "transformers>=4.46,<6"; or stretto run --no-trainers, and a loop of your own',
    )
