"""One worker of `stretto bits --live`: a plain loop, gradient descent with steps of 1/L on its shard."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from stretto.api import distribute, log
from stretto.bits.live import ERROR, Rounds, load
from stretto.bits.work import HOPELESS


def main(folder: Path) -> None:
    """Descend until the objective error is at the target, or is as far from it as it will ever be."""
    problem, told = load(folder)
    step = 1 / told["smoothness"]
    model = nn.ParameterDict({"theta": nn.Parameter(torch.zeros(problem.wide))})
    optimizer = torch.optim.SGD(model.parameters(), lr=step)
    loader = Rounds(problem, int(told["workers"]), int(told["most"]))
    theta = model["theta"]
    start = problem.objective(theta.detach().double()) - told["least"]
    for x, y in distribute(model, optimizer, loader):
        optimizer.zero_grad()
        (problem.loss.value(x @ theta, y).mean() + problem.l2 / 2 * theta.square().sum()).backward()
        optimizer.step()
        with torch.no_grad():
            theta.copy_(problem.proximal(theta, step))
        error = problem.objective(theta.detach().double()) - told["least"]
        log(**{ERROR: min(error, sys.float_info.max)})
        if not told["target"] < error < HOPELESS * start:
            break


if __name__ == "__main__":
    main(Path(sys.argv[1]))
