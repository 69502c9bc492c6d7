"""The order of an epoch: drawn once by worker 0; each worker loads its own batches of it.

Where torch's own samplers draw it, worker 0 broadcasts the state of their random generator alone, and the others draw
the same numbers again; the order of any other sampler is broadcast.
"""

from __future__ import annotations

import functools
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice, pairwise, repeat
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from stretto.data.assignment import BatchAssignment, Ranges, bounds_of
from stretto.data.shares import portion
from stretto.errors import LoaderError, explain
from stretto.loader.arrangement import Arrangement, Batch
from stretto.transport import Transport
from stretto.transport.device_memory import accelerator

ENDLESS = 50_000_000
"""Number of samples above which an epoch is not drawn before it begins: the loader is read as a stream."""


class Earlier(msgspec.Struct, frozen=True):
    """The state of the first worker before an epoch, for a worker that joins where none sends the state of the run."""

    peeks: Sequence[int] = ()
    """Numbers of the iterations over the loader that were peeks."""
    samples: int = 0
    """Number of samples of the epochs before this one, of all workers."""
    kept: bytes = b""
    """The script's own values."""


class Permutation(msgspec.Struct, frozen=True):
    """The draw of a data set's samples, each once, by torch's own samplers: what every worker can repeat."""

    samples: int
    generator: bytes
    """State of the random generator before; empty for samples in their own order."""
    checksum: int

    @staticmethod
    def drawn(samples: int, generator: torch.Generator | None) -> tuple[Permutation, NDArray[Any]]:
        """Draw as `RandomSampler` does, or number the samples without a generator; return the result, too."""
        state = b"" if generator is None else generator.get_state().numpy().tobytes()
        flat = _samples_in_order(samples, generator)
        return Permutation(samples, state, _checksum(flat)), flat

    def repeated(self) -> NDArray[Any]:
        """Return the same result at another worker. Raises LoaderError where torch draws other numbers."""
        generator = torch.Generator() if self.generator else None
        if generator is not None:
            generator.set_state(torch.frombuffer(bytearray(self.generator), dtype=torch.uint8))
        if _checksum(flat := _samples_in_order(self.samples, generator)) != self.checksum:
            raise LoaderError(
                explain(
                    "this worker's torch draws another order of the samples than that of the worker that began",
                    got=f"torch {torch.__version__}",
                    expected="one version of torch at all workers of a run, and of one that is resumed",
                    to_type="pip install torch==VERSION of the other machine, which run.json names",
                )
            )
        return flat


def _samples_in_order(samples: int, generator: torch.Generator | None) -> NDArray[Any]:
    """Return the numbers of all samples, shuffled if there is a generator; 32 bits for each where that is enough."""
    kind = torch.int32 if samples < 1 << 31 else torch.int64
    found: NDArray[Any] = (
        torch.arange(samples, dtype=kind, device="cpu")
        if generator is None
        else torch.randperm(samples, generator=generator, dtype=kind, device="cpu")
    ).numpy()
    return found


def _checksum(flat: NDArray[Any]) -> int:
    return zlib.crc32(flat.data.cast("B"))


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """The samples of one epoch, in order, and where its batches begin. `dropped` samples of the data set are in none.

    Of a stream, which has no order, `stream` is how it is dealt.
    """

    flat: Any
    """Indices of all samples: an array of numbers, or a list of other indices."""
    bounds: array[int]
    """Position of each batch's first sample among all samples, and the end of the last batch."""
    dropped: int
    earlier: Earlier = field(default_factory=Earlier)
    permutation: Permutation | None = None
    """The draw of all samples, where other workers can repeat it."""
    stream: bytes = b""

    @staticmethod
    def of(batches: Iterable[Batch], dropped: int = 0) -> EpochOrder:
        """Return the order of these batches. Raises LoaderError for batches without an end."""
        numbers, others, bounds = array("q"), list[Any](), array("q", [0])
        are_numbers = True
        for batch in batches:
            if are_numbers and not all(type(index) is int and abs(index) < 1 << 63 for index in batch):
                are_numbers, others = False, numbers.tolist()
            (numbers if are_numbers else others).extend(batch)
            bounds.append(bounds[-1] + len(batch))
            if bounds[-1] > ENDLESS:
                raise _endless()
        return EpochOrder(_narrow(np.array(numbers)) if are_numbers else others, bounds, dropped)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Number of samples of each batch."""
        return [stop - start for start, stop in pairwise(self.bounds)]

    def indices(self, start: int, stop: int) -> Batch:
        """Return the indices of the samples at these positions."""
        found: Batch = list(self.flat[start:stop]) if isinstance(self.flat, list) else self.flat[start:stop].tolist()
        return found

    def batch(self, number: int) -> Batch:
        """Return the indices of one batch."""
        return self.indices(self.bounds[number], self.bounds[number + 1])

    def among(self, pieces: Ranges) -> list[Batch]:
        """Return the indices in these ranges of all samples, a list for each range."""
        return [self.indices(start, stop) for start, stop in pieces]

    def without_last(self, batches: int) -> EpochOrder:
        """Return this order with its first batches, this number of them; the samples of the others are dropped."""
        bounds = self.bounds[: batches + 1]
        return replace(
            self, flat=self.flat[: bounds[-1]], bounds=bounds, dropped=self.dropped + self.bounds[-1] - bounds[-1]
        )

    def appended(self, batch: Batch) -> EpochOrder:
        """Return this order with one more batch."""
        added = EpochOrder.of([batch]).flat
        are_numbers = not isinstance(self.flat, list) and not isinstance(added, list)
        flat = np.concatenate([self.flat, added]) if are_numbers else [*self.indices(0, self.bounds[-1]), *batch]
        return replace(
            self, flat=flat, bounds=self.bounds + array("q", [self.bounds[-1] + len(batch)]), permutation=None
        )


class _Packed(msgspec.Struct):
    """A serialised order: how often each size of batches follows, and how all indices were drawn, or the indices."""

    dropped: int
    sizes: list[tuple[int, int]]
    indices: Permutation | bytes | list[Any]
    earlier: Earlier = Earlier()
    stream: bytes = b""


_PACKED = msgspec.msgpack.Decoder(_Packed)


def draw(
    loader: DataLoader[Any],
    transport: Transport,
    global_batch_of: int,
    arranged: Callable[[list[Batch]], list[Batch]] | None = None,
    earlier: Callable[[], Earlier] = Earlier,
) -> EpochOrder:
    """Draw the order of the next epoch at worker 0 and broadcast it; all ranks of a worker have that of its rank 0.

    `global_batch_of` batches of the script form one batch.
    """

    def drawn() -> EpochOrder:
        return replace(_drawn(loader, global_batch_of, arranged), earlier=earlier())

    return unpack(transport.broadcast_by_ranks(lambda: pack(drawn()))) if transport.has_others else drawn()


def in_parts(batches: Sequence[Batch], parts: int) -> list[Batch]:
    """Return the even parts of each batch, without empty ones; the first parts are the larger ones.

    >>> in_parts([[0, 1, 2], [3]], 2)
    [[0, 1], [2], [3]]
    """
    cuts = ([portion(len(batch), part, parts) for part in range(parts)] for batch in batches)
    return [
        batch[start:stop] for batch, found in zip(batches, cuts, strict=True) for start, stop in found if start < stop
    ]


class Window(list[Any]):
    """The micro-batches of one step, each of which has samples of its own."""


def part_of(batch: Any, part: int, parts: int) -> Any:
    """Return one part of a batch; None in place of a part without a sample.

    Raises LoaderError for a number, for which the script makes a batch.
    """
    if isinstance(batch, int):
        raise LoaderError(
            explain(
                "--batch split can't divide a batch that the script makes in its loop",
                got=f"the number {batch}",
                expected="batches of tensors",
                to_type="--batch keep, by which each worker makes batches of its own; or "
                "x[stretto.rank() :: stretto.world_size()] in the loop",
            )
        )
    if isinstance(batch, Window):
        return Window(own for one in batch if (own := part_of(one, part, parts)) is not None) or None
    samples = samples_in(batch)
    start, stop = portion(samples, part, parts)
    return _rows(batch, samples, slice(start, stop)) if start < stop else None


def first_of(batch: Any) -> Any:
    """Return the first sample of a batch, as a batch."""
    if isinstance(batch, Window):
        return Window([first_of(batch[0])])
    return part_of(batch, 0, samples_in(batch))


def has_rows(batch: Any, samples: int) -> bool:
    """Return True if every tensor and array of a batch has a row for each of its samples, so that it can be divided."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return bool(batch.ndim and batch.shape[0] == samples)
    if isinstance(batch, Window):
        return all(has_rows(one, samples_in(one)) for one in batch)
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return all(has_rows(item, samples) for item in items)


def _rows(batch: Any, samples: int, rows: slice) -> Any:
    """Return these rows of everything in a batch that has one for each sample."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return batch[rows] if batch.ndim and batch.shape[0] == samples else batch
    if isinstance(batch, Mapping):
        return {key: _rows(item, samples, rows) for key, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_rows(item, samples, rows) for item in batch))
    if isinstance(batch, list | tuple) and _leading(batch) is None:
        return batch[rows] if len(batch) == samples else batch
    if isinstance(batch, list | tuple):
        return type(batch)(_rows(item, samples, rows) for item in batch)
    return batch


def interleaved(batches: Sequence[Batch], stretches: int) -> list[Batch]:
    """Return the batches in an order in which every N-th one is of the same contiguous stretch of them.

    Assigned in turn to as many workers, each gets one stretch, in order; the first stretches are the longer ones.

    >>> interleaved([[0], [1], [2], [3], [4]], 2)
    [[0], [3], [1], [4], [2]]
    """
    each, over = divmod(len(batches), stretches)
    starts = [each * item + min(item, over) for item in range(stretches)]
    rounds = (starts if at < each else starts[:over] for at in range(each + (over > 0)))
    return [batches[start + at] for at, those in enumerate(rounds) for start in those]


def _drawn(
    loader: DataLoader[Any], global_batch_of: int, arranged: Callable[[list[Batch]], list[Batch]] | None
) -> EpochOrder:
    order = _of_torch(loader) or EpochOrder.of(map(_as_list, _sampler(loader)))
    if arranged is not None:
        order = EpochOrder.of(arranged([order.batch(number) for number in range(len(order.sizes))]))
    if global_batch_of > 1:
        order = replace(order, bounds=array("q", [*order.bounds[:-1:global_batch_of], order.bounds[-1]]))
    drops = getattr(loader, "drop_last", False) or getattr(loader.batch_sampler, "drop_last", False)
    return replace(order, dropped=max(len(loader.sampler) - order.bounds[-1], 0) if drops else 0)  # type: ignore[arg-type]


def _of_torch(loader: DataLoader[Any]) -> EpochOrder | None:
    """Return the order of a loader with torch's own samplers, which draws from the random generators what they draw."""
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    if batch_sampler is not None and (type(batch_sampler) is not BatchSampler or batch_sampler.sampler is not sampler):
        return None
    size, drops = (batch_sampler.batch_size, batch_sampler.drop_last) if batch_sampler is not None else (1, False)
    if type(sampler) is RandomSampler:
        samples = len(sampler.data_source)
        if sampler.replacement or sampler.num_samples != samples or not samples:
            return None
        generator = sampler.generator or torch.Generator().manual_seed(
            int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        )
    elif type(sampler) is SequentialSampler:
        samples, generator = len(sampler.data_source), None
    else:
        return None
    permutation, flat = Permutation.drawn(samples, generator)
    if generator is not None and generator is getattr(sampler, "generator", None):
        # as the sampler does after its last number
        torch.randperm(samples, generator=generator, dtype=torch.int32, device="cpu")
    bounds = array("q", range(0, samples + 1, size))
    if bounds[-1] < samples and not drops:
        bounds.append(samples)
    return EpochOrder(flat[: bounds[-1]], bounds, 0, permutation=permutation)


def _endless() -> LoaderError:
    return LoaderError(
        explain(
            "the sampler is endless and has no length, so it can't be known whether an epoch of it can be assigned",
            got=f"more than {ENDLESS:,} samples, and no __len__",
            expected="a sampler that ends, or one whose __len__ tells that it does not",
            to_type="torch.utils.data.RandomSampler(dataset, replacement=True, num_samples=10**10)",
        )
    )


def is_endless(loader: DataLoader[Any]) -> bool:
    """Return True if the length of the loader's sampler tells that its epochs are too long to be drawn."""
    sampler: Any = loader.sampler if loader.batch_size is not None else _sampler(loader)
    try:
        return len(sampler) > ENDLESS
    except (TypeError, NotImplementedError):
        return False


def _sampler(loader: DataLoader[Any]) -> Iterable[Any]:
    """Return the loader's sampler: of batches, or of single indices if it does not batch."""
    return loader.batch_sampler if loader.batch_sampler is not None else loader.sampler


def _as_list(batch: Any) -> Batch:
    indices = list(batch) if isinstance(batch, list | tuple) else [batch]
    if indices and isinstance(indices[0], np.integer | torch.Tensor):  # a sampler over an array of indices
        return [item.item() if isinstance(item, np.integer | torch.Tensor) else item for item in indices]
    return indices


def pack(order: EpochOrder) -> bytes:
    """Return a serialised order. Raises LoaderError for indices that can't be serialised."""
    sizes = [(size, len(list(those))) for size, those in groupby(order.sizes)]
    permutation = order.permutation
    if permutation is not None and len(permutation.generator) >= order.flat.nbytes:
        permutation = None  # the indices of few samples are shorter
    indices = permutation or (order.flat if isinstance(order.flat, list) else order.flat.tobytes())
    try:
        return msgspec.msgpack.encode(_Packed(order.dropped, sizes, indices, order.earlier, order.stream))
    except (TypeError, OverflowError) as error:
        problem = "the sampler gives indices that can't be sent to other workers"
        got = f"{type(order.flat[0]).__name__} ({error})"
        raise LoaderError(
            explain(
                problem,
                got=got,
                expected="numbers, strings or tuples of them",
                to_type="a sampler of numbers",
            )
        ) from None


def _narrow(numbers: NDArray[np.int64]) -> NDArray[Any]:
    """Return 32 bits for each number where that is enough; a reader infers the width from the length."""
    fits = numbers.size == 0 or (numbers.min() >= 0 and numbers.max() < 1 << 31)
    return numbers.astype(np.int32) if fits else numbers


def parted(order: EpochOrder, left: Ranges) -> tuple[EpochOrder, list[int]]:
    """Return an order whose `left` ranges are batches of their own, and the numbers of the batches that are done.

    The samples and their order stay the same.
    """
    bounds, done, end = array("q", [0]), list[int](), order.bounds[-1]
    for start, stop in (*left, (end, end)):
        if bounds[-1] < start:
            done.append(len(bounds) - 1)
            bounds.append(start)
        if start < stop:
            bounds.append(stop)
    return replace(order, bounds=bounds), done


def with_stream(order: bytes, stream: bytes) -> bytes:
    """Return a serialised order of an epoch over a stream that is dealt in this way."""
    return pack(replace(unpack(order), stream=stream))


@functools.lru_cache(maxsize=1)
def unpack(message: bytes) -> EpochOrder:
    """Return a received order. Workers in one process that receive the same bytes share it: it must not be changed."""
    try:
        packed = _PACKED.decode(message)
    except msgspec.MsgspecError:
        problem, got = "this worker begins an epoch while others do something else", "loops of unequal lengths"
        expected = "the same epochs at every worker: each has its own number of batches, and the loader knows it"
        raise LoaderError(explain(problem, got=got, expected=expected, to_type="for batch in loader: ...")) from None
    bounds = bounds_of([*chain.from_iterable(repeat(size, count) for size, count in packed.sizes)])
    found = packed.indices
    permutation = found if isinstance(found, Permutation) else None
    flat: Any
    if isinstance(found, Permutation):
        flat = found.repeated()[: bounds[-1]]
    elif isinstance(found, bytes):
        flat = np.frombuffer(found, np.int32 if len(found) == 4 * bounds[-1] else np.int64)
    else:
        flat = [_as_tuple(index) for index in found]
    return EpochOrder(flat, bounds, packed.dropped, packed.earlier, permutation, packed.stream)


def _as_tuple(index: Any) -> Any:
    return tuple(_as_tuple(item) for item in index) if isinstance(index, list) else index


class ShardedBatchSampler(BatchSampler):
    """Samples the batches that one worker loads. Each epoch's order is drawn when the first batch is requested.

    So torch's loader draws from the random generator what it always draws, in the usual order. `assign` returns the
    assignment for an order that was drawn.
    """

    def __init__(
        self,
        draw: Callable[[], EpochOrder],
        assign: Callable[[EpochOrder], BatchAssignment],
        worker: int,
        arrangement: Arrangement,
    ) -> None:
        self._draw, self._deals, self._worker, self._arrangement = draw, assign, worker, arrangement
        self._assigned: tuple[EpochOrder, BatchAssignment] | None = None
        self._upcoming: Iterator[Ranges] | None = None
        self.ahead: BatchAssignment | None = None
        """Copy of the assignment that assigns the batches which the loader loads ahead."""

    def begin(self, order: EpochOrder | None = None, batch_assignment: BatchAssignment | None = None) -> None:
        """Begin an epoch. Its order is drawn on first use, unless it is known, with the assignment so far."""
        self._assigned, self._upcoming = None, None
        if order is not None and batch_assignment is not None:
            self._assigned = order, batch_assignment
            self.look_ahead()

    def look_ahead(self) -> None:
        """Recompute this worker's upcoming batches; iterators that start after this call yield them."""
        self.ahead = self.batch_assignment.copied()
        self._upcoming = self.ahead.rest(self._worker)

    @property
    def order(self) -> EpochOrder:
        """Order of this epoch."""
        return self._drawn()[0]

    def enter(self, ranges: Ranges) -> bool:
        """Prepare for the batch of these ranges. Return False if this process loads none of its samples."""
        return self._arrangement.enter(self.order.flat, ranges)

    def append(self, indices: Batch) -> EpochOrder:
        """Append samples to the order of this epoch, and return the new order."""
        order, batch_assignment = self._drawn()
        self._assigned = order.appended(indices), batch_assignment
        return self._assigned[0]

    @property
    def batch_assignment(self) -> BatchAssignment:
        """Assignment of this epoch's batches to workers."""
        return self._drawn()[1]

    def _drawn(self) -> tuple[EpochOrder, BatchAssignment]:
        if self._assigned is None:
            order = self._draw()
            self._assigned = order, self._deals(order)
            self.look_ahead()
        return self._assigned

    def __iter__(self) -> Iterator[Batch]:
        return self._indices(self._upcoming)

    def _indices(self, ahead: Iterator[Ranges] | None) -> Iterator[Batch]:
        order = self.order
        for pieces in ahead or self._upcoming or ():
            if pieces:
                first, *others = order.among(pieces)
                if loaded := self._arrangement.loaded(list(chain(first, *others)) if others else first):
                    yield loaded

    def __len__(self) -> int:
        return sum(1 for pieces in self.batch_assignment.upcoming(self._worker) if pieces)


def rebuilt(loader: DataLoader[Any], sampler: BatchSampler, processes: int) -> DataLoader[Any]:
    """Return the script's loader with this sampler and number of loader processes, and otherwise the same settings."""
    bare = loader.batch_sampler is None
    ahead = processes > 0
    data: Any = loader.dataset
    collate = _Unbatched(loader.collate_fn) if bare else loader.collate_fn
    if type(data) is TensorDataset and collate is default_collate and not ahead:
        return _Rows(data, batch_sampler=sampler, pin_memory=loader.pin_memory, generator=loader.generator)
    return DataLoader(
        data,
        batch_sampler=sampler,
        num_workers=processes,
        collate_fn=collate,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout if ahead else 0,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if ahead else None,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor if ahead else None,
        persistent_workers=loader.persistent_workers and ahead,
    )


class _Rows(DataLoader[Any]):
    """A loader of a TensorDataset that indexes all rows of a batch at once, with the same result as stacking them."""

    def __iter__(self) -> Iterator[list[torch.Tensor]]:  # type: ignore[override]
        super().__iter__()  # draws from the random generator what torch's loader draws
        assert self.batch_sampler is not None
        batches = map(self._rows, iter(self.batch_sampler))
        is_pinned = self.pin_memory and accelerator() is not None
        return ([item.pin_memory() for item in batch] for batch in batches) if is_pinned else batches

    def _rows(self, indices: Batch) -> list[torch.Tensor]:
        data: Any = self.dataset
        if set(map(type, indices)) != {int}:
            found: list[torch.Tensor] = default_collate([data[index] for index in indices])
            return found
        rows = torch.from_numpy(np.array(indices, dtype=np.int64))
        return [item[rows.to(item.device)].contiguous() for item in data.tensors]


@dataclass(frozen=True)
class _Unbatched:
    """Collate function of a loader that does not batch: converts its single item as the script's loader would."""

    convert: Any

    def __call__(self, items: list[Any]) -> Any:
        return self.convert(items[0])


class IndexBatches(DataLoader[Any]):
    """The batches of a loader whose sampler does not end, as indices: arrays of numbers, or lists of other indices.

    `global_batch_of` batches of the script are one.
    """

    def __init__(self, loader: DataLoader[Any], global_batch_of: int = 1) -> None:
        given: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
        if loader.batch_sampler is None:
            given = {"sampler": loader.sampler, "batch_size": None}
        super().__init__(loader.dataset, generator=loader.generator, **given)
        self._global_batch_of = global_batch_of

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = map(_as_list, _sampler(self))
        while several := list(islice(batches, self._global_batch_of)):
            indices = list(chain(*several))
            yield np.array(indices) if all(type(index) is int for index in indices) else indices


def indices_of(batch: Any, part: int = 0, parts: int = 1) -> Batch:
    """Return one part of the indices of a batch, as a loader takes them.

    >>> indices_of(np.arange(5), 1, 2)
    [3, 4]
    """
    start, stop = portion(len(batch), part, parts)
    found: Batch = batch[start:stop].tolist() if isinstance(batch, np.ndarray) else batch[start:stop]
    return found


def loaded(loader: DataLoader[Any], processes: int, batches: Iterator[Any]) -> Iterator[Any]:
    """Return the batches of these indices; loader processes read the indices ahead."""
    return iter(rebuilt(loader, _Given(map(indices_of, batches)), processes))


class _Given(BatchSampler):
    """Samples batches of indices that are given."""

    def __init__(self, indices: Iterator[Batch]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[Batch]:
        return self._indices


def joined(loader: Iterable[Any], global_batch_of: int) -> Iterator[Any]:
    """Yield sets of `global_batch_of` batches of a loader without an order, as one batch each."""
    batches = iter(loader)
    while several := list(islice(batches, global_batch_of)):
        yield _concatenated(several)


def _concatenated(batches: list[Any]) -> Any:
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(batches)
    if isinstance(first, dict):
        return {key: _concatenated([item[key] for item in batches]) for key in first}
    return type(first)(_concatenated(list(column)) for column in zip(*batches, strict=True))


def samples_in(batch: Any) -> int:
    """Return the number of samples of a batch: the first dimension of the first tensor in it.

    A number stands for a batch that the script makes in its loop, and counts as one sample.

    >>> samples_in((torch.ones(4, 2), torch.ones(4))), samples_in(7)
    (4, 1)
    """
    if isinstance(batch, Window):
        return sum(map(samples_in, batch))
    found = 1 if isinstance(batch, int) else _leading(batch)
    if found is None:
        problem = "a batch has no tensor that shows its number of samples"
        raise LoaderError(
            explain(
                problem,
                got=type(batch).__name__,
                expected="tensors, or tuples, lists or dicts of them",
                to_type="a collate_fn that returns tensors",
            )
        )
    return found


def _leading(batch: Any) -> int | None:
    if isinstance(batch, torch.Tensor | np.ndarray):
        return int(batch.shape[0]) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((found for item in parts if (found := _leading(item)) is not None), None)
