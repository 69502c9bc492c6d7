"""A loop that never ends, whose processes record when each of their steps ended, to measure what a failure costs.

Each process appends the readings of the machine's clock to a file of its own, STEPS/RANK-BEGAN-PID, eight bytes each.
`--ddp` is the same loop as torch's tutorials write it, for torchrun, which restarts all processes after a failure.
"""

import argparse
import os
import struct
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=Path)
parser.add_argument("--width", type=int, default=128, help="width of the two hidden layers; 2200 makes 5 M parameters")
parser.add_argument("--ddp", action="store_true")
arguments = parser.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
width = arguments.width
model: nn.Module = nn.Sequential(
    nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

if arguments.ddp:
    # torchrun's store survives a restart, with the addresses of failed processes: use a prefix for each restart.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    common = TCPStore(address, port, is_master=False)
    store = PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], common)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    model = DistributedDataParallel(model)
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
else:
    import stretto
    from stretto.process_config import worker_config

    loader = stretto.distribute(model, optimizer, DataLoader(data, batch_size=32, shuffle=True), recipe="allreduce")

rank = os.environ["RANK"] if arguments.ddp else stretto.rank()
name = f"{rank}-{time.perf_counter_ns():020d}-{os.getpid()}"
is_first = arguments.ddp or worker_config().rank == 0  # of the processes of a worker, with a layout
log = os.open(arguments.steps / name if is_first else os.devnull, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for _ in range(sys.maxsize):
    for x, y in loader:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        os.write(log, struct.pack("<d", time.perf_counter()))
