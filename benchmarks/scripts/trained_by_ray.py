"""The loop of clocked.py as the documentation of Ray Train writes it, to measure what a failure costs there.

    trained_by_ray.py clocked.py STEPS --width WIDTH

A TorchTrainer trains with 4 workers; after a failure it restarts all of them. It writes and reads no checkpoint.
"""

import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

WORKERS = 4


def train(config: dict[str, Any]) -> None:
    """Train until the process ends, and record when each step ended, as clocked.py does."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits, width = load_digits(), config["width"]
    data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    model = prepare_model(
        nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = prepare_data_loader(DataLoader(data, batch_size=32, shuffle=True))
    rank = ray.train.get_context().get_world_rank()
    name = f"{rank}-{time.perf_counter_ns():020d}-{os.getpid()}"
    log = os.open(Path(config["steps"]) / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            os.write(log, struct.pack("<d", time.perf_counter()))


steps, width = sys.argv[2], int(sys.argv[4])
run = ray.train.RunConfig(
    storage_path=str(Path(steps).parent), failure_config=ray.train.FailureConfig(max_failures=1000)
)
config = {"steps": steps, "width": width}
TorchTrainer(
    train, train_loop_config=config, scaling_config=ray.train.ScalingConfig(num_workers=WORKERS), run_config=run
).fit()
