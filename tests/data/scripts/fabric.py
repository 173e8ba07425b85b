"""A user's training loop with Lightning Fabric under DDP or FSDP1, which accumulates, clips and saves."""

import sys

import torch
import torch.nn as nn
from lightning.fabric import Fabric
from lightning.fabric.strategies import FSDPStrategy
from torch.utils.data import DataLoader, TensorDataset

folder, kind = sys.argv[1:]
strategy = FSDPStrategy(auto_wrap_policy={nn.Linear}) if kind == "fsdp1" else "ddp"
fabric = Fabric(accelerator="cuda", devices=8, strategy=strategy, precision="bf16-mixed")
fabric.launch()
fabric.seed_everything(1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16))
model = fabric.setup_module(model)
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
dataset = TensorDataset(torch.randn(256, 64), torch.randint(0, 16, (256,)))
for number, (x, y) in enumerate(fabric.setup_dataloaders(DataLoader(dataset, batch_size=4, shuffle=True))):
    with fabric.no_backward_sync(model, enabled=number % 2 == 0):
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
    if number % 2:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    fabric.print(f"loss {fabric.all_reduce(loss.detach()).item():.3f}")
fabric.save(f"{folder}.ckpt", {"model": model, "optimizer": optimizer, "number": number})
