"""Script whose first worker appends the time of each round to a file: `clocked_rounds.py FILE SAMPLES PAUSE VALUES`.

It trains for one epoch of the samples, four to a batch, and waits for the pause after each step. The gradients of the
model have this number of values, beside those of a small layer.
"""

from __future__ import annotations

import sys
import time

import torch

import stretto

path, samples, pause, values = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(0)
inputs = torch.randn(samples, 8)
model = torch.nn.Linear(8, 1)
model.further = torch.nn.Parameter(torch.zeros(values))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = stretto.distribute(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
for x, y in loader:
    optimizer.zero_grad()
    (((model(x) - y) ** 2).mean() + model.further.sum()).backward()
    optimizer.step()
    if stretto.rank() == 0:
        with open(path, "a") as rounds:
            rounds.write(f"{time.perf_counter()}\n")
    time.sleep(pause)
