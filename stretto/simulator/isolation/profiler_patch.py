"""torch's marks for profilers, left out where none looks: a tenth of a small step is theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import profiler


class _Mark(profiler.record_function):
    """What marks a range for a profiler that is on when it begins, and else does nothing."""

    def __enter__(self) -> Any:
        if torch._C._autograd._profiler_enabled():
            return super().__enter__()  # type: ignore[no-untyped-call]
        self.record = None
        return self

    def __exit__(self, *error: Any) -> None:
        if self.record is not None:
            super().__exit__(*error)


@contextmanager
def unmarked() -> Iterator[None]:
    """Have optimizers, and what else of torch marks its work, do so only while a profiler looks."""
    before: Any = profiler.record_function
    profiler.record_function = _Mark  # type: ignore[misc]
    try:
        yield
    finally:
        profiler.record_function = before  # type: ignore[misc]
