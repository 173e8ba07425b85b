"""A user's inference script: a Llama of transformers that generates, greedily and by sampling."""

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

dist.init_process_group("nccl")
config = LlamaConfig(
    num_hidden_layers=2, hidden_size=128, intermediate_size=256, num_attention_heads=4,
    num_key_value_heads=4, vocab_size=512,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().eval()
prompt = torch.randint(5, 512, (2, 16), device="cuda")
with torch.inference_mode():
    for how in ({"do_sample": False}, {"do_sample": True, "top_p": 0.9, "temperature": 0.7}):
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, **how)
        assert found.shape == (2, 24)
