"""Federated averaging in Flower's simulation engine, written as in its documentation.

Flower needs other versions of Stretto's dependencies, so it is installed in an environment of its own, whose Python
STRETTO_FLOWER names:

    python -m venv flower && flower/bin/pip install "flwr[simulation]" torch scikit-learn
    flower/bin/python benchmarks/peers/flower.py CLIENTS STEPS ROUNDS
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

ROUNDS = 8
"""Number of rounds; the first two are not counted, since Flower starts its actors in them."""
LIMIT_S = 240.0
BATCH = 32
MISSING = (
    'It needs an environment of its own: python -m venv flower && flower/bin/pip install "flwr[simulation]" torch '
    "scikit-learn, then STRETTO_FLOWER=flower/bin/python"
)


def interpreter() -> str | None:
    """Return the Python interpreter that has Flower, if there is one."""
    return os.environ.get("STRETTO_FLOWER")


def measure(python: str, clients: int, steps: int, rounds: int = ROUNDS) -> float:
    """Return the median seconds of a round in which each client does `steps` local steps."""
    with tempfile.TemporaryDirectory(prefix="flower-", ignore_cleanup_errors=True) as home:
        command = [python, os.path.abspath(__file__), str(clients), str(steps), str(rounds)]
        overrides = {
            "HOME": home,
            "FLWR_HOME": home,
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "STRETTO_"))
        }
        done = subprocess.run(
            command,
            env={**environment, **overrides},
            cwd=home,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    result_lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds')]
    if done.returncode or not result_lines:
        raise SystemExit(f"Flower failed:\n{done.stderr[-3000:]}")
    times = json.loads(result_lines[-1])["seconds"]
    return statistics.median(times[2:])


def train(clients: int, steps: int, rounds: int) -> list[float]:
    """Return the seconds of each round."""
    import torch
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation
    from torch import nn

    def network() -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    client, server = ClientApp(), ServerApp()
    marks: list[float] = []

    @client.train()
    def local(message: Message, context: Context) -> Message:
        from sklearn.datasets import load_digits
        from torch.nn.functional import cross_entropy
        from torch.utils.data import DataLoader, TensorDataset

        torch.set_num_threads(1)
        digits = load_digits()
        part = slice(int(context.node_config["partition-id"]), None, clients)
        x = torch.tensor(digits.data[part], dtype=torch.float32) / 16
        y = torch.tensor(digits.target[part])
        model = network()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        done = 0
        while done < steps:
            for images, labels in DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True):
                loss = cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                done += 1
                if done == steps:
                    break
        metrics = MetricRecord({"num-examples": len(x)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    def mark(number: int, arrays: ArrayRecord) -> MetricRecord:  # noqa: ARG001
        marks.append(time.perf_counter())
        return MetricRecord()

    @server.main()
    def lead(grid: Grid, context: Context) -> None:  # noqa: ARG001
        torch.set_num_threads(1)
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=clients)
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(network().state_dict()),
            train_config=ConfigRecord(),
            num_rounds=rounds,
            evaluate_fn=mark,
        )

    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app=server, client_app=client, num_supernodes=clients, backend_config=backend)
    return [after - before for before, after in itertools.pairwise(marks)]


if __name__ == "__main__":
    print(json.dumps({"seconds": train(*map(int, sys.argv[1:]))}), flush=True)
