"""Tensors as bytes in a message: their dtype, their shape and their numbers. For what travels seldom."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from stretto.errors import TransportError

Packed: TypeAlias = tuple[str, list[int], bytes]


def packed(tensor: Tensor) -> Packed:
    """A tensor of any shape, on any device."""
    octets = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), octets.numpy().tobytes()


def unpacked(one: Packed) -> Tensor:
    """The tensor again, on the CPU. Raises TransportError when it is none."""
    name, shape, content = one
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TransportError(f"a tensor of {name:.20} was told")
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)
