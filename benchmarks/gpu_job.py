"""A Llama from a config.json on one device, in plain torch: training steps under FSDP2, or a serving loop.

    python gpu_job.py train|serve CONFIG DEVICE BATCH TOKENS STEPS

It prints one line of JSON: seconds of each step (or pass), and the peak of the allocator.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

work, config, device, batch, tokens, steps = (*sys.argv[1:4], *map(int, sys.argv[4:7]))
sizes = json.loads(Path(config).read_text())
HIDDEN, FFN, VOCAB = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
HEADS, KV_HEADS = sizes["num_attention_heads"], sizes["num_key_value_heads"]
WIDTH = HIDDEN // HEADS


class Layer(nn.Module):
    """Attention over all earlier tokens, and a gated MLP; `cache` holds keys and values while serving."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * WIDTH, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, HIDDEN, bias=False)
        self.cache = None

    def forward(self, x, is_served=False):
        qkv = self.qkv(self.norm(x)).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        if is_served:
            old = self.cache or (k[:, :, :0], v[:, :, :0])
            k, v = self.cache = torch.cat((old[0], k), 2), torch.cat((old[1], v), 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=HEADS > KV_HEADS)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(sizes["num_hidden_layers"]))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids, is_served=False):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, is_served)
        return self.head(self.norm(x[:, -1:] if is_served else x))


def timed(call):
    """Seconds of a call, the device's work included."""
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def train():
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    model = Llama().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device == "cuda")
    ids = torch.randint(0, VOCAB, (batch, tokens + 1), device=device)

    def step():
        scores = model(ids[:, :-1])
        F.cross_entropy(scores.flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = [timed(step) for _ in range(steps)]
    dist.destroy_process_group()
    return {"step_s": seconds}


def serve():
    model = Llama().to(device, torch.bfloat16)
    seconds = []
    with torch.inference_mode():
        for turn in range(2):  # the first warms up
            for layer in model.layers:
                layer.cache = None
            seconds = [timed(lambda: model(torch.randint(0, VOCAB, (batch, tokens), device=device), True))]
            last = torch.randint(0, VOCAB, (batch, 1), device=device)
            seconds += [timed(lambda last=last: model(last, True)) for _ in range(steps if turn else 2)]
    return {"prefill_s": seconds[0], "decode_s": seconds[1:]}


if __name__ == "__main__":
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in alone.items():
        os.environ.setdefault(name, str(value))
    found = {"train": train, "serve": serve}[work]()
    if device == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    print(json.dumps(found))
