"""A stock script of Lightning, with random weights and no download: `python lit.py OUT` trains alone."""

import argparse
import json
import os
import signal
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--samples", type=int, default=103)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--set", type=json.loads, default={})
parser.add_argument("--fits", type=int, default=1)
parser.add_argument("--tokens", action="store_true", help="the loss is a mean over tokens")
parser.add_argument("--kill", default="-1:0:none", help="worker, step and event at which it is killed, once")
given = parser.parse_args()


class Module(lightning.LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y, tokens = batch
        errors = (self.layers(x) - y).square().squeeze(1)
        return (errors * tokens).sum() / tokens.sum() if given.tokens else errors.mean()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self.loss(batch)
        if given.tokens:
            import stretto

            stretto.weight(batch[2].sum())
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Killer(Callback):
    """Kills this process once."""

    def __init__(self) -> None:
        worker, step, self.event = given.kill.split(":")
        self.worker, self.step, self.flag = int(worker), int(step), Path(f"{given.out}.killed")

    def meet(self, event: str, step: int) -> None:
        if event != self.event or step < self.step or self.flag.exists():
            return
        import stretto

        if stretto.rank() == self.worker:
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, trainer, module, *more):  # type: ignore[no-untyped-def]
        self.meet("batch", trainer.global_step)

    def on_before_zero_grad(self, trainer, module, *more):  # type: ignore[no-untyped-def]
        self.meet("pass", trainer.global_step)

    def on_validation_batch_end(self, trainer, module, *more):  # type: ignore[no-untyped-def]
        self.meet("evaluating", trainer.global_step)

    def on_save_checkpoint(self, trainer, module, checkpoint):  # type: ignore[no-untyped-def]
        self.meet("saving", trainer.global_step)


lightning.seed_everything(7)
module = Module()
source = torch.Generator().manual_seed(1)


def rows(samples: int) -> TensorDataset:
    x = torch.randn(samples, 6, generator=source)
    tokens = torch.randint(1, 20, (samples,), generator=source)
    return TensorDataset(x, x.sin().sum(1, keepdim=True), tokens)


train, val = rows(given.samples), rows(24)
options = {
    "max_epochs": 3,
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.5,
    "log_every_n_steps": 3,
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
} | given.set
rates = []
for number in range(given.fits):
    folder = given.out / f"fit-{number}"
    best = ModelCheckpoint(folder, "best-{epoch}-{step}", monitor="val_loss", save_last=True, save_top_k=2)
    callbacks = [best, EarlyStopping("val_loss", patience=30), LearningRateMonitor(), Killer()]
    trainer = lightning.Trainer(**options, callbacks=callbacks, logger=CSVLogger(folder, name="log"))
    loader = DataLoader(train, batch_size=given.batch, shuffle=True)
    trainer.fit(module, loader, DataLoader(val, batch_size=8))
    rates.append(trainer.optimizers[0].param_groups[0]["lr"])
evaluated = trainer.validate(module, DataLoader(val, batch_size=8), verbose=False)[0]["val_loss"]
if trainer.is_global_zero:
    from safetensors.torch import save_file

    (given.out / "final").mkdir(parents=True, exist_ok=True)
    save_file(module.state_dict(), str(given.out / "final/model.safetensors"))
    logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
    result = {"steps": trainer.global_step, "epochs": trainer.current_epoch, "rate": rates[-1], "val_loss": evaluated}
    result |= {"best": Path(best.best_model_path).name, "score": float(best.best_model_score), "logged": logged}
    (given.out / "result.json").write_text(json.dumps(result))
