"""The digits of scikit-learn as a Lightning script: nothing in it names Stretto.

python examples/libraries/lightning_digits.py
stretto run -n 2 --recipe "local_sgd(every=16)" examples/libraries/lightning_digits.py
"""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

options = argparse.ArgumentParser(description="Train a perceptron on scikit-learn's digits, with Lightning.")
options.add_argument("--epochs", type=int, default=40)
options.add_argument("--batch", type=int, default=32)
options.add_argument("--lr", type=float, default=0.05)
options.add_argument("--out", default="lightning-digits")
asked = options.parse_args()


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.layers(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        images, labels = batch
        is_right = self.layers(images).argmax(1) == labels
        self.log("test_accuracy", is_right.float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=asked.lr, momentum=0.9)


digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
samples = TensorDataset(images, torch.tensor(digits.target))
train, test = random_split(samples, [1437, 360], torch.Generator().manual_seed(0))

lightning.seed_everything(0)
best = ModelCheckpoint(monitor="test_accuracy", mode="max")
trainer = lightning.Trainer(max_epochs=asked.epochs, accelerator="cpu", default_root_dir=asked.out, callbacks=[best])
trainer.fit(
    Digits(),
    DataLoader(train, batch_size=asked.batch, shuffle=True),
    DataLoader(test, batch_size=360),
)
if trainer.is_global_zero:
    print(f"best test_accuracy {best.best_model_score:.4f}: {best.best_model_path}")
