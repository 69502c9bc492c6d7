"""Everyday scripts: alone the bits of the plain script; on three workers one agreed model, and each sample once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from combinations import mostly_long

from stretto.events import read_events

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT_S = 300
WORKERS = 3

PROBE = """
import hashlib, os, uuid
from pathlib import Path
import torch
models = [value for value in list(globals().values()) if isinstance(value, torch.nn.Module)]
flat = torch.cat([value.double().flatten() for one in models for value in one.state_dict().values()])
digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
(Path(os.environ["DIGESTS"]) / uuid.uuid4().hex).write_text(digest)
"""
"""Appended to a script: writes the digest of all its models' parameters to a file of its own."""


@dataclass(frozen=True)
class Script:
    """An example, made small. `samples` counts those of all its epochs; the last `metric` it prints is in `bounds`."""

    file: str
    args: str
    samples: int
    metric: str
    bounds: tuple[float, float]
    recipes: tuple[str, str]
    module: str | None = None

    @property
    def plain_args(self) -> list[str]:
        return self.args.split()


SCRIPTS = [
    Script("gan.py", "--epochs 3", 3 * 1797, "distance", (0, 0.4), ("allreduce", "local_sgd(every=4)")),
    Script("kfold.py", "--folds 3 --epochs 2", 2 * 2 * 1797, "accuracy", (0.6, 1), ("allreduce", "local_sgd(every=4)")),
    Script(
        "lstm.py",
        "--epochs 3 --characters 20000 --lr 0.01",
        3 * 16 * 44,  # 17999 characters of the training part are 44 batches of 16 pieces of 25, and a rest
        "loss",
        (0, 2),  # a guess by the letters' frequencies has 2.8
        ("allreduce", "local_sgd(every=4)"),
    ),
    Script(
        "thaw.py",
        "--epochs 4 --batch 16 --thaw-every 18",
        4 * 1437,
        "accuracy",
        (0.5, 1),
        ("allreduce", "diloco(every=8)"),
    ),
    Script(
        "package/train.py",
        "--epochs 3 --points 1000",
        3000,
        "accuracy",
        (0.6, 1),
        ("local_sgd(every=4)", "async_sgd"),
        "examples.package.train",
    ),
    Script(
        "recommender.py",
        "--epochs 2 --ratings 60000 --batch 256 --lr 0.3",
        2 * 54000,
        "rmse",
        (0, 1.15),  # the mean of all ratings as the guess has 1.23
        ("async_sgd(shards=2)", "local_sgd(every=4)"),
    ),
]
every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.file)


@dataclass
class Place:
    """A copy of the examples in a folder of the test, and what the processes that ran there have left."""

    root: Path
    runs: int = 0
    digests: list[list[str]] = field(default_factory=list)

    def run(self, script: Script, *command: str, plain: bool = False) -> subprocess.CompletedProcess[str]:
        """Run the script as a user does, and read the digests that its processes have written."""
        path = self.root / "examples" / script.file
        source = (EXAMPLES / script.file).read_text()
        path.write_text((without_stretto(source) if plain else source) + PROBE)
        found = self.root / f"digests-{self.runs}"
        found.mkdir()
        self.runs += 1
        target = ["-m", script.module] if script.module else [str(path)]
        hidden = ("WORLD_SIZE", "STRETTO_RUN", "STRETTO_DATA")
        ended = subprocess.run(
            [sys.executable, *command, *target, *script.plain_args],
            cwd=self.root,
            env={name: value for name, value in os.environ.items() if name not in hidden}
            | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "GLOO_SOCKET_IFNAME": "lo", "DIGESTS": str(found)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        self.digests.append([one.read_text() for one in found.iterdir()])
        return ended

    def epochs(self) -> Iterator[dict[str, Any]]:
        """Return the sample counts of each epoch in the event logs of the run."""
        for path in sorted((self.root / "run").rglob("events.jsonl")):
            yield from (event["sample_counts"] for event in read_events(path) if event["event"] == "epoch")


def without_stretto(source: str) -> str:
    return "".join(line for line in source.splitlines(keepends=True) if "stretto" not in line)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return Place(tmp_path)


def check_together(script: Script, place: Place, ended: subprocess.CompletedProcess[str]) -> None:
    assert len(place.digests[-1]) == WORKERS
    assert len(set(place.digests[-1])) == 1, "the workers end with different models"
    counts = list(place.epochs())
    assert [(one["twice"], one["never"], one["dropped"]) for one in counts] == [(0, 0, 0)] * len(counts)
    assert sum(one["once"] for one in counts) == script.samples
    least, most = script.bounds
    assert least <= float(re.findall(rf"{script.metric} ([\d.]+)", ended.stdout)[-1]) <= most


@every_script
def test_the_line_alone_changes_no_bit(script: Script, place: Place) -> None:
    plain = place.run(script, plain=True)
    alone = place.run(script)
    assert plain.stdout == alone.stdout
    assert place.digests[0] == place.digests[1] != []


@pytest.mark.parametrize(
    "case",
    mostly_long([(script, recipe) for script in SCRIPTS for recipe in script.recipes], short=(0, 3, 4, 7, 9, 10)),
    ids=lambda case: f"{case[0].file}-{case[1]}",
)
def test_three_workers_end_with_one_model_and_take_each_sample_once(case: tuple[Script, str], place: Place) -> None:
    script, recipe = case
    options = ["-n", str(WORKERS), "--threads", "1", "--recipe", recipe, "--out", str(place.root / "run")]
    check_together(script, place, place.run(script, "-m", "stretto.cli", "run", *options))


@pytest.mark.parametrize("script", mostly_long(SCRIPTS, short=(1, 3)), ids=lambda script: script.file)
def test_three_simulated_workers_end_with_one_model_and_take_each_sample_once(script: Script, place: Place) -> None:
    options = ["-n", str(WORKERS), "--recipe", "local_sgd(every=4)", "--step-time", "5ms"]
    ended = place.run(script, "-m", "stretto.cli", "simulate", *options, "--out", str(place.root / "run"))
    check_together(script, place, ended)
