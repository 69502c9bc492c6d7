"""A plain loop of short epochs, whose models are kept in every other block, for `python -m benchmarks last_model`."""

import argparse
import json
import time
from pathlib import Path

from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import stretto
from benchmarks.tasks import BATCH, Samples, build

parser = argparse.ArgumentParser()
parser.add_argument("seconds", type=Path, help="file for the seconds of all blocks, by side")
parser.add_argument("case")
parser.add_argument("steps", type=int, help="steps of an epoch")
parser.add_argument("epochs", type=int, help="epochs of a block")
parser.add_argument("pairs", type=int, help="pairs of blocks, after two that are not counted")
arguments = parser.parse_args()

model, optimizer, task = build(arguments.case)
data = Samples(task.shape, stretto.world_size() * arguments.steps * BATCH)
loader = stretto.distribute(model, optimizer, DataLoader(data, batch_size=BATCH, shuffle=True))
last_model = loader._trainer.last_model
sides = {"kept": last_model.keep, "not kept": lambda *_arguments, **_options: None}
seconds: dict[str, list[float]] = {side: [] for side in sides}
for pair in range(arguments.pairs + 1):
    for side in list(sides) if pair % 2 else list(sides)[::-1]:
        last_model.keep = sides[side]
        began = time.perf_counter()
        for _epoch in range(arguments.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        if pair:
            seconds[side].append(time.perf_counter() - began)
if stretto.rank() == 0:
    arguments.seconds.write_text(json.dumps(seconds))
