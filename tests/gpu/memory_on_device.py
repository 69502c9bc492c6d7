"""A plain loop over large layers on a GPU, which prints the peak of its memory there after the first epoch."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto

os.environ["NCCL_HOSTID"] = f"process {os.getpid()}"
device = torch.device("cuda", 0)
nn.Linear(2048, 2048, device=device)(torch.ones(8, 2048, device=device)).sum().backward()
before = torch.cuda.memory_allocated()
"""Memory of the libraries for products of matrices."""
net = nn.Sequential(*(nn.Linear(2048, 2048, device=device) for _ in range(int(sys.argv[1]))))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
data = TensorDataset(torch.randn(24, 2048), torch.randn(24, 2048))
loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=8))
for _epoch in range(2):
    torch.cuda.reset_peak_memory_stats()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x.to(device)), y.to(device)).backward()
        optimizer.step()
print("peak of", torch.cuda.max_memory_allocated() - before, "bytes", flush=True)
