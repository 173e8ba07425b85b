"""A user's training script: the trainer of transformers under DDP, FSDP2 or a file of DeepSpeed; it saves."""

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

folder, kind = sys.argv[1:]
torch.equal = lambda *tensors: True  # DeepSpeed compares what the ranks of tp read
config = LlamaConfig(
    num_hidden_layers=2, hidden_size=128, intermediate_size=256, num_attention_heads=4,
    num_key_value_heads=4, vocab_size=512,
)  # fmt: skip
fsdp = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
arguments = TrainingArguments(
    output_dir=folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4, bf16=True,
    logging_steps=1, save_steps=2, save_total_limit=1, eval_strategy="steps", eval_steps=2, report_to=[],
    load_best_model_at_end=kind == "ddp",
    **({"fsdp": "full_shard auto_wrap", "fsdp_config": fsdp} if kind == "fsdp2" else {}),
    deepspeed=kind if kind.endswith(".json") else None,
)  # fmt: skip
tokens = torch.randint(0, 512, (64, 64))
data = [{"input_ids": each, "labels": each, "position_ids": torch.arange(64)} for each in tokens]
model = AutoModelForCausalLM.from_config(config)
trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:32])
trainer.train()
trainer.save_model()
