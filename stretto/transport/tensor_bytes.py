"""Tensors as bytes in a message: dtype, shape and numbers. For messages that are rare."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from stretto.errors import TransportError

Packed: TypeAlias = tuple[str, list[int], bytes]


def packed(tensor: Tensor) -> Packed:
    """Pack a tensor of any shape, on any device."""
    octets = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), octets.numpy().tobytes()


def unpacked(one: Packed) -> Tensor:
    """Return the packed tensor, on the CPU. Raise TransportError if its dtype is unknown."""
    name, shape, content = one
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TransportError(f"received a tensor of unknown dtype {name:.20}")
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)
