"""Fine-tunes a language model with LoRA (TRL and PEFT) to write dates as numbers: nothing in it names Stretto.

python examples/libraries/lora.py --model HuggingFaceTB/SmolLM2-135M
stretto run -n 2 --recipe "diloco(every=20)" examples/libraries/lora.py --model HuggingFaceTB/SmolLM2-135M

Without --model it takes a small model with random weights and its bytes as tokens, so that nothing is downloaded.
"""

import argparse
import random
from datetime import date, timedelta

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

options = argparse.ArgumentParser(description="Fine-tune a language model with LoRA.")
options.add_argument("--model", help="a name of the hub, or a folder; a small one with random weights without it")
options.add_argument("--samples", type=int, default=2000)
options.add_argument("--steps", type=int, default=200)
options.add_argument("--batch", type=int, default=8)
options.add_argument("--accumulate", type=int, default=2)
options.add_argument("--lr", type=float, default=2e-3)
options.add_argument("--rank", type=int, default=16)
options.add_argument("--out", default="lora")
asked = options.parse_args()


def untrained() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a small model with random weights, and a tokenizer of single bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    places = {letter: place for place, letter in enumerate(["<pad>", "</s>", *letters])}
    tokenizer = Tokenizer(models.BPE(places, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(places), **shape, pad_token_id=0, eos_token_id=1, bos_token_id=1)
    return LlamaForCausalLM(config), PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>"
    )


def dates(samples: int, seed: int) -> Dataset:
    """Return dates in words, each with its number."""
    source, first = random.Random(seed), date(1900, 1, 1)
    drawn = [first + timedelta(days=source.randrange(60000)) for _ in range(samples)]
    return Dataset.from_list(
        [{"prompt": f"{day:%A}, {day.day} {day:%B %Y} = ", "completion": day.isoformat()} for day in drawn]
    )


set_seed(0)
if asked.model is None:
    model, tokenizer = untrained()
else:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(asked.model), AutoTokenizer.from_pretrained(asked.model)

trainer = SFTTrainer(
    model,
    SFTConfig(
        asked.out,
        max_steps=asked.steps,
        per_device_train_batch_size=asked.batch,
        gradient_accumulation_steps=asked.accumulate,
        learning_rate=asked.lr,
        warmup_steps=asked.steps // 20,
        lr_scheduler_type="cosine",
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=asked.steps // 4,
        save_steps=asked.steps // 4,
        save_total_limit=2,
        report_to=[],
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=dates(asked.samples, seed=1),
    eval_dataset=dates(200, seed=2),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=asked.rank, task_type="CAUSAL_LM", target_modules="all-linear"),
)
trainer.train()
trainer.save_model()
