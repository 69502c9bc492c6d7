"""A generative adversarial network on scikit-learn's digits: two models, two optimizers, one line.

Both models are given as one list, and both optimizers as another: each optimizer has its own steps, under one recipe.

python examples/gan.py
stretto run -n 3 --recipe "local_sgd(every=4)" examples/gan.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

import stretto

options = argparse.ArgumentParser(description="Train a generator and a discriminator on scikit-learn's digits.")
options.add_argument("--epochs", type=int, default=20)
options.add_argument("--batch", type=int, default=32)
options.add_argument("--lr", type=float, default=1e-3)
asked = options.parse_args()

NOISE = 16

images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1  # (1797, 64), from -1 to 1
fixed_noise = torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(1))


def moments(images: Tensor) -> Tensor:
    """Return the mean and the standard deviation of each pixel (2, 64)."""
    return torch.stack([images.mean(0), images.std(0)])


def score(models: list[nn.Module]) -> dict[str, float]:
    """Return the distance of the generated pixels' moments from those of the real images."""
    with torch.no_grad():
        generated = models[0](fixed_noise)
    return {"distance": (moments(generated) - moments(images)).abs().mean().item()}


def loss_of(answers: Tensor, real: bool) -> Tensor:
    return binary_cross_entropy_with_logits(answers, torch.full_like(answers, float(real)))


torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh())
discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
opt_g = torch.optim.Adam(generator.parameters(), lr=asked.lr, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(discriminator.parameters(), lr=asked.lr, betas=(0.5, 0.999))
loader = DataLoader(TensorDataset(images), batch_size=asked.batch, shuffle=True)

loader = stretto.distribute([generator, discriminator], [opt_g, opt_d], loader, evaluate=score)  # the one line

for _ in range(asked.epochs):
    for (real,) in loader:
        generated = generator(torch.randn(len(real), NOISE))

        loss_d = loss_of(discriminator(real), True) + loss_of(discriminator(generated.detach()), False)
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()

        loss_g = loss_of(discriminator(generated), True)
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        stretto.log(loss_d=loss_d, loss_g=loss_g)

print(f"distance {score([generator, discriminator])['distance']:.4f}")
