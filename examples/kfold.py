"""Cross-validation on scikit-learn's digits: a model for each fold, and a call of `distribute` for each model.

A call ends the training before it and begins another. All workers have the agreed model of a fold at its end, so each
of them computes the same accuracy.

python examples/kfold.py
stretto run -n 3 --recipe "local_sgd(every=4)" examples/kfold.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import stretto

options = argparse.ArgumentParser(description="Cross-validate a perceptron on scikit-learn's digits.")
options.add_argument("--folds", type=int, default=5)
options.add_argument("--epochs", type=int, default=5, help="of each fold")
options.add_argument("--batch", type=int, default=32)
options.add_argument("--lr", type=float, default=0.05)
asked = options.parse_args()

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
folds = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).chunk(asked.folds)

accuracies = []
for number, held_out in enumerate(folds):
    train = torch.cat([fold for other, fold in enumerate(folds) if other != number])

    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=asked.lr, momentum=0.9)
    loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=asked.batch, shuffle=True)

    loader = stretto.distribute(model, optimizer, loader)  # the one line, once a fold

    for _ in range(asked.epochs):
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with torch.no_grad():
        answers = model(images[held_out]).argmax(1)
    accuracies.append((answers == labels[held_out]).float().mean().item())
    print(f"fold {number + 1}: accuracy {accuracies[-1]:.4f}")

print(f"mean accuracy {sum(accuracies) / len(accuracies):.4f} of {len(accuracies)} folds")
