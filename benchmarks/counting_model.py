"""The counting model: how often a run has really trained each sample, where its record only believes.

An embedding with learning rate 1, whose gradient is exactly 1 for each sample, is part of the model
(`scripts/counted.py`). Over a server that adds, each training of a sample takes 1 from its row; in a plain mean it
takes the share of the worker that trained it, which the script notes. Other recipes have no unit: there a sample whose
row has not changed is lost, and the others are trained.
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
    return Counted(done.returncode, text, record, counted_epochs(counts, unit_of(recipe)), last_digests(counts))


def unit_of(recipe: str) -> Unit | None:
    """Return how a recipe adds what workers have trained; None where a row's change does not say how often."""
    name = recipe.split("(")[0]
    return None if "how=" in recipe else "sum" if name in SUMS else "mean" if name in MEANS else None


def last_digests(folder: Path) -> dict[str, str]:
    """Return the digests of the models that the workers had at the end of the last epoch, by file."""
    files = sorted(folder.glob("epoch-*.json"), key=lambda path: int(path.name.split("-")[1]))
    last = [path for path in files if path.name.split("-")[1] == files[-1].name.split("-")[1]]
    return {path.stem: json.loads(path.read_text())["digest"] for path in last}


def counted_epochs(folder: Path, unit: Unit | None) -> list[dict[int, int]]:
    """Return how many samples each epoch has trained how often, from the files of the counting script."""
    shares, corrections = _noted(folder)
    before: list[float] = []
    epochs: list[dict[int, int]] = []
    for epoch in itertools.count():
        files = sorted(folder.glob(f"epoch-{epoch + 1}-*.json"), key=lambda path: path.stat().st_mtime_ns)
        if not files:
            return epochs
        counts = json.loads(files[-1].read_text())["counts"]
        trained = [now - then for now, then in zip(counts, before or [0.0] * len(counts), strict=True)]
        before = counts
        times = Counter(
            _times(one, unit, shares[epoch, sample] or {1.0}, corrections[epoch, sample], shares[epoch - 1, sample])
            for sample, one in enumerate(trained)
        )
        epochs.append(dict(sorted(times.items())))
    raise AssertionError


Noted = dict[tuple[int, int], set[float]]


def _noted(folder: Path) -> tuple[Noted, Noted]:
    """Return by epoch and sample the shares that its training had, and changes of those of an earlier epoch.

    An epoch may end within a round: its end has the mean of the work so far, the round's end another one.
    """
    shares, corrections = defaultdict[tuple[int, int], set[float]](set), defaultdict[tuple[int, int], set[float]](set)
    for path in folder.glob("shares-*.jsonl"):
        last: dict[tuple[int, int], float] = {}
        for line in path.read_text().splitlines():
            epoch, share, work = json.loads(line)
            for trained_in, sample in work:
                if trained_in == epoch:
                    shares[epoch, sample].add(share)
                else:
                    corrections[epoch, sample].add(share - last.get((trained_in, sample), 0.0))
                last[trained_in, sample] = share
    return shares, corrections


def _times(
    trained: float, unit: Unit | None, shares: set[float], corrections: set[float], shares_before: set[float]
) -> int:
    """Return how often a sample was trained, given what its row has lost, and the shares that it may have had.

    Work of the last epoch that was lost since its end takes its share back, and is done again: that is no second time.
    """
    if unit is None:
        return int(abs(trained) > NEAR)
    lost = [(-share, 1) for share in shares_before] if unit == "mean" else []
    explanations = [(0.0, 0), *((one, 0) for one in corrections), *lost]
    for (correction, again), times in itertools.product(explanations, range(5)):
        repeats = itertools.combinations_with_replacement(shares, times + again)
        sums = [float(times)] if unit == "sum" else map(sum, repeats)
        if any(abs(one + correction - trained) < NEAR for one in sums):
            return times
    raise ValueError(f"a row has lost {trained}, which the shares {sorted(shares)} do not explain")
