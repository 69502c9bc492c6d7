"""A stock script of transformers.Trainer, with random weights and no download: `python stock.py` trains alone."""

import argparse
import json
import os
import random
import signal
from pathlib import Path

import torch
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--samples", type=int, default=103)
parser.add_argument("--set", type=json.loads, default={})
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--resume", default=None)
parser.add_argument("--trains", type=int, default=1)
parser.add_argument("--kill", default="-1:0:none", help="worker, step and event at which it is killed, once")
parser.add_argument("--mean", action="store_true", help="a loss of the script's own, the mean of each micro-batch")
given = parser.parse_args()

set_seed(7)
drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), given.dropout)
config = GPT2Config(
    vocab_size=97, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0, **drop
)
model = GPT2LMHeadModel(config)
source = random.Random(1)


def rows(samples: int) -> list[dict[str, list[int]]]:
    starts = ((source.randint(0, 96), source.randint(4, 24)) for _ in range(samples))
    return [{"input_ids": [(start + 3 * place) % 97 for place in range(length)]} for start, length in starts]


def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(one["input_ids"]) for one in batch], batch_first=True)
    lengths = torch.tensor([len(one["input_ids"]) for one in batch])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


class Killer(TrainerCallback):
    """Kills this process once: at an event of the library, or while it saves its files after the model."""

    def __init__(self) -> None:
        worker, step, self.event = given.kill.split(":")
        self.worker, self.step, self.flag = int(worker), int(step), Path(f"{given.out}.killed")

    def meet(self, event: str, step: int) -> None:
        """Kill this process if it is time."""
        import stretto

        if event == self.event and step >= self.step and stretto.rank() == self.worker and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def save_pretrained(self, folder: str) -> None:
        """Take the place of a tokenizer, whose files are written after those of the model."""
        self.meet("saving", trainer.state.global_step)

    def on_substep_end(self, args, state, control, **named):  # type: ignore[no-untyped-def]
        self.meet("substep", state.global_step)

    def on_step_end(self, args, state, control, **named):  # type: ignore[no-untyped-def]
        self.meet("step", state.global_step)

    def on_prediction_step(self, args, state, control, **named):  # type: ignore[no-untyped-def]
        self.meet("evaluating", state.global_step)

    def on_epoch_end(self, args, state, control, **named):  # type: ignore[no-untyped-def]
        self.meet("epoch", state.global_step)


options = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 20,
    "learning_rate": 3e-3,
    "warmup_steps": 3,
    "lr_scheduler_type": "cosine",
    "eval_strategy": "steps",
    "eval_steps": 5,
    "save_steps": 5,
    "logging_steps": 5,
    "load_best_model_at_end": True,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}


class MeanTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **named):  # type: ignore[no-untyped-def]
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


trainer = (MeanTrainer if given.mean else Trainer)(
    model,
    TrainingArguments(str(given.out), **(options | given.set)),
    data_collator=collate,
    train_dataset=rows(given.samples),
    eval_dataset=rows(24),
    callbacks=[EarlyStoppingCallback(20), killer := Killer()],
    processing_class=killer,
)
for _ in range(given.trains):
    done = trainer.train(resume_from_checkpoint=given.resume)
trainer.save_model(str(given.out / "final"))
losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
rate = trainer.lr_scheduler.get_last_lr()[0]
result = {"steps": done.global_step, "loss": done.training_loss, "losses": losses, "rate": rate}
result["best"] = getattr(trainer.state, "best_global_step", None)
if trainer.is_world_process_zero():
    (given.out / "result.json").write_text(json.dumps(result))
