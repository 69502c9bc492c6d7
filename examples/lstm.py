"""An LSTM that predicts characters and carries its state from batch to batch.

The batches are consecutive pieces of the text, and each begins where the one before it ended. `deal="contiguous"`
gives each worker one stretch of consecutive batches. Without `deal` a worker gets one batch in N, and the state that it
carries is not that of the characters before.

The text is tiny shakespeare if $STRETTO_DATA has it, else a small one made here.

python examples/lstm.py
stretto run -n 3 --recipe "local_sgd(every=4)" examples/lstm.py
"""

import argparse
import os
import random
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import stretto

options = argparse.ArgumentParser(description="Train an LSTM with carried state on the characters of a text.")
options.add_argument("--epochs", type=int, default=3)
options.add_argument("--batch", type=int, default=16, help="texts that are read side by side")
options.add_argument("--length", type=int, default=25, help="characters of a batch's pieces")
options.add_argument("--lr", type=float, default=5e-3)
options.add_argument("--characters", type=int, default=80000, help="use only so many of the text")
asked = options.parse_args()


def text_of(characters: int) -> str:
    """Return that much of tiny shakespeare, or else words drawn from twelve."""
    path = Path(os.environ.get("STRETTO_DATA", "")) / "tinyshakespeare" / "input.txt"
    if path.is_file():
        return path.read_text()[:characters]
    words = ["king", "queen", "speaks", "of", "war", "but", "love", "will", "end", "their", "long", "day"]
    draw = random.Random(0)
    return " ".join(draw.choice(words) for _ in range(characters))[:characters]


def pieces(tokens: Tensor, batch: int, length: int) -> TensorDataset:
    """Cut the text into `batch` rows, and the rows into pieces: each batch continues the one before it, row by row."""
    many = (len(tokens) - 1) // (batch * length)
    inputs, targets = (part[: batch * many * length].view(batch, many, length) for part in (tokens[:-1], tokens[1:]))
    return TensorDataset(inputs.transpose(0, 1).flatten(0, 1), targets.transpose(0, 1).flatten(0, 1))


class Reader(nn.Module):
    def __init__(self, characters: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden, state = self.lstm(self.embedding(x), state)
        return self.head(hidden), state


text = text_of(asked.characters)
alphabet = {character: at for at, character in enumerate(sorted(set(text)))}
tokens = torch.tensor([alphabet[character] for character in text])
train, held_out = tokens.split([len(tokens) * 9 // 10, len(tokens) - len(tokens) * 9 // 10])


def score(model: nn.Module) -> dict[str, float]:
    with torch.no_grad():
        answers, _ = model(held_out[None, :-1], None)
    return {"validation_loss": cross_entropy(answers[0], held_out[1:]).item()}


torch.manual_seed(0)
model = Reader(len(alphabet))
optimizer = torch.optim.Adam(model.parameters(), lr=asked.lr)
loader = DataLoader(pieces(train, asked.batch, asked.length), batch_size=asked.batch)

loader = stretto.distribute(model, optimizer, loader, evaluate=score, deal="contiguous")  # the one line

for _ in range(asked.epochs):
    state = None
    for x, y in loader:
        answers, state = model(x, state)
        state = tuple(part.detach() for part in state)
        loss = cross_entropy(answers.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        stretto.log(loss=loss)

print(f"validation loss {score(model)['validation_loss']:.4f}")
