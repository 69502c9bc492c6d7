"""Small convex problems with a fixed seed."""

from __future__ import annotations

from pathlib import Path

import torch

from experiments.convex.data import Data
from experiments.convex.problem import Kind, Problem, build

ROWS, FEATURES = 60, 12


def data(rows: int = ROWS, features: int = FEATURES) -> Data:
    """Return examples whose labels depend on the features and on noise."""
    source = torch.Generator().manual_seed(7)
    x = torch.randn(rows, features, generator=source, dtype=torch.float64)
    x *= torch.rand(rows, features, generator=source) < 0.5
    truth = torch.randn(features, generator=source, dtype=torch.float64)
    noise = torch.randn(rows, generator=source, dtype=torch.float64)
    return Data("made", x, torch.where(x @ truth + noise > 0, 1.0, -1.0).double())


def problem(kind: Kind = "logistic", l2: float | None = None, l1: float = 0.01) -> Problem:
    """Return a problem on these examples."""
    return build(kind, data(), l2=l2, l1=l1)


def write(path: Path) -> Path:
    """Write the same data as a LIBSVM text file."""
    made = data()
    lines = []
    for label, row in zip(made.y.tolist(), made.x.tolist(), strict=True):
        entries = (f"{place}:{value!r}" for place, value in enumerate(row, start=1) if value)
        lines.append(" ".join([f"{label:+g}", *entries]))
    path.write_text("\n".join(lines) + "\n")
    return path
