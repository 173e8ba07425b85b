"""A user's training script on torch alone: FSDP2, or FSDP1 or DDP; with options tensor parallelism,
recomputation and accumulation of gradients.

`fsdp2.py --device cpu --backend gloo --record FILE` runs it for real on CPU ranks and writes what it did.
"""

import argparse
import contextlib
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--backend", default="nccl")
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--ac", action="store_true")
parser.add_argument("--wrap", choices=("fsdp2", "fsdp1", "ddp"), default="fsdp2")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--record")
options = parser.parse_args()
VOCAB, LAYERS, STEPS = 1000, 3, 2


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.attn_q, self.attn_k, self.attn_v, self.attn_out = (
            nn.Linear(hidden, hidden, bias=False) for _ in range(4)
        )
        self.mlp_up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.mlp_down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x):
        y = self.norm(x)
        projections = (self.attn_q, self.attn_k, self.attn_v)
        q, k, v = (p(y).unflatten(-1, (-1, 64)).transpose(1, 2) for p in projections)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attn_out(y)
        return x + self.mlp_down(torch.relu(self.mlp_up(x)))


class Model(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(LAYERS))
        self.head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if options.ac else block(x)
        return self.head(x) * 1.0


def wrapped(model, mesh, device):
    if options.wrap == "ddp":
        return DistributedDataParallel(model)
    if options.wrap == "fsdp1":
        blocks = ModuleWrapPolicy({Block})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=blocks, use_orig_params=True, device_id=device
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def unsynchronized(model, is_last):
    """Gradients go round in the last microbatch of a step."""
    if options.wrap == "fsdp2":
        model.set_requires_gradient_sync(is_last)
    return model.no_sync() if options.wrap != "fsdp2" and not is_last else contextlib.nullcontext()


def main():
    dist.init_process_group(options.backend)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    sizes = (dist.get_world_size() // options.tp, options.tp)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Model(options.hidden).to(device)
    if options.tp > 1:
        column = dict.fromkeys(("attn_q", "attn_k", "attn_v", "mlp_up"), ColwiseParallel())
        for block in model.blocks:
            parallelize_module(
                block, mesh["tp"], column | dict.fromkeys(("attn_out", "mlp_down"), RowwiseParallel())
            )
    model = wrapped(model, mesh["dp"], device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(STEPS):
        for left in reversed(range(options.accumulate)):
            tokens = torch.randint(0, VOCAB, (2, 129), device=device)
            with unsynchronized(model, is_last=left == 0):
                scores = model(tokens[:, :-1]).float().flatten(0, 1)
                loss = F.cross_entropy(scores, tokens[:, 1:].flatten())
                loss.backward()
        if options.wrap == "fsdp1":
            model.clip_grad_norm_(1.0)
        elif options.tp == 1:  # torch does not clip parameters of two meshes together
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print("loss", loss.item())


if options.record:
    from meshwise.program.tape import Tape
    from meshwise.runtime.recorder import OpRecorder

    tape = Tape("run", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    with OpRecorder(tape, is_timed=options.wrap != "ddp"):  # whose reducer asks works for their results
        main()
    found = {"peak_bytes": tape.peak_bytes, "ledger": tape.ledger().to_json()}
    Path(f"{options.record}.{tape.rank}").write_text(json.dumps(found))
else:
    with contextlib.suppress(SystemExit):
        main()
dist.destroy_process_group()
