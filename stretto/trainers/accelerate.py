"""Accelerate's own loops under `stretto run`: `prepare` with a loader, and a loop of the script's.

To the library there is one process, which is not distributed; its number is that of the worker, and the number of
processes is that of the batches in a global step, by which scripts and prepared schedulers count. Methods are wrapped
on the object, except in Accelerators that a Trainer has made.

    prepare               the first loader beside an optimizer is for training: in windows of micro-batches, which are
                          distributed at the first of them. Others are for evaluation: a part at each worker
    backward              weighs a micro-batch in the mean over its window
    no_sync               (`accumulate`) exchanges gradients at the last micro-batch only
    gather, reduce, ...   over the run's transport
    wait_for_everyone     (`main_process_first`) waits for all workers
    save_state            the agreed model

A loop that is left early ends the epoch of all workers, so that what follows has the agreed model.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import accelerate
import msgspec
import torch
from accelerate import utils
from accelerate.data_loader import prepare_data_loader
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import operations, other
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from stretto.api import agreed, log, no_sync, training, weight
from stretto.errors import ScriptError, explain
from stretto.identity import broadcast, is_main, rank
from stretto.loader.epoch_order import samples_in
from stretto.notices import say_once
from stretto.trainers.together import gathered, lockstep_training, meet
from stretto.trainers.windows import WindowedLoader, expected_length, sizes_of
from stretto.training.checkpointed import checkpointed
from stretto.training.trainer import Trainer as Training
from stretto.training.worker_context import find_context

TRIED = "1."
"""Beginning of the versions of Accelerate that were tried."""
METHODS = (
    *("prepare", "prepare_data_loader", "backward", "no_sync", "skip_first_batches"),
    *("save_state", "load_state", "log"),
)
LIBRARIES = ("transformers", "trl", "lightning", "pytorch_lightning")
"""Packages whose own Accelerators belong to their trainers."""
SHIFTED = ("CausalLM", "LMHead")
"""Parts of names of models whose first label has no loss."""
Plain = Callable[..., Any]
acts_for_main: ContextVar[bool] = ContextVar("acts_for_main", default=False)
"""True while this worker acts for the main worker, which has failed within a block that was its own."""
_processes: ContextVar[int | None] = ContextVar("processes", default=None)
"""Number of processes that the library is told, if the script has an Accelerator of its own."""
_taken: ContextVar[Training | None] = ContextVar("taken", default=None)
"""The training that a prepared loader has begun."""


@functools.cache
def install(module: ModuleType) -> None:
    """Wrap every Accelerator that a script makes from now on, and the library's functions among processes."""
    if not accelerate.__version__.startswith(TRIED):
        say_once(f"accelerate {accelerate.__version__}: tried with 1.0 to 1.15")
    number_processes()
    made, everyone, step = module.Accelerator.__init__, PartialState.wait_for_everyone, AcceleratedScheduler.step

    @functools.wraps(made)
    def init(accelerator: Any, *given: Any, **named: Any) -> None:
        made(accelerator, *given, **named)
        if str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0] not in LIBRARIES:
            take(accelerator)

    def wait_for_everyone(state: Any) -> None:
        everyone(state)
        if _processes.get() is not None and (training() is None or training() is _taken.get()):
            meet()

    def one_step(scheduler: Any, *given: Any, **named: Any) -> None:
        """Step as often as the library does, or once in a loop that the script has distributed itself."""
        if training() is not None and training() is not _taken.get():
            scheduler.split_batches = True
        step(scheduler, *given, **named)

    module.Accelerator.__init__ = init
    PartialState.wait_for_everyone, AcceleratedScheduler.step = wait_for_everyone, one_step
    namespaces: tuple[Any, ...] = (operations, other, utils, module)
    functions: dict[str, Plain] = {
        name: functools.partial(_among_workers, mine, getattr(operations, name)) for name, mine in OPERATIONS.items()
    }
    cleaned = utils.clean_state_dict_for_safetensors
    functions["clean_state_dict_for_safetensors"] = lambda tensors: cleaned(_apart(tensors))
    for name, own in functions.items():
        for namespace in namespaces:
            if hasattr(namespace, name):
                setattr(namespace, name, own)


def take(accelerator: Any) -> Any:
    """Wrap one Accelerator, unless it is; return it."""
    context = find_context()
    if context is None or "_stretto" in vars(accelerator):
        return accelerator
    install(sys.modules[accelerate.Accelerator.__module__])
    _refuse(accelerator, context.split)
    _processes.set(1 if context.split else context.workers * context.global_batch_of)
    renumber()
    Hooks(accelerator)
    return accelerator


def number_processes() -> None:
    """Have the library's only process carry the number of the worker: 0 at the main worker."""
    begin = PartialState.__init__
    if hasattr(begin, "__wrapped__"):
        return

    @functools.wraps(begin)
    def numbered(state: Any, *given: Any, **named: Any) -> None:
        begin(state, *given, **named)
        if _is_alone(state):
            number = 0 if acts_for_main.get() or is_main() else max(rank(), 1)
            state.process_index = state.local_process_index = number
            state.num_processes = _processes.get() or 1

    PartialState.__init__ = numbered


def renumber() -> None:
    """Tell the library the number of this worker again: another one is the main worker once that has failed."""
    numbers = PartialState()
    if AcceleratorState._shared_state:
        names = ("process_index", "local_process_index", "num_processes")
        AcceleratorState._shared_state.update({name: getattr(numbers, name) for name in names})


def be_only_process() -> None:
    """Let a Trainer be the only process, as it has to: the script's own Accelerator has no loop."""
    if _processes.get() is not None:
        _processes.set(None)
        renumber()


def _is_alone(state: Any) -> bool:
    return bool(state.distributed_type == utils.DistributedType.NO)


class Hooks:
    """The wrapped methods of one Accelerator."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._models: list[nn.Module] = []
        self._optimizers: list[Any] = []
        self._trains: PreparedLoader | None = None
        """The loader that trains."""
        self._factor, self._items = 1.0, 0
        """Weight of the micro-batch under way in the mean over its window; tokens of the window, 0 for samples."""
        self._is_last = self._has_passed = True
        """True if the micro-batch under way ends its window; if it had a backward pass."""
        for name in METHODS:
            setattr(accelerator, name, functools.partial(getattr(self, name), getattr(accelerator, name)))
        accelerator._stretto = self

    # --- prepare() ----------------------------------------------------------------------------------------------

    def prepare(self, plain: Plain, *given: Any, **named: Any) -> Any:
        """Prepare, and note the models and optimizers."""
        optimizers = [one for one in given if isinstance(one, Optimizer)]
        if optimizers and self._trains is not None and self._trains.is_distributed:
            self._trains, self._optimizers, self._models = None, [], []  # another training begins
        self._optimizers += optimizers
        self._models += [one for one in given if isinstance(one, nn.Module)]
        return plain(*given, **named)

    def prepare_data_loader(self, plain: Plain, loader: Any, *given: Any, **named: Any) -> Any:
        """Return a loader for training or evaluation; in a loop that the script distributes it is each worker's own."""
        if isinstance(loader, PreparedLoader):
            return loader
        processes = _processes.get()
        _processes.set(None)
        renumber()
        try:
            prepared = PreparedLoader(self, loader, plain(loader, *given, **named))
        finally:
            _processes.set(processes)
            renumber()
        if self._trains is None:
            self._trains = prepared
        return prepared

    def distribute(self, loader: Any, accumulation: int) -> WindowedLoader:
        """Begin the training over a loader."""
        held = {id(one) for each in self._optimizers for group in each.param_groups for one in group["params"]}
        models = [one for one in self._models if any(id(each) in held for each in one.parameters())]
        if not models:
            raise _refusal(
                "a loader that accelerator.prepare has returned trains without a model and an optimizer",
                got=f"{len(self._models)} models and {len(self._optimizers)} optimizers that were prepared",
                to_type="model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
            )
        model = models[0] if len(models) == 1 else models
        optimizer = self._optimizers[0] if len(self._optimizers) == 1 else self._optimizers
        shared = WindowedLoader(model, optimizer, loader, accumulation)
        _taken.set(current := training())
        if current is not None:
            current.epochs.note_counter(is_own=True)
        told, batches = _processes.get(), current.batch_source.batches_per_step if current is not None else None
        if batches is not None and told != batches:
            raise _refusal(
                "the global steps of this run have another number of batches than those of its first workers",
                got=f"{told} in place of {batches}, by which the script has computed its schedule",
                to_type="--resume with as many workers as before",
            )
        return shared

    def is_trained_by(self, loader: PreparedLoader) -> bool:
        """Return True if an iteration over this loader is an epoch of training."""
        is_own = training() is None or training() is _taken.get()
        return loader is self._trains and is_own and torch.is_grad_enabled()

    # --- one step -----------------------------------------------------------------------------------------------

    def begin_window(self, shared: WindowedLoader, window: list[Any]) -> Iterator[tuple[Any, bool]]:
        """Yield the micro-batches of a window, each with True if it is the last one, and weigh them."""
        items = self._items_of(window)
        sizes = sizes_of(window, items or samples_in)
        pairs = list(shared.weighed(window, sizes))
        self._items = sum(sizes) if items is not None else 0
        if items is not None and not shared.is_alone:
            weight(self._items)
        for number, (micro, self._factor) in enumerate(pairs, 1):
            self._is_last, self._has_passed = number == len(pairs), False
            yield micro, self._is_last
            if not shared.is_alone:
                self._check(shared, len(pairs))

    def _items_of(self, window: list[Any]) -> Callable[[Any], int] | None:
        """Return the function that counts the tokens of a batch; None if losses are taken for means over samples."""
        labels = window[0].get("labels") if isinstance(window[0], Mapping) else None
        kinds = [one for model in self._models for one in type(model).__mro__]
        is_of_library = any(one.__module__.partition(".")[0] in ("transformers", "peft") for one in kinds)
        if not is_of_library or not isinstance(labels, Tensor) or labels.ndim < 2 or labels.is_floating_point():
            return None
        first = int(any(part in one.__name__ for one in kinds for part in SHIFTED))
        return lambda batch: int(batch["labels"][:, first:].ne(-100).sum())

    def backward(self, plain: Plain, loss: Any, **named: Any) -> None:
        """Make the backward pass over a micro-batch, as large as its part of the window."""
        if _over_workers() is not None:
            self._refuse_other_loops()
            if self._items and self._is_last and self._accelerator.gradient_accumulation_steps > 1:
                weight(self._items)
        self._has_passed = True
        plain(loss if self._factor == 1 else loss * self._factor, **named)

    def _refuse_other_loops(self) -> None:
        """Raise ScriptError if the loop over the loader that trains is not the innermost one."""
        active = GradientState().active_dataloader
        if active is not self._trains:
            raise _refusal(
                "the training continues in a loop over another prepared loader, or before that loop has ended",
                got="another prepared loader, or an iterator of one that was kept" if active is not None else "no loop",
                to_type="model, optimizer, train_loader, other_loader = accelerator.prepare(...), in this order; "
                "for batch in other_loader: ... to its end, or to a break",
            )

    def _check(self, shared: WindowedLoader, micro_batches: int) -> None:
        """Raise ScriptError if the loop has treated a micro-batch in another way than it was weighed."""
        self._refuse_other_loops()
        if self._has_passed and micro_batches > 1 and self._accelerator.sync_gradients != self._is_last:
            raise _refusal(
                "the loop does not count micro-batches as the Accelerator does",
                got=f"gradient_accumulation_steps={micro_batches} without accelerator.accumulate",
                to_type="with accelerator.accumulate(model): around a step; or gradient_accumulation_steps=1",
            )
        if not self._has_passed and self._factor != 1:
            raise _refusal(
                "micro-batches of unequal sizes are weighed in accelerator.backward, which was not called",
                got="loss.backward(), or no backward pass",
                to_type="accelerator.backward(loss)",
            )
        if shared.is_weighed and not self._items:
            raise _refusal(
                "stretto.weight weighs a whole window, whose other micro-batches are not known yet",
                got=f"stretto.weight with gradient_accumulation_steps={micro_batches}",
                to_type="gradient_accumulation_steps=1 with larger batches; or a mean over samples",
            )

    def no_sync(self, plain: Plain, model: Any = None) -> AbstractContextManager[None]:
        """Accumulate gradients."""
        context: AbstractContextManager[None] = no_sync() if training() is _taken.get() else plain(model)
        return context

    # --- files and logs -----------------------------------------------------------------------------------------

    def skip_first_batches(self, plain: Plain, loader: Any, num_batches: int = 0) -> Any:
        """Return the loader, whose next iteration begins after this number of micro-batches."""
        return loader.begun_at(num_batches) if isinstance(loader, PreparedLoader) else plain(loader, num_batches)

    def save_state(self, plain: Plain, *given: Any, **named: Any) -> Any:
        """Save the agreed model; the main worker writes, and all have the files when they return."""
        if _over_workers() is None:
            return plain(*given, **named)
        renumber()
        with agreed():
            found = plain(*given, **named)
        meet()
        return found

    def load_state(self, plain: Plain, *given: Any, **named: Any) -> Any:
        """Load a state before the loop, at each worker."""
        if training() is not None and training() is _taken.get():
            raise _refusal(
                "a state cannot be loaded within a training",
                got="accelerator.load_state after the first batch",
                to_type="accelerator.load_state before the loop; --resume continues a run",
            )
        return plain(*given, **named)

    def log(self, plain: Plain, values: Mapping[str, Any], *given: Any, **named: Any) -> None:
        """Log to the trackers of the main worker, and to the page of the run."""
        plain(values, *given, **named)
        if training() is not None:
            numbers = {name: float(one) for name, one in values.items() if isinstance(one, int | float)}
            log(**{name: one for name, one in numbers.items() if math.isfinite(one)})


class PreparedLoader:
    """A loader that `prepare` has returned. It has all attributes of the library's."""

    def __init__(self, hooks: Hooks, loader: DataLoader[Any], own: Any) -> None:
        self._hooks, self._loader, self._own = hooks, loader, own
        self._accelerator = hooks._accelerator
        self._shared: WindowedLoader | None = None
        self._kept = _Kept()
        self._skipped = self._iterations = 0
        self.end_of_dataloader, self.remainder = False, -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    @property
    def is_distributed(self) -> bool:
        """True if this loader has begun a training."""
        return self._shared is not None

    def __len__(self) -> int:
        if self._shared is not None:
            return len(self._shared)
        if training() is not None and training() is not _taken.get():
            return len(self._own)
        if self._hooks._trains is self and not isinstance(self._loader.dataset, IterableDataset):
            return expected_length(self._own, self._accelerator.gradient_accumulation_steps)
        return -(-len(self._own) // (_processes.get() or 1))

    def begun_at(self, batches: int) -> PreparedLoader:
        """Return this loader, whose next iteration begins after this number of micro-batches."""
        accumulation = self._accelerator.gradient_accumulation_steps
        if batches % accumulation:
            raise _refusal(
                "an epoch cannot begin within the micro-batches of one optimizer step",
                got=f"skip_first_batches(loader, {batches}) with gradient_accumulation_steps={accumulation}",
                to_type=f"a multiple of {accumulation}",
            )
        self._skipped = batches
        return self

    def __iter__(self) -> Iterator[Any]:
        if self._hooks.is_trained_by(self):
            return self._training()
        return self._evaluating() if _over_workers() is not None else iter(self._own)

    def _training(self) -> Iterator[Any]:
        """Yield this worker's micro-batches of an epoch."""
        shared, own, state = self._begin(), self._own, GradientState()
        shared.set_epoch(own.iteration)
        number, self._skipped, self.end_of_dataloader = self._skipped, 0, False
        if number:
            shared.begin_at(number, leave_out=not self._kept.is_received)
        if not shared.is_alone:
            self._accelerator.step = 0
        self._iterations += 1
        iteration = self._iterations
        state._add_dataloader(self)
        try:
            for window in shared.windows(skips_over=False):
                renumber()
                is_short = len(window) < shared.accumulation
                for micro, is_last in self._hooks.begin_window(shared, window):
                    number += 1
                    self.end_of_dataloader = is_last and (is_short or self._is_end(number))
                    yield utils.send_to_device(micro, self._accelerator.device)
            own.iteration += 1
        except GeneratorExit:
            if iteration == self._iterations:
                _end_epoch()
            raise
        finally:
            state._remove_dataloader(self)
        self._refuse_early_end(shared, number)
        _end_epoch()

    def _refuse_early_end(self, shared: WindowedLoader, number: int) -> None:
        """Raise ScriptError if a whole epoch has had fewer micro-batches than `len` said."""
        current = training()
        is_whole = number > 0 and not self._kept.is_received and current is not None and not current.is_over
        if is_whole and not isinstance(self._loader.dataset, IterableDataset) and number < len(self):
            shared.refuse_early_end("loop over the loader", f"{number} of {len(self)} micro-batches of an epoch")

    def _is_end(self, number: int) -> bool:
        try:
            return number == len(self)
        except TypeError:  # a stream
            return False

    def _begin(self) -> WindowedLoader:
        if self._shared is None:
            accumulation = self._accelerator.gradient_accumulation_steps
            is_stream = isinstance(self._loader.dataset, IterableDataset)
            self._shared = self._hooks.distribute(self._loader if is_stream else self._own, accumulation)
            self._kept = checkpointed(accelerate=self._kept).accelerate
        return self._shared

    def _evaluating(self) -> Iterator[Any]:
        """Yield this worker's part of the batches, by the workers that are here now."""
        together = _over_workers()
        assert together is not None
        here = [int(one) for one in together.transport.all_gather_bytes(str(rank()).encode())]
        if len(here) == 1:
            yield from self._own
            return
        part = self._part(len(here), here.index(rank()), together)
        with agreed():
            yield from part
        gone = sorted({*here} - {*together.transport.members})
        if gone:
            together.events.own_notice(
                f"worker {gone[0]} failed during an evaluation, whose gathered numbers lack a part of its batches"
            )

    def _part(self, workers: int, place: int, together: Training) -> Any:
        loader = self._loader
        if not isinstance(loader.dataset, IterableDataset):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                order = _Order([*iter(loader.batch_sampler or ())], loader.batch_sampler)
            if len({*together.transport.all_gather_bytes(order.digest)}) > 1:
                raise _refusal(
                    "the workers draw different orders of an evaluation, of which each would take a part",
                    got="a sampler with random numbers of its own",
                    to_type="shuffle=False in the loaders that evaluate",
                )
            loader = DataLoader(
                loader.dataset,
                batch_sampler=order,
                collate_fn=loader.collate_fn,
                num_workers=loader.num_workers,
                pin_memory=loader.pin_memory,
            )
        return prepare_data_loader(
            loader,
            self._accelerator.device,
            num_processes=workers,
            process_index=place,
            put_on_device=self._accelerator.device_placement,
            dispatch_batches=False,
            even_batches=True,
        )


class _Kept:
    """A mark in the state of the run: a worker that receives it continues a training."""

    is_received = False

    def state_dict(self) -> dict[str, Any]:
        """Return nothing that a loop could not find itself."""
        return {"is_received": True}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Note that the training continues."""
        self.is_received = True


class _Order:
    """The batches of an epoch, in an order that was drawn before."""

    def __init__(self, batches: list[Any], sampler: Any) -> None:
        self._batches = batches
        self.batch_size, self.drop_last = getattr(sampler, "batch_size", None), getattr(sampler, "drop_last", False)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def digest(self) -> bytes:
        """Hash of the order."""
        return hashlib.sha256(repr(self._batches).encode()).digest()


def _end_epoch() -> None:
    """End the epoch of all workers; after a loop that has only looked at a batch it begins again."""
    if (current := training()) is not None:
        current.epochs.end_peek() or current.epochs.end_epoch()


def _over_workers() -> Training | None:
    """Return the training that a prepared loader has begun, if it has workers here that wait for each other."""
    together = lockstep_training()
    if together is None or together is not _taken.get() or together.is_over or together.transport.workers == 1:
        return None
    return None if together.agent.is_catching_up() else together


# --- operations among processes ---------------------------------------------------------------------------------


def _among_workers(mine: Plain, plain: Plain, *given: Any, **named: Any) -> Any:
    return plain(*given, **named) if _over_workers() is None else mine(*given, **named)


def _apart(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of tensors; tied ones stay one.

    Parameters may be views of one buffer here, which the library takes for tied ones: it keeps the first alone.
    """
    copies, found = dict[Any, Tensor](), dict[str, Any]()
    for name, one in tensors.items():
        if isinstance(one, Tensor):
            place = (one.data_ptr(), one.shape, one.stride()) if one.numel() else name
            if place not in copies:
                copies[place] = one.detach().clone()
        found[name] = copies[place] if isinstance(one, Tensor) else one
    return found


def _in_each(act: Callable[[Tensor], Tensor], tensors: Any) -> Any:
    return operations.recursively_apply(act, tensors, error_on_other_type=True)


def gather(tensor: Any) -> Any:
    """Return the tensors of all workers, one after the other along the first dimension."""
    return _in_each(lambda one: torch.cat(gathered(one if one.ndim else one[None], _over_workers())), tensor)


def gather_object(object: Any) -> Any:
    """Return the lists of all workers as one list."""
    together = _over_workers()
    assert together is not None
    try:
        own = msgspec.msgpack.encode(object)
        return [one for each in together.transport.all_gather_bytes(own) for one in msgspec.msgpack.decode(each)]
    except (TypeError, msgspec.MsgspecError):
        raise _refusal(
            "stretto can't gather these objects",
            got=f"a {type(object).__name__}: {object!r:.60}",
            to_type="lists of numbers, texts, lists and dicts; or accelerator.gather of tensors",
        ) from None


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:  # noqa: ARG001  (of the library)
    """Return the mean, the sum or the maximum over all workers."""
    if reduction not in ("mean", "sum", "max", "none"):
        raise _refusal("this reduction is unknown", got=f'reduction="{reduction}"', to_type='"mean", "sum" or "max"')

    def reduced(one: Tensor) -> Tensor:
        stacked = torch.stack(gathered(one, _over_workers()))
        if reduction == "none":
            return one
        return stacked.amax(0) if reduction == "max" else stacked.sum(0) / (len(stacked) if reduction == "mean" else 1)

    return _in_each(reduced, tensor)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Return the tensor, padded to the largest size of all workers in a dimension."""

    def padded(one: Tensor) -> Tensor:
        if dim >= one.ndim:
            return one
        sizes = gathered(torch.tensor(one.shape[dim], device="cpu"), _over_workers())
        missing = [*one.shape]
        missing[dim] = int(max(sizes)) - one.shape[dim]
        rest = one.new_full(missing, pad_index)
        return torch.cat([rest, one] if pad_first else [one, rest], dim)

    return _in_each(padded, tensor)


def broadcast_tensor(tensor: Any, from_process: int = 0) -> Any:
    """Return the tensors of one worker."""
    return _in_each(lambda one: gathered(one, _over_workers())[from_process], tensor)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Put the main worker's values into the list."""
    if from_process:
        raise _refusal("only the main worker's values are broadcast", got=f"from_process={from_process}", to_type="0")
    object_list[:] = broadcast(object_list)
    return object_list


OPERATIONS: dict[str, Plain] = {
    "gather": gather,
    "gather_object": gather_object,
    "reduce": reduce,
    "pad_across_processes": pad_across_processes,
    "broadcast": broadcast_tensor,
    "broadcast_object_list": broadcast_object_list,
}
"""By name in the library: the functions that take the place of its own in a training of several workers."""


def _refuse(accelerator: Any, is_split: bool) -> None:
    """Raise ScriptError for what cannot be trained in this way, before the first step."""
    state = accelerator.state
    plugins = [getattr(state, name, None) for name in ("deepspeed_plugins", "deepspeed_plugin", "fsdp_plugin")]
    if not _is_alone(state) or any(plugins) or getattr(state, "parallelism_config", None) is not None:
        raise _refusal(
            "this Accelerator divides the model or the training itself",
            got=f"distributed_type={state.distributed_type}" + " with a plugin" * any(plugins),
            to_type="Accelerator() without a plugin; stretto run -n 2 starts the workers",
        )
    if accelerator.split_batches and not is_split:
        raise _refusal(
            "batches of the script are split among the workers by an option of the run",
            got="split_batches=True",
            to_type="stretto run --batch split, or no split_batches",
        )


def _refusal(problem: str, got: str, to_type: str) -> ScriptError:
    expected = "a loop over a loader that accelerator.prepare has returned, on one device for each worker"
    return ScriptError(explain(problem, got=got, expected=expected, to_type=to_type))
