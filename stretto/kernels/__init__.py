"""Kernels of codecs, for each device: `on(tensor)` returns the module that fits a tensor.

`native` (C++: float32 on the CPU) and `reference` (torch operations: every device and dtype) have the same functions
and the same results. Where the native kernels are not built, or are older than their source, the reference is used, and
one line on stderr says so. `STRETTO_KERNELS=reference` selects the reference.
"""

from __future__ import annotations

import hashlib
import os
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from stretto.errors import StrettoError, explain
from stretto.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

HOUSE = Path(__file__).parent


def on(tensor: Tensor) -> ModuleType:
    """Return the kernels for a tensor's device, dtype and layout."""
    from stretto.kernels import reference

    if tensor.dtype != torch.float32 or not tensor.is_contiguous() or _reference_asked():
        return reference
    return _of_cpu() or reference if tensor.device.type == "cpu" else reference


def is_native() -> bool:
    """Return True if the native kernels can be used, and the reference was not selected."""
    return not _reference_asked() and why_not_native() is None


def why_not_native(house: Path = HOUSE) -> str | None:
    """Return why the native kernels can't be used; None if they can."""
    try:
        built = import_module("stretto.kernels._native").SOURCES
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError)
        return "they are not built" if is_missing else f"they can't be loaded ({error})"
    return None if digest(house) in (built, None) else "they are older than their source, or newer"


def digest(house: Path = HOUSE) -> str | None:
    """Return a hash of the sources beside this file; None without sources, as in a wheel."""
    sources = sorted([*house.glob("*.cpp"), *house.glob("*.hpp")])
    digests = "".join(hashlib.sha256(source.read_bytes()).hexdigest() for source in sources)
    return hashlib.sha256(digests.encode()).hexdigest() if sources else None


def _reference_asked() -> bool:
    requested = os.environ.get("STRETTO_KERNELS", "")
    if requested not in ("", "reference"):
        expected = "reference, or nothing for the quickest that fit"
        problem = "STRETTO_KERNELS names no kernels that can be asked for"
        raise StrettoError(explain(problem, got=requested, expected=expected, to_type="STRETTO_KERNELS=reference"))
    return requested == "reference"


@cache
def _of_cpu() -> ModuleType | None:
    reason = why_not_native()
    if reason is None:
        return import_module("stretto.kernels.native")
    if os.environ.get("STRETTO_RANK", os.environ.get("RANK", "0")) == "0":
        sys.stderr.write(
            f"stretto: without native kernels: {reason}. Codecs compute the same with torch operations, many times "
            "slower. With a C++ compiler at hand `pip install .` builds them (`pip install -e .` in a clone).\n"
        )
    return None
