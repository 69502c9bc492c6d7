"""The counting model: how often a run has really trained each sample, where its record only believes.

An embedding with learning rate 1 is part of the model (`scripts/counted.py`): it has a row for each sample and a column
for each epoch, and the gradient of a number is exactly 1 where its sample is trained in its epoch. Over a server that
adds, each training takes 1 from the number; in a plain mean it takes the share of the worker that trained it, which the
script notes. Other recipes have no unit: there a sample whose number has not changed is lost, and the others are
trained.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

SCRIPT = Path(__file__).with_name("scripts") / "counted.py"
Unit = Literal["sum", "mean"]
SUMS, MEANS = ("async_sgd", "downpour"), ("allreduce", "local_sgd")
"""Recipes whose counts have a unit; `local_sgd` without outer steps."""
LIMIT_S = 120
NEAR = 1e-3


@dataclass(frozen=True)
class Counted:
    """A run with the counting model: its exit code, what it wrote, and its record.

    `epochs` has, for each epoch that it ended, the number of samples that were trained 0, 1, 2 times and so on; under
    recipes without a unit only 0 and 1.
    """

    code: int
    text: str
    record: dict[str, Any]
    epochs: list[dict[int, int]]
    digests: dict[str, str]
    """Digests of the models that the workers had at the end of the last epoch."""

    @property
    def again(self) -> int:
        """Number of samples that an epoch trained for the one before it, whose work was lost after its end."""
        return sum((one or {}).get("recovered_samples") or 0 for one in self.record.get("sample_counts", []))

    @property
    def recorded(self) -> list[dict[int, int]]:
        """The same numbers as the record says them; of a run that was resumed, from the epoch of its checkpoint on."""
        names = {"never": 0, "once": 1, "twice": 2}
        counts = self.record.get("sample_counts", [])
        return [{times: one[name] for name, times in names.items() if one[name]} for one in counts if one]


def run_counted(
    folder: Path,
    recipe: str,
    *,
    options: Sequence[str] = (),
    script: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
    before: Sequence[str] = (),
    limit_s: float = LIMIT_S,
) -> Counted:
    """Run the counting script with these options of `stretto run` and arguments; return how often samples were trained.

    Runs in the same `folder` continue each other: give the later one `--resume` with `folder / "run-1"`, and so on.
    The words `before` go before the command. Raises subprocess.TimeoutExpired if the run has not ended in time.
    """
    (counts := folder / "counts").mkdir(parents=True, exist_ok=True)
    earlier = {path: path.stat().st_mtime_ns for path in counts.glob("epoch-*.json")}
    run = folder / f"run-{1 + len([*folder.glob('run-*')])}"
    command = [*before, sys.executable, "-m", "stretto.cli", "run", "--recipe", recipe, "--out", str(run), *options]
    command += ["--json", str(json_to := run.with_name(f"record-of-{run.name}.json"))]
    with run.with_name(f"output-of-{run.name}.txt").open("w+") as output:
        done = subprocess.run(
            [*command, str(SCRIPT), str(counts), *script],
            cwd=folder,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            timeout=limit_s,
            check=False,
        )
        output.seek(0)
        text = output.read()
    record = json.loads(json_to.read_text()) if json_to.exists() else {}
    return Counted(
        done.returncode, text, record, counted_epochs(counts, unit_of(recipe)), last_digests(counts, earlier)
    )


def unit_of(recipe: str) -> Unit | None:
    """Return how a recipe adds what workers have trained; None where a row's change does not say how often."""
    name = recipe.split("(")[0]
    return None if "how=" in recipe else "sum" if name in SUMS else "mean" if name in MEANS else None


def last_digests(folder: Path, earlier: Mapping[Path, int]) -> dict[str, str]:
    """Return the digests of the models that the workers had at the end of the last epoch, by file.

    Files of `earlier` runs, with their times, have those of other models.
    """
    written = [path for path in folder.glob("epoch-*.json") if path.stat().st_mtime_ns != earlier.get(path)]
    files = sorted(written, key=_epoch_of)
    last = [path for path in files if _epoch_of(path) == _epoch_of(files[-1])]
    return {path.stem: json.loads(path.read_text())["digest"] for path in last}


def counted_epochs(folder: Path, unit: Unit | None) -> list[dict[int, int]]:
    """Return how many samples each epoch has trained how often, from the files of the counting script."""
    files = sorted(folder.glob("epoch-*.json"), key=lambda path: (_epoch_of(path), path.stat().st_mtime_ns))
    if not files:
        return []
    shares, last = _noted(folder), _epoch_of(files[-1])
    epochs = [Counter[int]() for _ in range(last)]
    for sample, row in enumerate(json.loads(files[-1].read_text())["counts"]):
        times = [_times(row[epoch], unit, shares[epoch, sample] or {1.0}) for epoch in range(last)]
        for epoch, (this, following) in enumerate(itertools.pairwise(times)):
            if (this, following) == (0, 2):  # work that was lost after the end of its epoch is done again in the next
                times[epoch : epoch + 2] = [1, 1]
        for epoch, one in enumerate(times):
            epochs[epoch][one] += 1
    return [dict(sorted(counts.items())) for counts in epochs]


def _epoch_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def _noted(folder: Path) -> dict[tuple[int, int], set[float]]:
    """Return the shares in means that the work on a sample may have had, by epoch and sample."""
    shares = defaultdict[tuple[int, int], set[float]](set)
    for path in folder.glob("shares-*.jsonl"):
        for line in path.read_text().splitlines():
            share, work = json.loads(line)
            for epoch, sample in work:
                shares[epoch, sample].add(share)
    return shares


def _times(trained: float, unit: Unit | None, shares: set[float]) -> int:
    """Return how often a sample was trained, given what its row has lost, and the shares that it may have had."""
    if unit is None:
        return int(abs(trained) > NEAR)
    for times in range(5):
        repeats = itertools.combinations_with_replacement(shares, times)
        sums = [float(times)] if unit == "sum" else map(sum, repeats)
        if any(abs(one - trained) < NEAR for one in sums):
            return times
    raise ValueError(f"a row has lost {trained}, which the shares {sorted(shares)} do not explain")
