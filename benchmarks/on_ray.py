"""Runs on a warm Ray cluster of this machine: what the loss of an actor, a new node and the start of a run take.

4 workers on two nodes of two processors each. The figures: from the SIGKILL of an actor to the next round that the
survivors have committed, as in the benchmark `recovery`; from the order to add a node, in place of a removed one, until
its workers have committed a round; and from the command until each worker has ended a step, in turns with `stretto run`
without Ray and with Ray's TorchTrainer, which restarts all workers after a failure. Each side is started once before it
is measured. It needs Ray Train: pip install "ray[train]".
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import outcomes, save
from benchmarks.pace import ROOT
from benchmarks.recovery import (
    KILLS,
    MAX_RESTARTS,
    MODELS,
    SMALL,
    VICTIMS,
    WORKERS,
    Group,
    Side,
    latest,
    restarted_s,
    survivors_s,
)
from benchmarks.recovery import STRETTO as HERE

QUESTION = "seconds that a run on Ray takes for the loss of an actor, for a node that is added, and for its start"
KILLED, ADDED, MORE = "actor killed", "node added", "start on Ray more than on this machine"
WANTED_S = {KILLED: 0.1, ADDED: 10.0, MORE: 2.0}
STARTS = 5
NODE = {"num_cpus": WORKERS // 2, "object_store_memory": 80_000_000}
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
TRAINER_SCRIPT = ROOT / "benchmarks" / "scripts" / "trained_by_ray.py"


def on_ray(folder: Path) -> list[str]:
    """Return the command up to the script."""
    started = [sys.executable, "-m", "stretto.cli", "run", "-n", str(WORKERS), "--on", "ray"]
    return [*started, "--restarts", str(MAX_RESTARTS), "--out", str(folder / "run")]


def trainer(_folder: Path) -> list[str]:
    """Return the command up to the script, which Ray Train has in its own words."""
    return [sys.executable, str(TRAINER_SCRIPT)]


ON_RAY, TRAINER = Side("stretto on Ray", on_ray, (), survivors_s), Side("TorchTrainer", trainer, (), restarted_s)
SIDES = (HERE, ON_RAY, TRAINER)


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure all, print the figures and write them to the results."""
    print(f"ray: {QUESTION}", flush=True)
    repetitions, kills = starts or STARTS, KILLS if starts is None else 1
    with _cluster() as cluster:
        for side in SIDES:
            _start_s(side)
        turns = [[_start_s(side) for side in SIDES] for _ in range(repetitions)]
        with _group(ON_RAY) as group:
            killed = [_killed_s(group, victim, _actor_of) for victim in VICTIMS * kills]
            added = [_added_s(group, cluster) for _ in range(repetitions)]
        with _group(TRAINER) as group:
            restarted = [_killed_s(group, victim, psutil.Process) for victim in VICTIMS * kills]
    here, there, theirs = map(list, zip(*turns, strict=True))
    found = {
        KILLED: killed,
        f"{KILLED}, TorchTrainer": restarted,
        ADDED: added,
        "start on this machine": here,
        "start on Ray": there,
        MORE: [one - other for one, other in zip(there, here, strict=True)],
        "start of TorchTrainer": theirs,
    }
    record = {"question": QUESTION, "workers": WORKERS, "figures": outcomes(found, WANTED_S)}
    print(f"  kept in {save('ray', record, trial=starts is not None)}")
    return record


@contextlib.contextmanager
def _cluster() -> Iterator[Any]:
    """Yield a cluster whose head holds no worker, and two nodes; its address is in the environment."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head = {"num_cpus": 0, "object_store_memory": 80_000_000, "include_dashboard": False, "_system_config": HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    os.environ["RAY_ADDRESS"] = cluster.address
    cluster.add_node(**NODE)
    cluster.second = cluster.add_node(**NODE)
    try:
        yield cluster
    finally:
        cluster.shutdown()


@contextlib.contextmanager
def _group(side: Side) -> Iterator[Group]:
    with (
        tempfile.TemporaryDirectory(prefix="stretto-ray-") as folder,
        contextlib.closing(Group(side, MODELS[SMALL], Path(folder))) as group,
    ):
        yield group


def _start_s(side: Side) -> float:
    """Return the seconds from the command until each worker has ended a step."""
    begun = time.perf_counter()
    with _group(side) as group:

        def last() -> float | None:
            ends = [group.ends(rank) for rank in group.pids()]
            return max(one[0] for one in ends) if len(ends) == WORKERS and all(ends) else None

        return float(group.wait("all workers", last)) - begun


def _actor_of(worker: int) -> psutil.Process:
    """Return the actor that carries the agent of a worker, given by its pid."""
    return psutil.Process(worker).parents()[1]


def _killed_s(group: Group, victim: int, process_of: Callable[[int], psutil.Process]) -> float:
    """Kill a process of a worker; return the seconds until the run has recovered from it."""
    group.wait_until_steady()
    pid = group.pids()[victim]
    process = process_of(pid)
    failed_at = time.perf_counter()
    process.kill()
    seconds = group.wait("recovery", lambda: group.side.recovery_s(group, victim, failed_at))
    group.wait("the next worker", lambda: True if group.pids()[victim] != pid else None)
    return float(seconds)


def _added_s(group: Group, cluster: Any) -> float:
    """Remove a node and add another one; return the seconds from the order until all workers have committed a round."""
    group.wait_until_steady()
    removed_at = time.perf_counter()
    cluster.remove_node(cluster.second, allow_graceful=False)
    group.wait("the others", lambda: _formed(group, WORKERS // 2, removed_at))
    added_at = time.perf_counter()
    cluster.second = cluster.add_node(**NODE)

    def working() -> float | None:
        formed = _formed(group, WORKERS, added_at)
        return latest([group.ends(rank) for rank in group.pids()], formed, added_at) if formed is not None else None

    return float(group.wait("the workers of the new node", working))


def _formed(group: Group, members: int, since: float) -> float | None:
    """Return when the first generation of this many members was formed after a time."""
    formed = (event for event in group.members() if event["what"] == "formed" and event["at"] > since)
    return next((event["at"] for event in formed if len(event["members"]) == members), None)
