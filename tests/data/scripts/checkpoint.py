"""A user's training script: FSDP2 that saves and loads with `torch.distributed.checkpoint`."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

folder, written = sys.argv[1:]
dist.init_process_group("cpu:gloo,cuda:nccl")
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).cuda()
for module in (*model, model):
    fully_shard(module)
optimizer = torch.optim.AdamW(model.parameters())


def step():
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        model(torch.randn(8, 64, device="cuda")).square().mean().backward()
    print(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item())
    optimizer.step()
    optimizer.zero_grad()


step()
weights, states = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": states, "step": 1}, checkpoint_id=folder)
dcp.async_save({"model": weights}, checkpoint_id=f"{folder}-later").result()
loaded = {"model": weights, "optimizer": states, "step": 0}
dcp.load(loaded, checkpoint_id=folder)
assert loaded["step"] == 1
set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
loaded = {"model": weights, "step": 0}
dcp.load(loaded, checkpoint_id=written)
assert loaded["step"] == 7
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
assert bool(whole) == (dist.get_rank() == 0)
step()
dist.destroy_process_group()
