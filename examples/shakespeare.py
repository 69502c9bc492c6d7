"""A small GPT that learns to write Shakespeare, character by character.

python examples/shakespeare.py
stretto run -n 2 --recipe "diloco(every=50)" examples/shakespeare.py
"""

import argparse
import math

import datasets
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, TensorDataset

import stretto

options = argparse.ArgumentParser(description="Train a small GPT on the characters of tiny shakespeare.")
options.add_argument("--epochs", type=int, default=1)
options.add_argument("--batch", type=int, default=32)
options.add_argument("--lr", type=float, default=3e-3)
options.add_argument("--layers", type=int, default=3)
options.add_argument("--width", type=int, default=128)
options.add_argument("--characters", type=int, default=1115394, help="use only so many of the text")
asked = options.parse_args()

CONTEXT, HEADS, WARM_UP = 64, 4, 50

text = datasets.shakespeare()
alphabet = sorted(set(text))
place = {character: at for at, character in enumerate(alphabet)}
tokens = torch.tensor([place[character] for character in text[: asked.characters]])
train, held_out = tokens.split([len(tokens) * 9 // 10, len(tokens) - len(tokens) * 9 // 10])


def windows(tokens: Tensor) -> TensorDataset:
    """Return inputs and targets (n, CONTEXT): the text in windows, and the same windows one character later."""
    pieces = tokens.unfold(0, CONTEXT + 1, CONTEXT)
    return TensorDataset(pieces[:, :-1], pieces[:, 1:])


# Shapes: b batch, t time, c channels, h heads.
class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x))
        return x + self.feed_forward(x)

    def attend(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        query, key, value = self.qkv(x).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)  # (b, h, t, c / h)
        return self.projection(attended.transpose(1, 2).reshape(b, t, c))


class Writer(nn.Module):
    def __init__(self, characters: int, layers: int, width: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(characters, width)
        self.position_embedding = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        self.head.weight = self.token_embedding.weight
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.token_embedding(x) + self.position_embedding.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(embedded)))


def loss_of(answers: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(answers.flatten(0, 1), y.flatten())


def score(model: nn.Module) -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model(x), y) * len(x) for x, y in DataLoader(windows(held_out), batch_size=128)]
    return {"validation_loss": (sum(losses) / len(windows(held_out))).item()}


torch.manual_seed(0)
model = Writer(len(alphabet), asked.layers, asked.width)
optimizer = torch.optim.AdamW(model.parameters(), lr=asked.lr, betas=(0.9, 0.99), weight_decay=0.1)
loader = DataLoader(windows(train), batch_size=asked.batch, shuffle=True)

loader = stretto.distribute(model, optimizer, loader, evaluate=score)  # the one line

steps = asked.epochs * len(loader)


def pace(step: int) -> float:
    """Return the learning rate's factor: warm-up, then half a cosine down to a tenth."""
    warm_up = min(WARM_UP, steps // 10 + 1)
    return min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * step / steps))


schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, pace)
model.train()
for _ in range(asked.epochs):
    for x, y in loader:
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        stretto.log(loss=loss)
