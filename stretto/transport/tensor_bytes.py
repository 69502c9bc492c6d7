"""Tensors as bytes in a message: dtype, shape and numbers. For messages that are rare."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.errors import TransportError

Packed: TypeAlias = tuple[str, list[int], bytes]

SMALL_BYTES = 1 << 12
"""Bytes up to which a tensor is copied before an array has its memory."""


def octets(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a tensor's elements in contiguous order, without a copy if it is large and so on the CPU.

    A tensor whose memory an array has cannot be resized any more, as buffers of observers are; those are small.
    """
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    flat = flat.clone() if flat.nbytes <= SMALL_BYTES else flat
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def packed(tensor: Tensor) -> Packed:
    """Pack a tensor of any shape, on any device."""
    return dtype_name(tensor), list(tensor.shape), octets(tensor).tobytes()


def unpacked(one: Packed) -> Tensor:
    """Return the packed tensor, on the CPU. Raise TransportError if its dtype is unknown."""
    name, shape, content = one
    dtype = dtype_of(name)
    if not content:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


def dtype_name(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype.

    >>> dtype_name(torch.zeros(2))
    'float32'
    """
    return str(tensor.dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of this name. Raise TransportError if it is unknown."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TransportError(f"received a tensor of unknown dtype {name:.20}")
    return dtype
