"""A recommender: factors of users and films from their ratings, in embeddings with sparse gradients.

Under a recipe over a parameter server, only the rows of a batch are exchanged, not the tables.

The ratings are those of MovieLens (ml-latest-small) if $STRETTO_DATA has them, else some made here.

python examples/recommender.py
stretto run -n 3 --recipe "async_sgd(shards=2)" examples/recommender.py
"""

import argparse
import csv
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import stretto

options = argparse.ArgumentParser(description="Train factors of users and films on their ratings.")
options.add_argument("--epochs", type=int, default=3)
options.add_argument("--batch", type=int, default=256)
options.add_argument("--rank", type=int, default=8, help="number of factors")
options.add_argument("--lr", type=float, default=0.05)
options.add_argument("--ratings", type=int, default=100_000, help="use only so many")
asked = options.parse_args()


def ratings(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return users, films and values in random order: of MovieLens, or else of users and films with hidden factors."""
    path = Path(os.environ.get("STRETTO_DATA", "")) / "ml-latest-small" / "ratings.csv"
    draw = torch.Generator().manual_seed(0)
    if path.is_file():
        with path.open(newline="") as file:
            table = [(int(row["userId"]), int(row["movieId"]), float(row["rating"])) for row in csv.DictReader(file)]
        users, films, values = (torch.tensor(column) for column in zip(*table, strict=True))
        users, films = (column.unique(return_inverse=True)[1] for column in (users, films))
    else:
        users, films = (torch.randint(0, most, (count,), generator=draw) for most in (600, 2000))
        tastes, kinds = (torch.randn(most, 4, generator=draw) for most in (600, 2000))
        values = 3.5 + (tastes[users] * kinds[films]).sum(1).clamp(-2, 1.5)
    order = torch.randperm(len(values), generator=draw)[:count]
    return users[order], films[order], values[order]


class Recommender(nn.Module):
    def __init__(self, users: int, films: int, rank: int, mean: float) -> None:
        super().__init__()
        self.users, self.films = nn.Embedding(users, rank, sparse=True), nn.Embedding(films, rank, sparse=True)
        self.user_bias, self.film_bias = nn.Embedding(users, 1, sparse=True), nn.Embedding(films, 1, sparse=True)
        self.mean = nn.Parameter(torch.tensor(mean))
        for table in (self.users, self.films):
            nn.init.normal_(table.weight, std=0.1)
        for table in (self.user_bias, self.film_bias):
            nn.init.zeros_(table.weight)

    def forward(self, users: Tensor, films: Tensor) -> Tensor:
        match = (self.users(users) * self.films(films)).sum(1)
        return self.mean + match + self.user_bias(users)[:, 0] + self.film_bias(films)[:, 0]


users, films, values = ratings(asked.ratings)
train, test = (slice(len(values) // 10, None), slice(0, len(values) // 10))


def score(model: nn.Module) -> dict[str, float]:
    with torch.no_grad():
        return {"test_rmse": mse_loss(model(users[test], films[test]), values[test]).sqrt().item()}


torch.manual_seed(0)
model = Recommender(int(users.max()) + 1, int(films.max()) + 1, asked.rank, values[train].mean().item())
optimizer = torch.optim.Adagrad(model.parameters(), lr=asked.lr)
loader = DataLoader(TensorDataset(users[train], films[train], values[train]), batch_size=asked.batch, shuffle=True)

loader = stretto.distribute(model, optimizer, loader, evaluate=score)  # the one line

for _ in range(asked.epochs):
    for user, film, value in loader:
        loss = mse_loss(model(user, film), value)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        stretto.log(loss=loss)

print(f"test_rmse {score(model)['test_rmse']:.4f}")
