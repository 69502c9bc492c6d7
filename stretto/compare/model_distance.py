"""Distance of two trained models: in their parameters, and in their predictions."""

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
"""Prefix of the names of buffers that hold statistics of the data, not learned values."""


def parameter_distance(state: Path, reference: Path) -> float | None:
    """Return the relative distance of two saved states, or None if it is not finite.

    `||theta - theta_0|| / ||theta_0||` over all floating-point parameters, in double precision. Integer
    buffers and running statistics are excluded. Raises LogError when the states have different parameters.
    """
    with _open(state) as tensors, _open(reference) as expected:
        names = _compared_names(tensors)
        if names != _compared_names(expected):
            raise LogError(f"{state} and {reference} do not hold the same parameters")
        pairs = ((tensors.get_tensor(name), expected.get_tensor(name)) for name in names)
        squares = [_squares(a, b) for a, b in pairs if b.is_floating_point()]
    difference, norm = math.fsum(d for d, _ in squares), math.fsum(n for _, n in squares)
    distance = 0.0 if difference == 0 else math.sqrt(difference) / math.sqrt(norm) if norm else math.inf
    return distance if math.isfinite(distance) else None


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise LogError(f"{path} cannot be read: {error}") from error


def _compared_names(state: Any) -> list[str]:
    return sorted(name for name in state.keys() if not name.rpartition(".")[2].startswith(STATISTICS))  # noqa: SIM118


def _squares(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return the squared norms of the difference and of the reference."""
    if a.shape != b.shape:
        raise LogError(f"two states differ in a shape: {list(a.shape)} and {list(b.shape)}")
    a, b = a.to(torch.float64), b.to(torch.float64)
    return float(((a - b) ** 2).sum()), float((b**2).sum())


def prediction_disagreement(predictions: Path, reference: Path) -> float | None:
    """Return the share of predictions that differ; None if a file is missing or the numbers of predictions differ."""
    if not (predictions.exists() and reference.exists()):
        return None
    try:
        values, expected = (np.load(path, allow_pickle=False).ravel() for path in (predictions, reference))
    except (OSError, ValueError) as error:
        raise LogError(f"{predictions} or {reference} cannot be read: {error}") from error
    if values.size != expected.size or not expected.size:
        return None
    return float(np.mean(values != expected))


def compared(run: Path, reference: Path) -> Record:
    """Return the fields of a record on the distance of its model to a reference: at the end, and during training."""
    return {
        "compared_with": reference.name,
        **_at(run / FINAL, reference / FINAL),
        "distances": [
            {"samples": int(name), **_at(run / STATES / name, reference / STATES / name)}
            for name in sorted(_states(run) & _states(reference), key=int)
        ],
    }


def _at(run: Path, reference: Path) -> Record:
    state, expected = _file(run, "safetensors"), _file(reference, "safetensors")
    are_stored = state.exists() and expected.exists()
    return {
        "parameter_distance": parameter_distance(state, expected) if are_stored else None,
        "prediction_disagreement": prediction_disagreement(
            _file(run, "predictions.npy"), _file(reference, "predictions.npy")
        ),
    }


def _file(state: Path, kind: str) -> Path:
    return state.with_name(f"{state.name}.{kind}")


def _states(run: Path) -> set[str]:
    """Return the names of the states saved during a run: the number of samples trained on until then."""
    return {path.stem for path in (run / STATES).glob("*.safetensors") if path.stem.isdecimal()}
