"""Fine-tuning with gradual thawing on scikit-learn's digits: first the new head alone, then layer after layer.

The network has learned whether a digit is even; here it learns which digit it is. Layers are thawed in the middle of an
epoch, when the optimizer has done a number of steps; every recipe takes them up at that step.

python examples/thaw.py
stretto run -n 3 --recipe "diloco(every=8)" examples/thaw.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import stretto

options = argparse.ArgumentParser(description="Fine-tune a perceptron, thawing its layers one by one.")
options.add_argument("--epochs", type=int, default=12)
options.add_argument("--batch", type=int, default=32)
options.add_argument("--lr", type=float, default=0.05)
options.add_argument(
    "--thaw-every", type=int, default=50, help="steps of a worker after which one more layer is thawed"
)
asked = options.parse_args()

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
mixed = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = mixed[:1437], mixed[1437:]


def pretrained() -> nn.Sequential:
    """Return a body that has learned to tell even digits from odd ones, the same on every worker."""
    body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    network = nn.Sequential(body, nn.Linear(64, 2))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        cross_entropy(network(images[train]), labels[train] % 2).backward()
        optimizer.step()
    return body


def score(model: nn.Module) -> dict[str, float]:
    with torch.no_grad():
        return {"test_accuracy": (model(images[test]).argmax(1) == labels[test]).float().mean().item()}


torch.manual_seed(0)
body, head = pretrained().requires_grad_(False), nn.Linear(64, 10)
model = nn.Sequential(body, head)
optimizer = torch.optim.SGD(
    [{"params": head.parameters()}, {"params": body.parameters(), "lr": asked.lr / 2}], lr=asked.lr, momentum=0.9
)
loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=asked.batch, shuffle=True)

loader = stretto.distribute(model, optimizer, loader, evaluate=score)  # the one line

frozen = [layer for layer in body if isinstance(layer, nn.Linear)]
step = 0
for _ in range(asked.epochs):
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stretto.log(loss=loss)
        step += 1
        if frozen and step % asked.thaw_every == 0:
            frozen.pop().requires_grad_(True)

print(f"accuracy {score(model)['test_accuracy']:.4f}, {len(frozen)} layers still frozen")
