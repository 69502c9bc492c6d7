"""A digest of the data that a loader reads from, as far as it can be known without reading samples."""

from __future__ import annotations

import hashlib
import os
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from stretto.errors import LoaderError, StaysOutError, explain
from stretto.transport.tensor_bytes import octets

LARGEST = 1 << 26
"""The bytes at either end of a tensor that enter its digest."""
ROWS = 32
"""The rows at either end of a sequence that enter its digest."""
DIGITS = 16
"""The hexadecimal digits of a digest."""
DEEPEST = 6
"""Number of nested data sets, or of nested lists in a row, that are searched."""
COLUMNS = 64
"""Most entries of a dictionary in a data set that are taken for its columns."""


def digest_of(loader: Any) -> str:
    """Return a digest of the data: lengths, the indices of subsets, the numbers of tensors; no sample is asked for.

    >>> digest_of([1, 2]) == digest_of([1, 2])
    True
    """
    digest = hashlib.sha256()
    for piece in _pieces(getattr(loader, "dataset", loader)):
        digest.update(piece)
    return digest.hexdigest()[:DIGITS]


def rows_digest(loader: Any) -> str:
    """Return a digest of the data, of the rows that data sets hold in memory, and of the sampler's indices.

    No sample is asked for, since a data set may draw random numbers for it.

    >>> rows_digest([1, 2]) == rows_digest([2, 1])
    False
    """
    digest = hashlib.sha256(digest_of(loader).encode())
    data = getattr(loader, "dataset", loader)
    for piece in _rows(data, DEEPEST):
        digest.update(piece)
    batches = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
        for value in getattr(sampler, "__dict__", {}).values():
            if value is not data and _is_rows(value):
                digest.update(_ends(value))
    return digest.hexdigest()[:DIGITS]


def _is_rows(value: Any) -> bool:
    """Return True for a sequence or table whose ends can be read without drawing random numbers."""
    if _is_table(value) or _is_frame(value):
        return True
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and value.layout is torch.strided
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and not value.dtype.hasobject
    return isinstance(value, list | tuple | range)


def _is_table(value: Any) -> bool:
    """Return True for a table of pyarrow, or of `datasets`, which keeps rows and the indices of selections in them."""
    return all(hasattr(value, name) for name in ("slice", "to_pydict", "num_rows"))


def _is_frame(value: Any) -> bool:
    """Return True for a frame or a series of pandas."""
    return type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "iloc")


def _rows(data: Any, depth: int) -> Iterator[bytes]:
    """Yield the ends of the sequences in a data set that are as long as it, and of those in nested data sets."""
    if _is_rows(data):
        yield _ends(data)
    elif depth and hasattr(data, "__dict__"):
        for value in vars(data).values():
            if isinstance(value, Dataset):
                yield from _rows(value, depth - 1)
            columns = value.values() if isinstance(value, dict | UserDict) and len(value) <= COLUMNS else [value]
            yield from (_ends(column) for column in columns if _is_rows(column) and _length(column) >= len(data))


def _length(rows: Any) -> int:
    return int(rows.num_rows) if _is_table(rows) else len(rows)


def _ends(rows: Any) -> bytes:
    length = _length(rows)
    last = max(length - ROWS, 0)
    if _is_table(rows):
        ends = [rows.slice(0, ROWS).to_pydict(), rows.slice(last, ROWS).to_pydict()]
    elif _is_frame(rows):
        ends = [rows.iloc[:ROWS].to_numpy().tolist(), rows.iloc[last:].to_numpy().tolist()]
    else:
        ends = [*rows[:ROWS], *rows[last:]]
    return b"".join((str(length).encode(), *(_row(one) for one in ends)))


def _row(value: Any, depth: int = DEEPEST) -> bytes:
    """Return the bytes of a row; of a path only its last name, since folders may be a worker's own."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return octets(value).tobytes()
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return value.tobytes()
    if isinstance(value, str | os.PathLike):
        return Path(value).name.encode(errors="surrogateescape")
    if isinstance(value, dict | list | tuple) and depth:
        return b"".join(_row(one, depth - 1) for one in (value.values() if isinstance(value, dict) else value))
    return repr(value).encode() if isinstance(value, int | float | bytes) else type(value).__name__.encode()


def refuse_different_rows(digests: list[str]) -> None:
    """Raise LoaderError unless the digests of all workers are equal."""
    other = next((worker for worker, one in enumerate(digests) if one != digests[0]), None)
    if other is None:
        return
    raise LoaderError(
        explain(
            f"the data of worker {other} differ from those of worker 0, and each epoch is dealt among the workers",
            got="a data set or a sampler that the script has split by worker, drawn with other random numbers, or made "
            "of files in the order in which a folder lists them",
            expected="the whole data set, in the same order, at every worker",
            to_type="sort the list of files: sorted(glob(...)), sorted(os.listdir(...)); DataLoader(dataset, "
            "shuffle=True) without stretto.rank(); random_split(..., generator=torch.Generator().manual_seed(0))",
        )
    )


def _pieces(data: Any) -> Iterator[bytes]:
    yield type(data).__name__.encode()
    try:
        yield str(len(data)).encode()
    except TypeError:  # a stream
        return
    match data:
        case Subset():
            yield np.asarray(data.indices).astype(np.int64).tobytes()
            yield from _pieces(data.dataset)
        case ConcatDataset():
            for one in data.datasets:
                yield from _pieces(one)
        case TensorDataset():
            for tensor in data.tensors:
                numbers = octets(tensor)
                yield numbers[:LARGEST].tobytes()
                yield numbers[LARGEST:][-LARGEST:].tobytes()


def refuse_other_data(data: str, known: str, problem: str) -> None:
    """Raise StaysOutError if a section has other data than are known of it; "" if none are."""
    if known not in ("", data):
        raise StaysOutError(f"this worker {problem}: it drew them with other random numbers")
