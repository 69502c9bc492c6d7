"""What every kernel in Triton needs: the language, where it is there, and one way to start a kernel.

The modules beside this one can be imported without Triton; then their functions can't be called.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["THERE", "Pointer", "Values", "kernel", "launch", "options", "plain", "power_of_two", "programs_for", "tl"]

THERE = importlib.util.find_spec("triton") is not None
"""Whether Triton is installed."""

if THERE:
    import triton
    import triton.language as tl
else:
    triton = tl = None

if TYPE_CHECKING or not THERE:
    Pointer: TypeAlias = Any
    """Where a tensor begins, in a kernel."""
    Values: TypeAlias = Any
    """Numbers that a program of a kernel works on at once."""
else:
    Pointer, Values = tl.pointer_type, tl.tensor

NUMBERS = 2048
"""How many numbers one program works on, if nothing else is said; 8 in each of its threads."""


def kernel(function: Callable[..., Any]) -> Any:
    """A function in Triton's language: what `launch` starts, or another kernel calls."""
    return triton.jit(function) if THERE else function


def launch(started: Any, programs: int, *arguments: Any, numbers: int = NUMBERS, **constants: Any) -> None:
    """Run so many programs of a kernel on so many numbers each, on the device of its first argument."""
    with torch.cuda.device(arguments[0].get_device()):
        started[(programs,)](*arguments, **options(numbers), **constants)


def options(numbers: int = NUMBERS) -> dict[str, Any]:
    """How a kernel is compiled: products and sums are rounded one by one, never fused, as the reference rounds them."""
    return {"num_warps": min(max(numbers // 256, 1), 8), "enable_fp_fusion": False}


def plain(*tensors: Tensor | None) -> None:
    """Raise ValueError unless the tensors that are there are as a kernel reads them: float32, flat, of one length."""
    first = tensors[0]
    for one in tensors:
        if one is not None and not (
            first is not None
            and one.dtype == torch.float32
            and one.is_contiguous()
            and one.numel() == first.numel()
            and one.device == first.device
        ):
            raise ValueError(
                "a kernel takes contiguous float32 tensors of one length and one device, "
                f"and got one of {one.dtype}, shape {tuple(one.shape)}, strides {one.stride()} on {one.device}"
            )


def programs_for(numbers: int, each: int = NUMBERS) -> int:
    """How many programs work on so many numbers."""
    return -(-numbers // each)


def power_of_two(number: int) -> int:
    """The least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
