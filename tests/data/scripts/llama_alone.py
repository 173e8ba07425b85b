"""Some layers of Llama 3.2 3B on one card: bf16 throughout, `llama_alone.py MICROBATCH RECOMPUTE`."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=24,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
)  # fmt: skip
torch.set_default_dtype(torch.bfloat16)
model = LlamaForCausalLM(config).cuda().train()
if sys.argv[2] == "full":
    model.gradient_checkpointing_enable({"use_reentrant": False})
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(2):
    tokens = torch.randint(0, config.vocab_size, (int(sys.argv[1]), 2048), device="cuda")
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
