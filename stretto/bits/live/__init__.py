"""Gradient descent over worker processes: what `stretto bits --live` runs instead of workers in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch
from torch import Tensor

from stretto.bits.methods import Method
from stretto.bits.optimum import Optimum
from stretto.bits.outcome import Outcome
from stretto.bits.problem import Problem
from stretto.bits.work import MOST_ROUNDS, Terms
from stretto.errors import LaunchError, LogError, explain
from stretto.launcher.local import RunConfig
from stretto.launcher.local import run as run_order
from stretto.launcher.progress_display import ProgressDisplay
from stretto.report.run_log import History, interpolate, read

SCRIPT = Path(__file__).with_name("loop.py")
ERROR = "objective_error"
PROBLEM, TENSORS = "problem.json", "problem.safetensors"


def check(terms: Terms) -> None:
    """Refuse what live workers can't do; raises LaunchError."""
    if terms.double:
        problem = "live workers send numbers as they compute them, so in double precision of 64 bits"
        expected = "one of the two: in memory what is sent is float32 in any case"
        raise LaunchError(explain(problem, got="--live --float64", expected=expected, to_type="--live"))


def descend(
    problem: Problem, best: Optimum, method: Method, terms: Terms, folder: Path, watch: ProgressDisplay
) -> Outcome:
    """Make rounds on worker processes until the target is reached, as `stretto.bits.work.descend` does in memory.

    Each worker trains with plain SGD on batches that are its whole shard; rounds and bits are those of the run's log
    in `folder`. Where numbers are encoded one by one, as by gd, one more a round says how many workers have a gradient.
    Raises LaunchError when a worker fails.
    """
    with TemporaryDirectory(prefix="stretto-bits-") as kept:
        _write(Path(kept), problem, best, terms)
        order = RunConfig(
            script=SCRIPT,
            args=(kept,),
            workers=terms.workers,
            recipe=str(method.recipe),
            threads=1,
            out=folder,
            output="none",
        )
        run_order(order, watch)
    start = problem.objective(problem.x.new_zeros(problem.wide)) - best.value
    return _outcome(read(folder), method, terms, start)


def _write(folder: Path, problem: Problem, best: Optimum, terms: Terms) -> None:
    from safetensors.torch import save_file

    save_file({"x": problem.x.contiguous(), "y": problem.y.contiguous()}, folder / TENSORS)
    told = {
        "kind": problem.kind,
        "name": problem.name,
        "l2": problem.l2,
        "l1": problem.l1,
        "smoothness": problem.smoothness,
        "least": best.value,
        "target": terms.target,
        "workers": terms.workers,
        "most": terms.most or MOST_ROUNDS,
    }
    (folder / PROBLEM).write_bytes(msgspec.json.encode(told))


def _outcome(history: History, method: Method, terms: Terms, start: float) -> Outcome:
    logged = sorted((event for event in history.of("log") if event["worker"] == 0), key=lambda event: event["step"])
    errors = (start, *(float(event["values"].get(ERROR) or math.inf) for event in logged))
    ends = history.last_counts()
    if any(int(end.get("rounds") or 0) != len(logged) for end in ends):
        rounds = [end.get("rounds") for end in ends]
        raise LogError(f"{history.folder}: the workers made {rounds} rounds, and {len(logged)} were logged")
    purpose = type(method.recipe.what).__name__
    points = [_points(history, worker, purpose) for worker in range(terms.workers)]
    said = [interpolate(one) for one in points]
    bits = tuple(8 * sum(round(at(step)) for at in said) for step in range(len(errors)))
    return Outcome(method.name, terms.workers, errors, bits, errors[-1] <= terms.target)


def _points(history: History, worker: int, purpose: str) -> list[tuple[float, float]]:
    """The bytes of the messages of one worker by its rounds, at those rounds where its log counts them."""
    found = {0.0: 0.0}
    for event in history.counts(worker):
        exchanged = event.get("exchanged") or {}
        if purpose in exchanged:
            found[float(event["rounds"])] = float(exchanged[purpose][1])
    return sorted(found.items())


def load(folder: Path) -> tuple[Problem, dict[str, float]]:
    """What a worker is told: the problem, and the numbers that it ends by."""
    from safetensors.torch import load_file

    told = msgspec.json.decode((folder / PROBLEM).read_bytes())
    tensors = load_file(folder / TENSORS)
    problem = Problem(told["kind"], told["name"], tensors["x"], tensors["y"], told["l2"], told["l1"])
    return problem, told


class Rounds:
    """The batches of all workers, round after round: each is a worker's whole shard, in float32."""

    def __init__(self, problem: Problem, workers: int, most: int) -> None:
        x, y = problem.x.to(torch.float32), problem.y.to(torch.float32)
        self._shards = [(x[one], y[one]) for one in problem.shards(workers)]
        self._most = most

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self._most):
            yield from self._shards
