"""A user's training script: DDP, mixed precision with a scaler, a shuffling sampler, a checkpoint."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("nccl")
rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.BatchNorm1d(512), nn.Linear(512, 10)).cuda()
model = DistributedDataParallel(model, device_ids=[local_rank])
dataset = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=1, pin_memory=True, drop_last=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
    x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
print(f"rank {rank}: {len(loader)} steps, {torch.cuda.max_memory_allocated()} bytes")
torch.save(model.state_dict(), "checkpoint.pt")
dist.barrier()
dist.destroy_process_group()
