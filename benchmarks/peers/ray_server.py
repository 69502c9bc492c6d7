"""A parameter server with Ray actors, written as an asynchronous one in Ray's documentation.

The driver waits until an update of some worker is ready (`ray.wait`), passes its reference to the server actor, and
passes the reference of the returned parameters to that worker. Updates and parameters are NumPy arrays, which Ray moves
faster than tensors; between processes of one machine they go through its shared memory.

    python -m benchmarks.peers.ray_server 100000 4 5
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers import WARM_UP_S, Outcome, Rate, show, total, update_of
from benchmarks.peers.processes import LIMIT_S, Child, send_result, wait_until_closed

MISSING = 'Ray is missing: python -m pip install --constraint constraints.txt "ray"'


def measure(parameters: int, workers: int, seconds: float) -> Rate:
    """Return the updates that a server applies per second, and their bytes."""
    return run(parameters, workers, seconds).rate()


def run(parameters: int, workers: int, seconds: float) -> Outcome:
    """Measure, and return also the sums that show that each update was applied once. Ray runs in a child process."""
    if importlib.util.find_spec("ray") is None:
        raise SystemExit(MISSING)
    asked = {"PEER_PARAMETERS": str(parameters), "PEER_WORKERS": str(workers), "PEER_SECONDS": str(seconds)}
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as home,
        closing(Child(__spec__.name, "drive", {**asked, **_quiet(Path(home))})) as driver,
    ):
        return Outcome(**driver.receive(LIMIT_S + seconds))


def _quiet(home: Path) -> dict[str, str]:
    """Return an environment in which Ray makes no outside calls, opens no public ports and does not use the home."""
    (home / "ray_bootstrap_config.yaml").write_text("{}\n")
    return {
        "HOME": str(home),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # On Linux, too, this is what leaves Ray on 127.0.0.1.
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9",
    }


class ParameterServer:
    """Actor that holds the parameters and adds updates, one at a time."""

    def __init__(self, parameters: int) -> None:
        self.parameters = np.zeros(parameters, np.float32)

    def apply(self, update: NDArray[np.float32]) -> NDArray[np.float32]:
        """Add the update and return the new parameters."""
        self.parameters += update
        return self.parameters

    def get(self) -> NDArray[np.float32]:
        """Return the parameters."""
        return self.parameters


class Worker:
    """Actor that returns the same update for all parameters, so that only moving it takes time."""

    def __init__(self, worker: int, parameters: int) -> None:
        self.update = update_of(worker, parameters)

    def compute(self, parameters: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the next update."""
        return self.update


def drive() -> None:
    """Start Ray and the actors in the driver process, let the workers push, and print the result."""
    import ray

    parameters, workers = int(os.environ["PEER_PARAMETERS"]), int(os.environ["PEER_WORKERS"])
    ray.init(
        num_cpus=workers + 1,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=os.environ["HOME"],
    )
    Pushing(ray, parameters, workers).run(float(os.environ["PEER_SECONDS"]))
    wait_until_closed()
    ray.shutdown()


class Pushing:
    """The actors, and which worker computes which pending update."""

    def __init__(self, ray: Any, parameters: int, workers: int) -> None:
        self._ray = ray
        self._parameters = parameters
        self._server = ray.remote(ParameterServer).remote(parameters)
        self._workers = [ray.remote(Worker).remote(worker, parameters) for worker in range(workers)]
        self._counts = [0] * workers
        current = self._server.get.remote()
        self._updates = {one.compute.remote(current): worker for worker, one in enumerate(self._workers)}

    def run(self, seconds: float) -> None:
        """Push for WARM_UP_S, then for `seconds`, and print the result."""
        while min(self._counts) == 0:
            self._forward_update()
        self._push(WARM_UP_S)
        updates_per_s = self._push(seconds)
        change = total(self._ray.get(self._server.get.remote(), timeout=LIMIT_S))
        updates = [total(update_of(worker, self._parameters)) for worker in range(len(self._workers))]
        send_result(
            parameters=self._parameters,
            updates=sum(self._counts),
            updates_per_s=updates_per_s,
            pushed=sum(count * one for count, one in zip(self._counts, updates, strict=True)),
            change=change,
        )

    def _push(self, seconds: float) -> float:
        """Return the updates per second over at least `seconds`."""
        count, began = 0, time.perf_counter()
        while not count or time.perf_counter() - began < seconds:
            self._forward_update()
            count += 1
        return count / (time.perf_counter() - began)

    def _forward_update(self) -> None:
        """Pass one ready update to the server, and the returned parameters to its worker."""
        ready, _ = self._ray.wait(list(self._updates), timeout=LIMIT_S)
        if not ready:
            raise SystemExit(f"no update within {LIMIT_S:g} s")
        worker = self._updates.pop(ready[0])
        current = self._server.apply.remote(ready[0])
        self._counts[worker] += 1
        self._updates[self._workers[worker].compute.remote(current)] = worker


if __name__ == "__main__":
    show(measure)
