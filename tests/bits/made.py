"""Small convex problems, made here, always the same."""

from __future__ import annotations

from pathlib import Path

import torch

from stretto.bits.data import Data
from stretto.bits.problem import Kind, Problem, build

ROWS, WIDE = 60, 12


def data(rows: int = ROWS, wide: int = WIDE) -> Data:
    """Examples whose labels depend on the features, but not altogether."""
    source = torch.Generator().manual_seed(7)
    x = torch.randn(rows, wide, generator=source, dtype=torch.float64)
    x *= torch.rand(rows, wide, generator=source) < 0.5
    truth = torch.randn(wide, generator=source, dtype=torch.float64)
    noise = torch.randn(rows, generator=source, dtype=torch.float64)
    return Data("made", x, torch.where(x @ truth + noise > 0, 1.0, -1.0).double())


def problem(kind: Kind = "logistic", l2: float | None = None, l1: float = 0.01) -> Problem:
    """A problem with those."""
    return build(kind, data(), l2=l2, l1=l1)


def write(path: Path) -> Path:
    """The same data as LIBSVM's text."""
    made = data()
    lines = []
    for label, row in zip(made.y.tolist(), made.x.tolist(), strict=True):
        entries = (f"{place}:{value!r}" for place, value in enumerate(row, start=1) if value)
        lines.append(" ".join([f"{label:+g}", *entries]))
    path.write_text("\n".join(lines) + "\n")
    return path
