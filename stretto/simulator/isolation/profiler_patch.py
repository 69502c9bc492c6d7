"""No-op replacement of torch's profiler ranges while no profiler runs; they take a tenth of a small step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import profiler


class _OptionalRange(profiler.record_function):
    """A range that is recorded only if a profiler is enabled when it begins."""

    def __enter__(self) -> Any:
        if torch._C._autograd._profiler_enabled():
            return super().__enter__()  # type: ignore[no-untyped-call]
        self.record = None
        return self

    def __exit__(self, *error: Any) -> None:
        if self.record is not None:
            super().__exit__(*error)


@contextmanager
def without_profiler_ranges() -> Iterator[None]:
    """Let torch record profiler ranges, such as those of optimizers, only while a profiler is enabled."""
    original: Any = profiler.record_function
    profiler.record_function = _OptionalRange  # type: ignore[misc]
    try:
        yield
    finally:
        profiler.record_function = original  # type: ignore[misc]
