"""Medians, ratios, and the storage of results."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def record(self) -> dict[str, float]:
        """Return the spread for the JSON file."""
        return {"median": self.median, "quartile_1": self.low, "quartile_3": self.high}


def outcomes(seconds: Mapping[str, Sequence[float]], wanted_s: Mapping[str, float]) -> dict[str, Any]:
    """Print a line for each name and return their records: spread, worst, how many, and the goal."""
    found: dict[str, Any] = {}
    for name, all_s in seconds.items():
        rounded, spread, wanted = [round(one, 4) for one in all_s], Spread.of(all_s).record(), wanted_s.get(name)
        asked = f", wanted at most {wanted:g} s" if wanted else ""
        print(f"  {name}: {spread['median']:.3f} s (worst {max(rounded):.3f}), of {len(rounded)}{asked}", flush=True)
        found[name] = {"s": spread, "worst": max(rounded), "deaths": len(rounded), "wanted_s": wanted, "all_s": rounded}
    return found


@dataclass(frozen=True)
class Ratio:
    """Speed of one side relative to another: the median over several starts, and its standard error."""

    median: float
    error: float

    @classmethod
    def of(cls, ours_s: Sequence[Sequence[float]], theirs_s: Sequence[Sequence[float]]) -> Ratio:
        """Compare the seconds of each start. Neighbours in time are compared: a slow minute affects both alike."""
        by_start = [_neighbours(*one) for one in zip(ours_s, theirs_s, strict=True)]
        spread = statistics.stdev(by_start) if len(by_start) > 1 else math.nan
        return cls(statistics.median(by_start), spread / math.sqrt(len(by_start)))

    def __str__(self) -> str:
        return f"{self.median:.3f}" + ("" if math.isnan(self.error) else f" ± {self.error:.3f}")

    def record(self) -> dict[str, float | None]:
        """Return the ratio for the JSON file."""
        return {"median": self.median, "standard_error": None if math.isnan(self.error) else self.error}


def _neighbours(ours_s: Sequence[float], theirs_s: Sequence[float]) -> float:
    return statistics.median(theirs / ours for ours, theirs in zip(ours_s, theirs_s, strict=True))


def machine() -> dict[str, Any]:
    """Return the hardware and software that the figures were measured on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def now() -> str:
    """Return the current time in the format of the results."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def save(name: str, record: dict[str, Any], *, trial: bool = False, folder: Path = RESULTS) -> Path:
    """Write results/NAME.json with the date and the machine; a trial (a smaller measurement) gets a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}{'-trial' * trial}.json"
    whole = {"benchmark": name, "taken": now(), "machine": machine(), **record}
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return path
