"""The order of a pass: drawn once, by worker 0, and known to all; each worker loads its own batches of it."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, TensorDataset, default_collate

from stretto.data.assignment import BatchAssignment, Ranges, bounds_of
from stretto.errors import LoaderError, explain
from stretto.transport import Transport
from stretto.transport.elastic import ElasticTransport

Batch = list[Any]
"""The indices of one batch, as a batch sampler gives them."""


ENDLESS = 50_000_000
"""A sampler that gives more batches than this is taken for endless."""


@dataclass(frozen=True)
class EpochOrder:
    """The batches of one pass, in order. `dropped` samples of the data set are in none of them.

    `peeks` numbers the iterations before it that were no pass, for a worker that comes later.
    """

    batches: Sequence[Batch]
    dropped: int
    peeks: Sequence[int] = ()

    @functools.cached_property
    def sizes(self) -> list[int]:
        """The samples of each batch."""
        return [len(batch) for batch in self.batches]

    @functools.cached_property
    def bounds(self) -> array[int]:
        """Where each batch begins, and the last one ends, among all samples."""
        return bounds_of(self.sizes)

    @functools.cached_property
    def flat(self) -> Batch:
        """The indices of all samples."""
        return list(chain.from_iterable(self.batches))

    def among(self, pieces: Ranges) -> list[Batch]:
        """The indices in these ranges of all samples."""
        return [self.flat[start:stop] for start, stop in pieces]


class _Packed(msgspec.Struct):
    """An order as it travels: sizes and indices as raw 64-bit numbers, or any indices one by one."""

    dropped: int
    sizes: bytes
    numbers: bytes
    others: list[Any] | None
    peeks: list[int] = []


def draw(
    loader: DataLoader[Any],
    wire: Transport,
    join: int,
    peeks: Sequence[int] = (),
    arranged: Callable[[list[Batch]], list[Batch]] = lambda batches: batches,
) -> EpochOrder:
    """Draw the order of the next pass at worker 0 and tell it to all. `join` batches of the script make one."""
    if wire.workers == 1 and not isinstance(wire, ElasticTransport):
        return replace(_drawn(loader, join, arranged), peeks=peeks)
    return unpack(wire.broadcast_bytes(lambda: pack(replace(_drawn(loader, join, arranged), peeks=peeks))))


def in_parts(batches: Sequence[Batch], parts: int) -> list[Batch]:
    """Return the even parts of each batch, without empty ones; the first parts are the larger ones.

    >>> in_parts([[0, 1, 2], [3]], 2)
    [[0, 1], [2], [3]]
    """
    cuts = ([portion(len(batch), part, parts) for part in range(parts)] for batch in batches)
    return [
        batch[start:stop] for batch, found in zip(batches, cuts, strict=True) for start, stop in found if start < stop
    ]


def portion(samples: int, part: int, parts: int) -> tuple[int, int]:
    """Return the first position of one even part among several, and the position after its last."""
    each, over = divmod(samples, parts)
    start = each * part + min(part, over)
    return start, start + each + (part < over)


def cut_stream(batches: Iterable[Any], part: int, parts: int) -> Iterator[Any]:
    """Give one part of each batch; None in place of a part without a sample."""
    for batch in batches:
        start, stop = portion(samples_in(batch), part, parts)
        yield _rows_between(batch, start, stop) if start < stop else None


def _rows_between(batch: Any, start: int, stop: int) -> Any:
    """Take these samples of everything in a batch that has a row for each."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return batch[start:stop]
    if isinstance(batch, dict):
        return {key: _rows_between(one, start, stop) for key, one in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_rows_between(one, start, stop) for one in batch))
    if isinstance(batch, list | tuple) and _leading(batch) is None:
        return batch[start:stop]
    if isinstance(batch, list | tuple):
        return type(batch)(_rows_between(one, start, stop) for one in batch)
    return batch


def interleaved(batches: Sequence[Batch], stretches: int) -> list[Batch]:
    """Return the batches in an order in which every N-th one is of the same contiguous stretch of them.

    Dealt in turn to as many workers each gets one stretch, in order; the first stretches are the longer ones.

    >>> interleaved([[0], [1], [2], [3], [4]], 2)
    [[0], [3], [1], [4], [2]]
    """
    each, over = divmod(len(batches), stretches)
    starts = [each * one + min(one, over) for one in range(stretches)]
    rounds = (starts if at < each else starts[:over] for at in range(each + (over > 0)))
    return [batches[start + at] for at, those in enumerate(rounds) for start in those]


def _drawn(loader: DataLoader[Any], join: int, arranged: Callable[[list[Batch]], list[Batch]]) -> EpochOrder:
    batches: list[Batch] = [_as_list(batch) for batch in islice(_sampler(loader), ENDLESS + 1)]
    if len(batches) > ENDLESS:
        problem = "the sampler gives no end of batches, so a pass over it can't be shared out"
        raise LoaderError(
            explain(
                problem,
                got=f"more than {ENDLESS:,}",
                expected="a sampler that ends",
                to_type="a sampler with num_samples",
            )
        )
    batches = arranged(batches)
    if join > 1:
        batches = [list(chain(*batches[at : at + join])) for at in range(0, len(batches), join)]
    drops = getattr(loader, "drop_last", False) or getattr(loader.batch_sampler, "drop_last", False)
    handed = sum(len(batch) for batch in batches)
    return EpochOrder(batches, max(len(loader.sampler) - handed, 0) if drops else 0)  # type: ignore[arg-type]


def _sampler(loader: DataLoader[Any]) -> Iterable[Any]:
    """What gives the loader its indices: batches, or single ones when it does not batch."""
    return loader.batch_sampler if loader.batch_sampler is not None else loader.sampler


def _as_list(batch: Any) -> Batch:
    indices = list(batch) if isinstance(batch, list | tuple) else [batch]
    if indices and isinstance(indices[0], np.integer | torch.Tensor):  # a sampler over an array of indices
        return [one.item() if isinstance(one, np.integer | torch.Tensor) else one for one in indices]
    return indices


def pack(order: EpochOrder) -> bytes:
    """An order as bytes, to be told. Raises LoaderError when its indices can't be."""
    flat = [index for batch in order.batches for index in batch]
    sizes = np.array(order.sizes, dtype=np.int64).tobytes()
    if all(type(index) is int for index in flat):
        numbers = np.array(flat, dtype=np.int64)
        return msgspec.msgpack.encode(_Packed(order.dropped, sizes, _narrow(numbers), None, list(order.peeks)))
    try:
        return msgspec.msgpack.encode(_Packed(order.dropped, sizes, b"", flat, list(order.peeks)))
    except TypeError as error:
        problem = "the sampler gives indices that can't be told to other workers"
        got = f"{type(flat[0]).__name__} ({error})"
        raise LoaderError(
            explain(
                problem,
                got=got,
                expected="numbers, strings or tuples of them",
                to_type="a sampler of numbers",
            )
        ) from None


def _narrow(numbers: NDArray[np.int64]) -> bytes:
    """32 bits a number where that is enough; the reader tells by the length."""
    fits = numbers.size == 0 or (numbers.min() >= 0 and numbers.max() < 1 << 31)
    return numbers.astype(np.int32).tobytes() if fits else numbers.tobytes()


def parted(order: EpochOrder, left: Ranges) -> tuple[EpochOrder, list[int]]:
    """The same samples in the same order, what is `left` of them as batches of their own; and which batches are done.

    Cost: a list of all indices.
    """
    batches, done, at = list[Batch](), list[int](), 0
    for start, stop in (*left, (len(order.flat), len(order.flat))):
        if at < start:
            done.append(len(batches))
            batches.append(order.flat[at:start])
        if start < stop:
            batches.append(order.flat[start:stop])
        at = stop
    return EpochOrder(batches, order.dropped), done


@functools.lru_cache(maxsize=1)
def unpack(told: bytes) -> EpochOrder:
    """The order that was told. Workers of one process that were told the same share it: nobody changes it."""
    try:
        packed = msgspec.msgpack.decode(told, type=_Packed)
    except msgspec.MsgspecError:
        problem, got = "this worker begins a pass while others do something else", "loops of unequal lengths"
        expected = "the same passes at every worker: each has its own number of batches, and the loader knows it"
        raise LoaderError(explain(problem, got=got, expected=expected, to_type="for batch in loader: ...")) from None
    sizes = np.frombuffer(packed.sizes, dtype=np.int64).tolist()
    others = packed.others
    flat = _wide(packed.numbers, sum(sizes)) if others is None else [_frozen(index) for index in others]
    return EpochOrder([flat[start:stop] for start, stop in pairwise(bounds_of(sizes))], packed.dropped, packed.peeks)


def _wide(numbers: bytes, count: int) -> list[int]:
    kind = np.int32 if len(numbers) == 4 * count else np.int64
    found: list[int] = np.frombuffer(numbers, dtype=kind).tolist()
    return found


def _frozen(index: Any) -> Any:
    return tuple(_frozen(one) for one in index) if isinstance(index, list) else index


class ShardedBatchSampler(BatchSampler):
    """The batches that one worker loads. Their order is drawn anew in each pass, when the first is asked for.

    So torch's loader draws from the random generator what it always draws, in the order in which it always does.
    `deals` makes the deal of an order that was drawn.
    """

    def __init__(
        self, draw: Callable[[], EpochOrder], deals: Callable[[EpochOrder], BatchAssignment], worker: int
    ) -> None:
        self._draw, self._deals, self._worker = draw, deals, worker
        self._dealt: tuple[EpochOrder, BatchAssignment] | None = None
        self._ahead: Iterator[Ranges] | None = None

    def begin(self, order: EpochOrder | None = None, deal: BatchAssignment | None = None) -> None:
        """A pass begins: its order is drawn when it is asked for, unless it is known, with the deal so far."""
        self._dealt, self._ahead = None, None
        if order is not None and deal is not None:
            self._dealt = order, deal
            self.look_ahead()

    def look_ahead(self) -> None:
        """What this worker gets from here on is known anew: who iterates from now on sees it."""
        self._ahead = self.deal.upcoming(self._worker)

    @property
    def order(self) -> EpochOrder:
        """The order of this pass."""
        return self._drawn()[0]

    def extend(self, indices: Batch) -> EpochOrder:
        """Put further samples behind the order of this pass."""
        order, deal = self._drawn()
        self._dealt = EpochOrder([*order.batches, indices], order.dropped), deal
        return self._dealt[0]

    @property
    def deal(self) -> BatchAssignment:
        """Who gets what of it."""
        return self._drawn()[1]

    def _drawn(self) -> tuple[EpochOrder, BatchAssignment]:
        if self._dealt is None:
            order = self._draw()
            self._dealt = order, self._deals(order)
            self.look_ahead()
        return self._dealt

    def __iter__(self) -> Iterator[Batch]:
        return self._indices(self._ahead)

    def _indices(self, ahead: Iterator[Ranges] | None) -> Iterator[Batch]:
        flat = self.order.flat
        for pieces in ahead or self._ahead or ():
            if pieces:
                first, *others = (flat[start:stop] for start, stop in pieces)
                yield list(chain(first, *others)) if others else first

    def __len__(self) -> int:
        return sum(1 for pieces in self.deal.upcoming(self._worker) if pieces)


def rebuilt(loader: DataLoader[Any], share: BatchSampler, processes: int) -> DataLoader[Any]:
    """The script's loader with our batches in place of its own, made in so many processes; all else as it was."""
    bare = loader.batch_sampler is None
    ahead = processes > 0
    data: Any = loader.dataset
    collate = _Unbatched(loader.collate_fn) if bare else loader.collate_fn
    if type(data) is TensorDataset and collate is default_collate and not ahead:
        return _Rows(data, batch_sampler=share, pin_memory=loader.pin_memory, generator=loader.generator)
    return DataLoader(
        data,
        batch_sampler=share,
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
    """A loader of a TensorDataset that takes all rows of a batch at once, as one by one and stacked they would be."""

    def __iter__(self) -> Iterator[list[torch.Tensor]]:  # type: ignore[override]
        super().__iter__()  # draws from the random generator what torch's loader draws
        assert self.batch_sampler is not None
        batches = map(self._rows, iter(self.batch_sampler))
        is_pinned = self.pin_memory and torch.accelerator.is_available()
        return ([one.pin_memory() for one in batch] for batch in batches) if is_pinned else batches

    def _rows(self, indices: Batch) -> list[torch.Tensor]:
        data: Any = self.dataset
        if set(map(type, indices)) != {int}:
            found: list[torch.Tensor] = default_collate([data[index] for index in indices])
            return found
        rows = torch.from_numpy(np.array(indices, dtype=np.int64))
        return [one[rows].contiguous() for one in data.tensors]


@dataclass(frozen=True)
class _Unbatched:
    """For a loader that does not batch: one index, one item, converted as the script's loader would."""

    convert: Any

    def __call__(self, items: list[Any]) -> Any:
        return self.convert(items[0])


def joined(batches: Iterator[Any], join: int) -> Iterator[Any]:
    """Return the batches of a loader without an order, or sets of `join` of them as one."""
    if join == 1:
        yield from batches
        return
    while several := list(islice(batches, join)):
        yield _concatenated(several)


def _concatenated(batches: list[Any]) -> Any:
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(batches)
    if isinstance(first, dict):
        return {key: _concatenated([one[key] for one in batches]) for key in first}
    return type(first)(_concatenated(list(column)) for column in zip(*batches, strict=True))


def samples_in(batch: Any) -> int:
    """How many samples a batch holds: the first dimension of the first tensor in it."""
    found = _leading(batch)
    if found is None:
        problem = "a batch has no tensor that would tell how many samples it holds"
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
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return next((found for one in parts if (found := _leading(one)) is not None), None)
