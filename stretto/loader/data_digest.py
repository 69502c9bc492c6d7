"""A digest of the data that a loader reads from, as far as it can be known without reading samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from stretto.errors import LogError, StaysOutError
from stretto.run_dir import read_run
from stretto.strategies.tensor_sync import octets

LARGEST = 1 << 26
"""The bytes at either end of a tensor that enter its digest."""


def digest_of(loader: Any) -> str:
    """Return a digest of the data: lengths, the indices of subsets, the numbers of tensors; no sample is asked for.

    >>> digest_of([1, 2]) == digest_of([1, 2])
    True
    """
    digest = hashlib.blake2b(digest_size=8)
    for piece in _pieces(getattr(loader, "dataset", loader)):
        digest.update(piece)
    return digest.hexdigest()


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


def refuse_other_data(data: str, folder: Path | None, problem: str) -> None:
    """Raise StaysOutError if the section that a folder is of has other data."""
    try:
        known = read_run(folder).get("data", data) if folder is not None else data
    except (LogError, msgspec.DecodeError):
        return
    if known != data:
        raise StaysOutError(f"this worker {problem}: it drew them with other random numbers")
