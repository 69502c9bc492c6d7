"""Stock loops of Accelerate with random weights: `python loops.py OUT --kind clm`, nlp or cv."""

import argparse
import json
import math
import os
import random
import signal
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import save_file
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--kind", default="clm")
parser.add_argument("--samples", type=int, default=104)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--max_train_steps", type=int, default=None)
parser.add_argument("--checkpointing_steps", type=int, default=None)
parser.add_argument("--resume_from_checkpoint", default=None)
parser.add_argument("--form", default="prepare", help="or distribute: the script distributes the loader itself")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--kill", default="-1:0:none", help="worker, step and event at which it is killed, once")
parser.add_argument("--slow", action="store_true", help="slow steps from the kill until that worker is back")
args = parser.parse_args()
killed, kill_step, kill_event = args.kill.split(":")
flag, back = Path(f"{args.out}.killed"), Path(f"{args.out}.back")


def meet(event: str, step: int) -> None:
    """Kill this process once."""
    if event != kill_event:
        return
    import stretto

    is_killed = stretto.rank() == int(killed)
    if is_killed and step >= int(kill_step) and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if is_killed and flag.exists():
        back.touch()
    elif args.slow and flag.exists() and not back.exists():
        time.sleep(0.2)


accelerator = Accelerator(gradient_accumulation_steps=args.accumulation, cpu=True)
set_seed(7)
source = random.Random(1)


def rows(samples: int) -> list[dict[str, list[int] | int]]:
    found = []
    for _ in range(samples):
        start, length = source.randint(0, 96), source.randint(4, 24)
        found.append({"input_ids": [(start + 3 * place) % 97 for place in range(length)], "label": length % 2})
    return found


def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(one["input_ids"]) for one in batch], batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([len(one["input_ids"]) for one in batch])[:, None]
    labels = torch.tensor([one["label"] for one in batch])
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~mask, -100) if args.kind == "clm" else labels,
    }


def pictures(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    x = torch.tensor([[one["input_ids"][place] / 97 for place in (0, 1, 2, 3)] for one in batch])
    return {"image": x, "label": torch.tensor([one["label"] for one in batch])}


class Net(torch.nn.Sequential):
    """A small network for pictures."""

    def __init__(self) -> None:
        super().__init__(
            torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Dropout(args.dropout), torch.nn.Linear(16, 2)
        )


with accelerator.main_process_first():
    train, valid = rows(args.samples), rows(26)
size = {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": 97}
drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), args.dropout)
if args.kind == "clm":
    from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

    model = GPT2LMHeadModel(GPT2Config(n_positions=32, n_embd=16, n_layer=1, n_head=2, **size, **drop))
elif args.kind == "nlp":
    from transformers import BertConfig, BertForSequenceClassification, get_scheduler

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    rate = {"hidden_dropout_prob": args.dropout, "attention_probs_dropout_prob": args.dropout}
    model = BertForSequenceClassification(BertConfig(vocab_size=97, **small, **rate))
else:
    model = Net()
make = pictures if args.kind == "cv" else collate
train_dataloader = DataLoader(train, shuffle=True, collate_fn=make, batch_size=args.batch)
eval_dataloader = DataLoader(valid, collate_fn=make, batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

overrode_max_train_steps = False
num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.accumulation)
if args.max_train_steps is None:
    args.max_train_steps = args.epochs * num_update_steps_per_epoch
    overrode_max_train_steps = True
steps = args.max_train_steps if overrode_max_train_steps else args.max_train_steps * accelerator.num_processes
lr_scheduler = (
    torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps)
    if args.kind == "cv"
    else get_scheduler("linear", optimizer, num_warmup_steps=3 * accelerator.num_processes, num_training_steps=steps)
)
if args.form == "prepare":
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
else:
    import stretto

    model, optimizer, lr_scheduler = accelerator.prepare(model, optimizer, lr_scheduler)
    train_dataloader = stretto.distribute(model, optimizer, train_dataloader)
num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.accumulation)
if overrode_max_train_steps:
    args.max_train_steps = args.epochs * num_update_steps_per_epoch
args.epochs = math.ceil(args.max_train_steps / num_update_steps_per_epoch)

completed_steps = starting_epoch = resume_step = 0
if args.resume_from_checkpoint:
    accelerator.load_state(args.resume_from_checkpoint)
    resume_step = int(Path(args.resume_from_checkpoint).name.replace("step_", "")) * args.accumulation
    starting_epoch = resume_step // len(train_dataloader)
    completed_steps = resume_step // args.accumulation
    resume_step -= starting_epoch * len(train_dataloader)

evaluated, rates = [], []
for epoch in range(starting_epoch, args.epochs):
    model.train()
    active_dataloader = train_dataloader
    if args.resume_from_checkpoint and epoch == starting_epoch and resume_step:
        active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
    for batch in active_dataloader:
        meet("batch", completed_steps)
        with accelerator.accumulate(model):
            if args.kind == "cv":
                loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            else:
                loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            meet("step", completed_steps)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            completed_steps += 1
            rates.append(lr_scheduler.get_last_lr()[0])
            if args.checkpointing_steps and completed_steps % args.checkpointing_steps == 0:
                accelerator.save_state(str(args.out / f"step_{completed_steps}"))
        if completed_steps >= args.max_train_steps:
            break
    model.eval()
    losses, right, seen = [], 0, 0
    for batch in eval_dataloader:
        meet("evaluating", completed_steps)
        with torch.no_grad():
            labels = batch.pop("label") if args.kind == "cv" else batch["labels"]
            logits = model(batch["image"]) if args.kind == "cv" else model(**batch).logits
        if args.kind == "clm":
            losses.append(accelerator.gather_for_metrics(model(**batch).loss.repeat(4)))
            continue
        predictions, references = accelerator.gather_for_metrics((logits.argmax(-1), labels))
        right, seen = right + int((predictions == references).sum()), seen + len(references)
    evaluated.append(float(torch.cat(losses).mean()) if losses else right / seen)
    seen = seen or len(torch.cat(losses))
    accelerator.print(f"epoch {epoch}: {evaluated[-1]:.6f}")

accelerator.wait_for_everyone()
args.out.mkdir(parents=True, exist_ok=True)
unwrapped = accelerator.unwrap_model(model)
if accelerator.is_main_process:
    (args.out / "final").mkdir(exist_ok=True)
    own = {name: one.clone() for name, one in unwrapped.state_dict().items()}
    save_file(own, str(args.out / "final/model.safetensors"))
    result = {"steps": completed_steps, "rates": rates, "evaluated": evaluated, "seen": seen}
    result["processes"] = accelerator.num_processes
    (args.out / "result.json").write_text(json.dumps(result))
accelerator.end_training()
