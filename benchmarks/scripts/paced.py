"""A plain loop that runs one segment of steps on request, for `python -m benchmarks upkeep`.

Pace's input and output are two pipes of each worker, PIPES/RANK.go and PIPES/RANK.took, since a worker of
`stretto run` has no standard input of its own.
"""

import argparse
import sys
from pathlib import Path

from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

import stretto
from benchmarks.fault_tolerance_switch import FaultToleranceSwitch
from benchmarks.pace import Pace
from benchmarks.tasks import BATCH, Samples, build

parser = argparse.ArgumentParser()
parser.add_argument("pipes", type=Path)
parser.add_argument("case")
parser.add_argument("segment", type=int, help="steps of a segment")
parser.add_argument("segments", type=int)
parser.add_argument("--aside", action="store_true", help="fault tolerance can be switched off in a segment")
parser.add_argument("--clip", action="store_true", help="clip the gradients")
arguments = parser.parse_args()

model, optimizer, task = build(arguments.case)
workers, rank = stretto.world_size(), stretto.rank()
data = Samples(task.shape, workers * (arguments.segments + 2) * arguments.segment * BATCH)  # one epoch
loader = stretto.distribute(model, optimizer, DataLoader(data, batch_size=BATCH, shuffle=True))

sys.stdin = (arguments.pipes / f"{rank}.go").open()
sys.stdout = (arguments.pipes / f"{rank}.took").open("w")
pace = (
    Pace(arguments.segment, FaultToleranceSwitch(loader._trainer).set_for_segment)
    if arguments.aside
    else Pace(arguments.segment)
)
pace.begin()
for x, y in loader:
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    if arguments.clip:
        clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    pace.step()
