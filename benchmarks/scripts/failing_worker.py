"""A plain loop on the digits whose workers can be killed or paused in any phase, for tests and tables of survival.

`--strike 1,2:KILL:exchanging` sends SIGKILL to workers 1 and 2. A restarted worker does not get the signal again. With
`--count FOLDER` the model has a table with a row for each sample and a column for each epoch, whose gradient is 1 where
it is trained; the folder has the numbers at the end.
"""

import argparse
import hashlib
import os
import signal
import threading
import time
from pathlib import Path

import torch
from noted_shares import NotedShares, write_counts
from sklearn.datasets import load_digits
from torch import nn

import stretto
from stretto.process_config import WorkerConfig, worker_config

TRAINED = 1200
"""Number of samples that are trained; the others are held out."""
parser = argparse.ArgumentParser()
parser.add_argument("--strike", default="", help="RANKS:SIGNAL:PHASE")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--count", type=Path, help="folder for how often each sample was trained, as the model counts")
parser.add_argument("--pause", type=float, default=0.03, help="seconds that a step takes longer")
arguments = parser.parse_args()

ranks, signal_name, phase = (arguments.strike or "::").split(":")
config = worker_config() or WorkerConfig()
is_target = str(config.worker) in ranks.split(",") and config.incarnation == 0


def send_signal(now: str) -> None:
    """Send the signal to this process if it is meant for this phase."""
    if is_target and now == phase:
        os.kill(os.getpid(), getattr(signal, f"SIG{signal_name}"))


def send_signal_while_saving() -> None:
    """Send the signal as soon as a checkpoint is being written, or after 3 seconds. Runs in a thread."""
    folder = os.path.join(config.run or "", "checkpoints")
    limit = time.monotonic() + 3
    while time.monotonic() < limit and not (os.path.isdir(folder) and os.listdir(folder)):
        time.sleep(0.0005)
    send_signal("checkpointing")


send_signal("start")
torch.manual_seed(0)
digits = load_digits()
order = torch.randperm(
    len(digits.target), generator=torch.Generator().manual_seed(1)
)  # the images are ordered by writer
images = torch.tensor(digits.data / 16, dtype=torch.float32)[order]
labels = torch.tensor(digits.target)[order]
model = nn.Sequential(nn.Linear(64, 700), nn.ReLU(), nn.Linear(700, 700), nn.ReLU(), nn.Linear(700, 10))
count = nn.Embedding(TRAINED, arguments.epochs if arguments.count else 0)
nn.init.zeros_(count.weight)
groups = [{"params": model.parameters()}, *([{"params": count.parameters(), "lr": 1.0}] if arguments.count else [])]
optimizer = torch.optim.SGD(groups, lr=0.2)
whole = nn.ModuleDict({"model": model, "count": count}) if arguments.count else model
data = torch.utils.data.TensorDataset(images[:TRAINED], labels[:TRAINED], torch.arange(TRAINED))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)


def accuracy(whole: nn.Module) -> dict[str, float]:
    """Return the accuracy on the held-out images."""
    send_signal("evaluating")
    net = whole["model"] if isinstance(whole, nn.ModuleDict) else whole
    return {"test_accuracy": float((net(images[TRAINED:]).argmax(1) == labels[TRAINED:]).float().mean())}


noted = NotedShares(arguments.count, config.worker) if arguments.count else None
loader = stretto.distribute(whole, optimizer, loader, evaluate=accuracy)
steps = 0
for epoch in range(arguments.epochs):
    for x, y, numbers in loader:
        if noted is not None:
            noted.add(epoch, numbers.tolist())
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if arguments.count:
            loss = loss + count(numbers)[:, epoch].sum()
        if steps == 11:
            send_signal("computing")
            if is_target and phase == "checkpointing":
                threading.Thread(target=send_signal_while_saving, daemon=True).start()
            if phase == "exchanging":  # between two buckets: the first one is then being sent
                first = next(iter(model.parameters()))
                first.register_hook(lambda _grad: send_signal("exchanging"))
        loss.backward()
        optimizer.step()
        time.sleep(arguments.pause)
        steps += 1
    if epoch == 0:
        send_signal("epoch end")

state = b"".join(one.detach().numpy().tobytes() for one in whole.parameters())
print(f"steps {steps} state {hashlib.blake2b(state, digest_size=8).hexdigest()}")
if arguments.count:
    write_counts(arguments.count, arguments.epochs, config.worker, whole.state_dict())
