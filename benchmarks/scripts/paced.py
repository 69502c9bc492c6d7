"""A plain loop that runs one segment of steps whenever it is told to, for `python -m benchmarks upkeep`.

What Pace reads and says goes through two pipes of each worker, PIPES/RANK.go and PIPES/RANK.took, since a worker of
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
from benchmarks.tasks import BATCH, Samples, made

parser = argparse.ArgumentParser()
parser.add_argument("pipes", type=Path)
parser.add_argument("case")
parser.add_argument("segment", type=int, help="steps of a segment")
parser.add_argument("segments", type=int)
parser.add_argument("--aside", action="store_true", help="readiness may be set aside in a segment")
parser.add_argument("--clip", action="store_true", help="clip the gradients")
asked = parser.parse_args()

model, optimizer, task = made(asked.case)
workers, rank = stretto.world_size(), stretto.rank()
data = Samples(task.shape, workers * (asked.segments + 2) * asked.segment * BATCH)  # one pass
loader = stretto.distribute(model, optimizer, DataLoader(data, batch_size=BATCH, shuffle=True))

sys.stdin = (asked.pipes / f"{rank}.go").open()
sys.stdout = (asked.pipes / f"{rank}.took").open("w")
pace = (
    Pace(asked.segment, FaultToleranceSwitch(loader._trainer).set_for_segment) if asked.aside else Pace(asked.segment)
)
pace.begin()
for x, y in loader:
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    if asked.clip:
        clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    pace.step()
