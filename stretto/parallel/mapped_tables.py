"""Tensors in memory-mapped files, of which memory holds the pages in use."""

from __future__ import annotations

import mmap
import tempfile

import torch
from torch import Tensor

from stretto.transport.tensor_bytes import octets

SMALL_BYTES = 1 << 20
"""Bytes up to which a tensor is not moved to a file."""


def moved_to_file(tensor: Tensor) -> Tensor:
    """Return a tensor with these values, in a file without a name in the folder of temporary files.

    Returns the tensor itself if it is small, or the disk is full. The file ends with the returned tensor's memory.
    """
    if tensor.nbytes <= SMALL_BYTES:
        return tensor
    try:
        with tempfile.TemporaryFile(prefix="stretto-", buffering=0) as file:
            content = octets(tensor).data
            while content:
                content = content[file.write(content) :]
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError:
        return tensor
    return torch.frombuffer(mapped, dtype=tensor.dtype).view(tensor.shape)


class MappedTables:
    """Files of one process without a name, in the folder of temporary files. They end with the process."""

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []

    def moved(self, table: Tensor) -> Tensor:
        """Return the table in a file of its own."""
        return self.zeros(table).copy_(table)

    def zeros(self, table: Tensor) -> Tensor:
        """Return zeros like a table, in a file of their own, which takes no space before it is written."""
        with tempfile.NamedTemporaryFile(prefix="stretto-table-") as file:
            file.truncate(max(table.nbytes, 1))
            mapped = mmap.mmap(file.fileno(), max(table.nbytes, 1))
        self._maps.append(mapped)
        return torch.frombuffer(mapped, dtype=table.dtype, count=table.numel()).view(table.shape)

    def release(self) -> None:
        """Let memory drop all pages; a page in use is read again, from the system's cache of the file or from disk."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)
