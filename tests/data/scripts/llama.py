"""A user's training script: a Llama of Hugging Face transformers, made from a config, under FSDP2."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
config = LlamaConfig(
    num_hidden_layers=4, hidden_size=1024, intermediate_size=4096, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, vocab_size=32768,
)  # fmt: skip
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for module in (*model.model.layers, model):
    fully_shard(module, mp_policy=policy)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for _ in range(2):
    tokens = torch.randint(0, config.vocab_size, (1, 4096), device="cuda")
    loss = model(input_ids=tokens, attention_mask=torch.ones(1, 4096, device="cuda"), labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
