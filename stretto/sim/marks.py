"""torch's marks for profilers and compilers, left out where neither is there: an eighth of a small step is theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_NO_MARK = nullcontext()


@contextmanager
def unmarked() -> Iterator[None]:
    """Have loaders and optimizers mark what they do only while a profiler looks, and break no graphs."""
    import torch._dynamo as compiler  # slow to load, and loaded by the first optimizer

    profiler: Any = torch.autograd.profiler
    mark, break_ = profiler.record_function, compiler.graph_break

    def record_function(name: str, args: str | None = None) -> AbstractContextManager[Any]:
        return mark(name, args) if torch._C._autograd._profiler_enabled() else _NO_MARK

    profiler.record_function, compiler.graph_break = record_function, _no_graph
    try:
        yield
    finally:
        profiler.record_function, compiler.graph_break = mark, break_


def _no_graph(msg: str = "") -> None:
    """Nothing is compiled."""
