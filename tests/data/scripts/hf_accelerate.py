"""A user's training loop with accelerate under DDP or FSDP2 that saves and loads its state."""

import sys

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, TensorDataset

folder, kind = sys.argv[1:]
plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if kind == "fsdp2" else None
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, fsdp_plugin=plugin)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16))
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
dataset = TensorDataset(torch.randn(256, 64), torch.randint(0, 16, (256,)))
loader = DataLoader(dataset, batch_size=4, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.print(f"loss {accelerator.gather(loss.detach()).mean():.3f}")
accelerator.save_state(folder)
accelerator.load_state(folder)
accelerator.save_model(model, folder)
accelerator.end_training()
