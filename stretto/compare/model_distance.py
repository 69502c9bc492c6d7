"""How alike two trained models are: in their parameters, and in what they predict."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stretto.errors import LogError
from stretto.report.run_record import Record

STATES, FINAL = "states", "final"
STATISTICS = "running_"
"""Buffers whose own name begins so are statistics of the data, not what was learned."""


def parameter_distance(state: Path, reference: Path) -> float | None:
    """The relative distance of two saved states, or None where it is no finite number.

    `||theta - theta_0|| / ||theta_0||` over all floating-point parameters, in double precision. Integer
    buffers and running statistics are left out. Raises LogError when the states are not of one model.
    """
    with _opened(state) as mine, _opened(reference) as its:
        names = _compared(mine)
        if names != _compared(its):
            raise LogError(f"{state} and {reference} do not hold the same parameters")
        pairs = ((mine.get_tensor(name), its.get_tensor(name)) for name in names)
        squares = [_squares(a, b) for a, b in pairs if b.is_floating_point()]
    apart, size = math.fsum(one for one, _ in squares), math.fsum(one for _, one in squares)
    distance = 0.0 if apart == 0 else math.sqrt(apart) / math.sqrt(size) if size else math.inf
    return distance if math.isfinite(distance) else None


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise LogError(f"{path} cannot be read: {error}") from error


def _compared(state: Any) -> list[str]:
    return sorted(name for name in state.keys() if not name.rpartition(".")[2].startswith(STATISTICS))  # noqa: SIM118


def _squares(a: Tensor, b: Tensor) -> tuple[float, float]:
    """The squared norms of the difference and of the reference."""
    if a.shape != b.shape:
        raise LogError(f"two states differ in a shape: {list(a.shape)} and {list(b.shape)}")
    a, b = a.to(torch.float64), b.to(torch.float64)
    return float(((a - b) ** 2).sum()), float((b**2).sum())


def prediction_disagreement(predictions: Path, reference: Path) -> float | None:
    """The share of predictions that differ; None when a side has none or they are not of the same data."""
    if not (predictions.exists() and reference.exists()):
        return None
    try:
        mine, its = (np.load(path, allow_pickle=False).ravel() for path in (predictions, reference))
    except (OSError, ValueError) as error:
        raise LogError(f"{predictions} or {reference} cannot be read: {error}") from error
    if mine.size != its.size or not its.size:
        return None
    return float(np.mean(mine != its))


def compared(run: Path, reference: Path) -> Record:
    """What a record gets to know of its run's likeness to another: at the end, and over time."""
    return {
        "compared_with": reference.name,
        **_at(run / FINAL, reference / FINAL),
        "distances": [
            {"samples": int(name), **_at(run / STATES / name, reference / STATES / name)}
            for name in sorted(_states(run) & _states(reference), key=int)
        ],
    }


def _at(run: Path, reference: Path) -> Record:
    mine, its = _file(run, "safetensors"), _file(reference, "safetensors")
    both = mine.exists() and its.exists()
    return {
        "parameter_distance": parameter_distance(mine, its) if both else None,
        "prediction_disagreement": prediction_disagreement(
            _file(run, "predictions.npy"), _file(reference, "predictions.npy")
        ),
    }


def _file(state: Path, kind: str) -> Path:
    return state.with_name(f"{state.name}.{kind}")


def _states(run: Path) -> set[str]:
    """The names of the states kept while a run trained: the samples seen until then."""
    return {path.stem for path in (run / STATES).glob("*.safetensors") if path.stem.isdecimal()}
