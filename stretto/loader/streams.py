"""Streams among several workers: every sample once, or an error.

A stream is assigned in one of two ways. Either all workers read the same stream in the same order, and each keeps one
batch in N; or the stream is sharded by its own library, and each worker keeps all batches of its shard. The first needs
one order: a stream that shuffles by the global random generators draws from a random state that all workers share. The
second is known for the libraries in `sharded_by`, or asked for by `deal="own"`. The workers compare digests of their
first batches, so that streams which differ for another reason end with an error.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import torch

from stretto.errors import LoaderError, StaysOutError, explain
from stretto.loader.stream_reader import StreamReader
from stretto.transport import Transport

DIGEST_BYTES = 8
DEEPEST = 6
"""Number of nested wrappers around a data set that are searched."""


def sharded_by(loader: Any, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the name of the library that gives each worker a shard of its own; None if none is known to.

    WebDataset and torchdata split by RANK and WORLD_SIZE, `datasets.distributed.split_dataset_by_node` by what it was
    given.
    """
    several = environment.get("WORLD_SIZE", "1") != "1"
    for one in _wrapped(loader):
        library = type(one).__module__.partition(".")[0]
        split = getattr(one, "_distributed", None)
        if split is not None and getattr(split, "world_size", 1) > 1:
            return f"split_dataset_by_node of {library}"
        if several and library in ("webdataset", "torchdata"):
            return library
    return None


def _wrapped(loader: Any) -> Iterator[Any]:
    """Yield the loader, and the data sets and pipelines within it."""
    level = [loader]
    for _ in range(DEEPEST):
        yield from level
        names = ("dataset", "source", "datapipe", "source_datapipe", "pipeline")
        inner = [found for one in level for name in names if (found := _attributes(one).get(name)) is not None]
        level = [one for found in inner for one in (found if isinstance(found, list | tuple) else [found])]


def _attributes(one: Any) -> Mapping[str, Any]:
    """Return the attributes of an object; none where it keeps no dictionary of them."""
    return getattr(one, "__dict__", {})


def compare_first(
    reader: StreamReader, transport: Transport, is_own: bool, joined: Iterable[int] | None = None
) -> None:
    """Compare the workers' next batches; a worker that joins compares its own with those of the workers `joined`.

    Raises LoaderError, at every worker, if streams that all workers read in one order differ, or if shards that are
    each a worker's own are equal: a script that shards by environment variables which are not set reads the whole
    stream at every worker. Raises StaysOutError only at a worker that joins, if its stream is not that of the others.
    """

    def first() -> bytes:  # of the workers that are present, also if the comparison is repeated
        return msgspec.msgpack.encode([digests(one) for one in reader.peek(1 if is_own else transport.workers)])

    found = transport.all_gather_bytes(first)
    if joined is None:
        (_refuse_equal if is_own else _refuse_different)(found)
    elif any(
        found[transport.members.index(one)] != found[transport.worker] for one in joined if one in transport.members
    ):
        raise StaysOutError("this worker can't join in the middle of a stream: it reads other batches than the others")


def _refuse_equal(encoded: Sequence[bytes]) -> None:
    """Raise LoaderError if two workers' digests are equal, unless all samples of the batch are."""
    seen: dict[bytes, int] = {}
    for worker, text in enumerate(encoded):
        samples = list(chain.from_iterable(msgspec.msgpack.decode(text, type=list[list[bytes]])))
        if not samples or (len(samples) > 1 and len(set(samples)) == 1):
            continue
        other = seen.setdefault(text, worker)
        if other != worker:
            raise LoaderError(
                explain(
                    f"workers {other} and {worker} begin with the same batch, but each was to read a shard of its own",
                    got="a stream that is the same at several workers; `stretto run` does not set RANK and WORLD_SIZE",
                    expected="another part of the samples at each worker",
                    to_type="stretto.rank() and stretto.world_size() instead of environment variables, or a stream "
                    "that is not sharded, without deal=",
                )
            )


def _refuse_different(told: Sequence[bytes]) -> None:
    if len(set(told)) == 1:
        return
    found = [msgspec.msgpack.decode(one, type=list[list[bytes]]) for one in told]
    samples = [set(chain.from_iterable(batches)) for batches in found]
    shared = any(one & other for at, one in enumerate(samples) for other in samples[:at])
    if shared:
        problem = "the workers' streams hold the same samples in another order"
        got = "first batches that overlap, but are not the same"
        to_type = "a shuffle with a seed that is the same at every worker"
    else:
        problem = "the workers' streams differ, and it is not known whether each is a shard of its own"
        got = "first batches without a common sample"
        to_type = (
            'stretto.distribute(..., deal="own") if each worker reads its own shard; deal="round-robin" if all read '
            "the same samples in the same order, changed by random numbers of their own"
        )
    expected = "the same batches in the same order at every worker, or one shard for each"
    raise LoaderError(explain(problem, got=got, expected=expected, to_type=to_type))


def digests(batch: Any) -> list[bytes]:
    """Return a digest of each sample of a batch: row i of everything in it that has rows."""
    columns = list(_columns(batch))
    rows = max((len(column) for column in columns), default=0)
    return [_digest(column[row] for column in columns if row < len(column)) for row in range(rows)]


def _digest(values: Iterable[Any]) -> bytes:
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for value in values:
        found.update(value.tobytes() if isinstance(value, np.ndarray | np.generic) else repr(value).encode())
    return found.digest()


def _columns(batch: Any) -> Iterator[Any]:
    """Yield the parts of a batch that have a row for each sample."""
    if isinstance(batch, torch.Tensor):
        plain = batch.detach().cpu()
        yield from _columns((plain if plain.dtype != torch.bfloat16 else plain.float()).numpy())
    elif isinstance(batch, np.ndarray):
        yield np.ascontiguousarray(batch) if batch.ndim else batch.reshape(1)
    elif isinstance(batch, Mapping):
        for one in batch.values():
            yield from _columns(one)
    elif isinstance(batch, list | tuple) and any(isinstance(one, torch.Tensor | np.ndarray) for one in batch):
        for one in batch:
            yield from _columns(one)
    elif isinstance(batch, list | tuple):
        yield batch
