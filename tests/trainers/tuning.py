"""Stock scripts of TRL, PEFT and Seq2SeqTrainer with random weights: `python tuning.py OUT --kind sft`.

Other kinds: packing, lora, dpo, reward, kto, seq2seq.
"""

import argparse
import copy
import json
import random
from pathlib import Path

import datasets
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--kind", default="sft")
parser.add_argument("--samples", type=int, default=87)
parser.add_argument("--rank", type=int, default=32)
parser.add_argument("--set", type=json.loads, default={})
given = parser.parse_args()

datasets.disable_progress_bars()
set_seed(7)
words = ["<pad>", "</s>", "<s>", "<unk>", *(f"w{number}" for number in range(60))]
inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokens = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
llama = LlamaConfig(vocab_size=len(words), **shape, pad_token_id=0, bos_token_id=2, eos_token_id=1, num_labels=1)
model = (LlamaForSequenceClassification if given.kind == "reward" else LlamaForCausalLM)(llama)
source = random.Random(1)


def text(step: int) -> str:
    start = source.randint(0, 59)
    return " ".join(f"w{(start + step * place) % 60}" for place in range(source.randint(2, 9)))


def rows(samples: int) -> datasets.Dataset:
    pairs = given.kind in ("dpo", "reward")
    kinds = {"prompt": 1, "chosen": 3, "rejected": 7} if pairs else {"prompt": 1, "completion": 3}
    found = [{name: text(step) for name, step in kinds.items()} for _ in range(samples)]
    if given.kind == "seq2seq":
        found = [
            {"input_ids": tokens(one["prompt"]).input_ids, "labels": tokens(one["completion"]).input_ids}
            for one in found
        ]
    if given.kind == "kto":
        found = [one | {"label": number % 2 == 0} for number, one in enumerate(found)]
    return datasets.Dataset.from_list(found)


options = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 12,
    "learning_rate": 3e-3,
    "warmup_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 6,
    "save_steps": 6,
    "logging_steps": 3,
    "load_best_model_at_end": True,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "max_length": 32,
    "packing": given.kind == "packing",
    "gradient_checkpointing": given.kind == "lora",
} | given.set
OTHERS = {
    "dpo": (DPOTrainer, DPOConfig),
    "kto": (KTOTrainer, KTOConfig),
    "reward": (RewardTrainer, RewardConfig),
    "seq2seq": (Seq2SeqTrainer, Seq2SeqTrainingArguments),
}
if given.kind in OTHERS:
    options.pop("packing")
kind, Config = OTHERS.get(given.kind, (SFTTrainer, SFTConfig))
more = {}
if given.kind in ("dpo", "kto"):
    more = {"ref_model": copy.deepcopy(model)}
elif given.kind == "lora":
    more = {"peft_config": LoraConfig(r=given.rank, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])}
elif given.kind == "seq2seq":
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=len(words), decoder_start_token_id=0, **sizes))
    more = {"data_collator": DataCollatorForSeq2Seq(tokens, model=model)}
    options |= {"predict_with_generate": True, "train_sampling_strategy": "group_by_length"}
    options.pop("max_length")
config = Config(str(given.out), **options)
data = {"train_dataset": rows(given.samples), "eval_dataset": rows(20), "processing_class": tokens}
trainer = kind(model, args=config, **data, **more)
done = trainer.train()
trainer.save_model(str(given.out / "final"))
if trainer.is_world_process_zero():
    evaluated = [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one]
    trained = sum(one.numel() for one in trainer.model.parameters() if one.requires_grad)
    result = {"steps": done.global_step, "loss": done.training_loss, "evaluated": evaluated, "trained": trained}
    (given.out / "result.json").write_text(json.dumps(result))
