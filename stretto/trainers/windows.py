"""Windows: the micro-batches of one optimizer step of another library, which are one batch of a global step.

A library that accumulates gradients takes several micro-batches from its loader and steps once. Here they are one batch
of the distributed loader, so that a global step, an exchange and a learning rate's step are one step of the library:

    the library's loader       4 samples | 4 samples | 4 samples | 4 samples      accumulation of 4
    the distributed loader     a window of 16 samples for each worker
    worker 1 of 2              its share of the global step, 15 samples where an epoch has few: 4 | 4 | 4 | 3

The share is cut by the collate function, in the loader's processes. Every worker has `accumulation` micro-batches in
each window, as the library counts them: a share of fewer samples is preceded by empty ones, over which no pass is made.
A process that trains alone has the batches of the script, and fewer in the last window of an epoch.

Where a pass over an empty micro-batch costs nothing (`by_groups`), the share is cut where one process has its
micro-batches, too, into parts of at most the script's size. The parts of all workers within one of them are a group, by
which losses that are means over a micro-batch can be weighed as one process does.

Batches that mean something as a whole (of a batch sampler, or with `drop_last`) are not cut: there a unit of the window
is a batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, islice, pairwise, repeat
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from stretto.api import distribute, training
from stretto.data.shares import portion
from stretto.errors import ScriptError, explain
from stretto.loader.epoch_order import Window, samples_in
from stretto.training.iterators import Batches
from stretto.training.schedule import Mode
from stretto.training.worker_context import find_context


class Empty(dict[str, Any]):
    """A micro-batch without a sample: the library counts it, and makes no pass over it."""

    @classmethod
    def like(cls, batch: Any) -> Empty:
        """Return an empty micro-batch with the tensors of another one, which have no rows here."""
        items = batch.items() if isinstance(batch, Mapping) else ()
        return cls((name, value[:0]) for name, value in items if isinstance(value, Tensor) and value.ndim)


def sizes_of(window: list[Any], items: Callable[[Any], int] = samples_in) -> list[int]:
    """Return the numbers of items in the micro-batches of a window: 0 in empty ones."""
    return [0 if isinstance(one, Empty) else items(one) for one in window]


class GroupedWindow(Window):
    """The micro-batches of a window, and the group of each: the micro-batch of one process that it is a part of."""

    def __init__(self, batches: Iterable[Any], groups: Sequence[int]) -> None:
        super().__init__(batches)
        self.groups = groups


class WindowedLoader:
    """A library's loader, distributed in windows of `accumulation` micro-batches, which it gives one by one.

    `schedule` is "per-sample" if the script has made the learning-rate scheduler, by the batches of one process.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        loader: DataLoader[Any],
        accumulation: int,
        schedule: Mode = "per-step",
        by_groups: bool = False,
    ) -> None:
        _refuse_changing_length()
        self._inner, self.accumulation = loader, accumulation
        self.groups: Sequence[int] = ()
        """Group of each micro-batch of the window under way; empty ones have none."""
        self._skipped = 0
        """Windows of the next epoch that were trained before."""
        self._has_named_fewer = False
        """True once a line has said that this worker has had fewer micro-batches than its loop has counted."""
        is_stream = isinstance(loader.dataset, IterableDataset)
        self._order = None if is_stream else _order_of(loader)
        has_groups = by_groups and accumulation > 1
        self._parts = _Parts(loader.collate_fn, accumulation, self._order, has_groups)
        if self._order is not None and has_groups:
            self._order.groups = self._groups
        windows = _Stream(loader, accumulation) if self._order is None else self._windows(self._order)
        self._shared = distribute(model, optimizer, windows, schedule=schedule)
        self._trainer = training()
        source = self._trainer.batch_source if self._trainer is not None else None
        self.is_alone = source is None or source.first_workers * source.batches_per_step == 1
        """True if this process trains alone, with the batches of the script."""
        if self.is_alone and self._order is not None:
            self._parts.unit_size = self._order.batch
        if self._trainer is not None:
            self._trainer.epochs.note_counter(is_own=False)
            if schedule == "per-step":
                self._trainer.schedules.trust_lengths()
        self.dataset, self.batch_size = loader.dataset, loader.batch_size

    def _windows(self, order: _Order) -> DataLoader[Any]:
        inner, data = self._inner, self._inner.dataset
        ahead: dict[str, Any] = {}
        if inner.num_workers:
            names = ("num_workers", "timeout", "prefetch_factor", "persistent_workers", "multiprocessing_context")
            ahead = {name: getattr(inner, name) for name in names}
        data = _Whole(data) if order.is_whole else data
        return DataLoader(
            data if order.groups is None else _Grouped(data),
            sampler=order,
            batch_size=order.batch * self.accumulation,
            collate_fn=self._parts,
            pin_memory=inner.pin_memory,
            worker_init_fn=inner.worker_init_fn,
            generator=inner.generator,
            **ahead,
        )

    @property
    def steps(self) -> int:
        """Number of global steps of an epoch. Raises TypeError for a stream whose length is not known."""
        return len(self._shared)

    def __len__(self) -> int:
        """Return the number of micro-batches of an epoch, as the library counts them."""
        return len(self._inner) if self.is_alone else self.steps * self.accumulation

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the epoch to the library's loader, whose sampler draws by it."""
        if hasattr(self._inner, "set_epoch"):
            self._inner.set_epoch(epoch)

    def begin_at(self, batches: int, leave_out: bool) -> None:
        """Begin the next epoch after this number of micro-batches, which the library has trained before.

        `leave_out` is False in an epoch that other workers, or a checkpoint, have begun.
        """
        self._skipped = batches // self.accumulation
        if self._order is not None and leave_out:
            self._order.skipped = self._samples_before(self._skipped)

    def _samples_before(self, step: int) -> int:
        """Return the number of units before a global step of an epoch."""
        assert self._order is not None
        trainer, units = self._trainer, len(self._order)
        if trainer is not None and trainer.batch_source.has_share_for_each:
            return portion(units, step, self.steps)[0]
        batches = 1 if trainer is None else trainer.batch_source.batches_per_step
        return min(step * batches * self._order.batch * self.accumulation, units)

    def _groups(self) -> Iterator[int]:
        """Yield the group of each unit of an epoch: the micro-batch of one process that has it, within its step."""
        assert self._order is not None
        size = self._order.batch * (1 if self._trainer is None else self._trainer.batch_source.batches_per_step)
        for start, stop in pairwise(map(self._samples_before, range(self.steps + 1))):
            yield from (place // size for place in range(stop - start))

    @property
    def has_own(self) -> bool:
        """True unless the batch under way is another worker's, over which a pass of weight 0 is made."""
        current = self._trainer.global_steps.current if self._trainer is not None else None
        return current is None or not current.is_weightless

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's micro-batches of an epoch. A section that was over before this worker came has none."""
        return chain.from_iterable(self.windows())

    def windows(self, skips_over: bool = True) -> Iterator[list[Any]]:
        """Yield this worker's windows of an epoch, each a list of micro-batches.

        Epochs that were over before this worker came are passed, or if not `skips_over` are iterations without a batch.
        """
        trainer, (skipped, self._skipped) = self._trainer, (self._skipped, 0)
        if trainer is None or trainer.is_over:
            return
        while skips_over and trainer.agent.is_over(trainer.progress.epochs + 1):
            list(Batches(trainer))
        try:
            steps: Iterable[int] = range(skipped, self.steps)
        except TypeError:
            steps = count()
        for _, window in zip(steps, Batches(trainer), strict=False):
            missing = 0 if self.is_alone else self.accumulation - len(window)
            self.groups = window.groups if isinstance(window, GroupedWindow) else range(len(window))
            yield [Empty.like(window[0])] * missing + window

    def weighed(self, window: list[Any], sizes: Sequence[int]) -> Iterator[tuple[Any, float]]:
        """Yield the micro-batches of a window, each with the factor that makes the mean of their losses that of it.

        Each loss is a mean over one of the `sizes`, as `sizes_of` counts them. In place of an empty micro-batch the
        library passes over another one again, with factor 0. A process that trains alone has the script's means.
        """
        total = 0 if self.is_alone else sum(sizes)
        full = next((one for one in window if not isinstance(one, Empty)), None)
        for micro, size in zip(window, sizes, strict=True):
            yield full if isinstance(micro, Empty) else micro, len(window) * size / total if total else 1.0

    def refuse_early_end(self, library: str, got: str) -> None:
        """Raise ScriptError where a library's loop has had fewer micro-batches than it counted, which it allows.

        Workers that do not wait share the batches of each epoch by their speeds: a line says so once in its place.
        """
        if self._trainer is None or not self._trainer.strategy.asynchronous:
            raise ScriptError(
                explain(
                    f"the {library} has ended before its last step",
                    got=got,
                    expected="as many micro-batches as len(loader) said; this is an error in Stretto",
                    to_type="--no-trainers with stretto.distribute in a loop of your own",
                )
            )
        if not self._has_named_fewer:
            self._has_named_fewer = True
            self._trainer.events.own_notice(
                f"the {library} of worker {self._trainer.transport.number} has had {got}: workers that do not wait "
                "share the batches of each epoch by their speeds, and the schedulers of a slow one end earlier"
            )

    @property
    def is_weighed(self) -> bool:
        """True if the script has weighed one micro-batch of several by `stretto.weight`, which weighs the window."""
        trainer = self._trainer
        if trainer is None or self.is_alone or self.accumulation == 1:
            return False
        return any(one.weights.is_weighed for one in trainer.strategy.sets)


def expected_length(loader: DataLoader[Any], accumulation: int) -> int:
    """Return the number of micro-batches of an epoch that a `WindowedLoader` will have, before it is made."""
    context = find_context()
    if context is None or context.workers == context.global_batch_of == 1:
        return len(loader)
    order = _order_of(loader)
    windows = -(-len(order) // (order.batch * accumulation))
    batches = 1 if context.split else context.workers * context.global_batch_of
    is_cut = context.drops_uneven and windows >= batches
    return accumulation * (windows // batches if is_cut else -(-windows // batches))


class _Order(Sampler[Any]):
    """The library's sampler, of which the next iteration may leave out the first units; `batch` of them make a batch.

    A unit is a sample, or a batch of samples where these belong together. `groups` yields the group of each.
    """

    groups: Callable[[], Iterator[int]] | None = None

    def __init__(self, units: Any, batch: int, is_whole: bool) -> None:
        self._units, self.batch, self.is_whole, self.skipped = units, batch, is_whole, 0

    def __iter__(self) -> Iterator[Any]:
        skipped, self.skipped = self.skipped, 0
        units = iter(self._units)
        if self.groups is not None:
            groups = chain(self.groups(), repeat(0))  # a last step that is dropped has none
            units = (_coded(unit, group) for unit, group in zip(units, groups, strict=False))
        return islice(units, skipped, None)

    def __len__(self) -> int:
        return len(self._units)

    @property
    def generator(self) -> Any:
        """The generator that the sampler draws from, which checkpoints keep."""
        return getattr(self._units, "generator", None)


def _order_of(loader: DataLoader[Any]) -> _Order:
    batches: Any = loader.batch_sampler
    if type(batches) is BatchSampler and not batches.drop_last:
        return _Order(batches.sampler, batches.batch_size, is_whole=False)
    return _Order(_BatchesAsUnits(batches), 1, is_whole=True)


class _BatchesAsUnits(Sampler[Any]):
    """The batches of a batch sampler, each of which is one unit."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return map(tuple, self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class _Whole(Dataset[list[Any]]):
    """A data set whose samples are the lists of samples of a batch."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, indices: tuple[Any, ...]) -> list[Any]:
        several = getattr(self.data, "__getitems__", None)
        found: list[Any] = several(list(indices)) if several is not None else [self.data[index] for index in indices]
        return found


class _Grouped(Dataset[tuple[int, Any]]):
    """A data set whose samples are paired with the group that their index has."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, codes: Sequence[Any]) -> list[tuple[int, Any]]:
        groups, indices = zip(*map(_decoded, codes), strict=True)
        several = getattr(self.data, "__getitems__", None)
        found = several(list(indices)) if several is not None else [self.data[index] for index in indices]
        return list(zip(groups, found, strict=True))

    def __getitem__(self, code: Any) -> tuple[int, Any]:
        return self.__getitems__([code])[0]


GROUP = 1 << 40
"""Place of the group in a number that has the index of a sample, too."""


def _coded(unit: Any, group: int) -> Any:
    """Return one number, which an order of numbers can have, for a sample and its group; a pair for other units."""
    try:
        index = operator.index(unit)
    except TypeError:
        return unit, group
    return index + group * GROUP if 0 <= index < GROUP else (unit, group)


def _decoded(code: Any) -> tuple[int, Any]:
    """Return the group and the unit.

    >>> _decoded(_coded(5, 2)), _decoded(_coded((3, 4), 1)), _decoded(_coded(-1, 1))
    ((2, 5), (1, (3, 4)), (1, -1))
    """
    return divmod(code, GROUP) if isinstance(code, int) else (code[1], code[0])


class _Parts:
    """Collate function of a window: its micro-batches, of at most `accumulation` parts of its units."""

    unit_size = 0
    """Units of each micro-batch; 0 to cut a window evenly, or by groups."""

    def __init__(
        self, collate: Callable[[list[Any]], Any], accumulation: int, order: _Order | None, has_groups: bool
    ) -> None:
        self._collate, self._accumulation, self._has_groups = collate, accumulation, has_groups
        self._is_whole, self._largest = (order.is_whole, order.batch) if order is not None else (False, 0)

    def __call__(self, units: Sequence[Any]) -> list[Any]:
        if not self._has_groups:
            return [self._batch(units[start:stop]) for start, stop in self._bounds(len(units))]
        if self.unit_size:
            return [self._batch([unit for _, unit in units[start:stop]]) for start, stop in self._bounds(len(units))]
        groups = dict[int, list[Any]]()
        for group, unit in units:
            groups.setdefault(group, []).append(unit)
        found = [(group, part) for group, parts in sorted(self._cut(groups).items()) for part in parts]
        return GroupedWindow((self._batch(part) for _, part in found), [group for group, _ in found])

    def _batch(self, units: Sequence[Any]) -> Any:
        return self._collate(list(chain(*units)) if self._is_whole else list(units))

    def _bounds(self, units: int) -> Iterator[tuple[int, int]]:
        """Yield the first unit of each micro-batch, and the unit after its last."""
        if self.unit_size:
            yield from ((start, start + self.unit_size) for start in range(0, units, self.unit_size))
        else:
            parts = min(self._accumulation, units)
            yield from (portion(units, part, parts) for part in range(parts))

    def _cut(self, groups: dict[int, list[Any]]) -> dict[int, list[list[Any]]]:
        """Cut groups of units, the largest first, until no part is larger than a micro-batch of the script."""
        parts = dict.fromkeys(groups, 1)
        while sum(parts.values()) < self._accumulation:
            largest = max(groups, key=lambda group: len(groups[group]) / parts[group])
            if len(groups[largest]) <= self._largest * parts[largest]:
                break
            parts[largest] += 1
        return {
            group: [units[slice(*portion(len(units), part, parts[group]))] for part in range(parts[group])]
            for group, units in groups.items()
        }


class _Stream:
    """The windows of a loader of a stream: `accumulation` of its batches each."""

    def __init__(self, loader: DataLoader[Any], accumulation: int) -> None:
        self._loader, self._accumulation = loader, accumulation
        self.dataset = loader.dataset

    def __iter__(self) -> Iterator[Window]:
        batches = DataLoader.__iter__(self._loader)  # a library's own iterator takes a batch ahead
        return iter(lambda: Window(islice(batches, self._accumulation)), Window())

    def __len__(self) -> int:
        return -(-len(self._loader) // self._accumulation)


def _refuse_changing_length() -> None:
    """Raise ScriptError if the number of global steps of an epoch follows the number of workers."""
    context = find_context()
    if context is not None and context.rule == "per-worker-batch":
        raise ScriptError(
            explain(
                "a library's loop counts the steps of an epoch beforehand, and they would change with the workers",
                got="--on-resize per-worker-batch",
                expected="steps that are the same whatever fails or joins",
                to_type="--on-resize global-batch, which is the default",
            )
        )


def items_in(batch: Any, shifts: bool = False) -> int:
    """Return the items of a micro-batch that its mean loss is over: labels other than -100, or samples without any.

    With `shifts` the first label of each sample is none: nothing comes before it.

    >>> import torch
    >>> items_in({"labels": torch.tensor([[1, -100], [2, 3]])}), items_in({"x": torch.ones(4, 2)})
    (3, 4)
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return (
        int((labels[:, 1:] if shifts and labels.ndim == 2 else labels).ne(-100).sum())
        if isinstance(labels, Tensor) and not labels.is_floating_point()
        else samples_in(batch)
    )
