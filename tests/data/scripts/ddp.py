"""A user's training script: DDP as people write it, with all that goes around the step."""

import contextlib
import copy
import os
from pathlib import Path

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
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
average = copy.deepcopy(model)
model = DistributedDataParallel(model, device_ids=[local_rank], static_graph=True)
compiled = torch.compile(model)
dataset = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
sampler = DistributedSampler(dataset)
loader = DataLoader(
    dataset, batch_size=32, sampler=sampler, num_workers=1, pin_memory=True, drop_last=True, prefetch_factor=4
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
scaler = torch.amp.GradScaler("cuda")
copies = torch.cuda.Stream()


def prefetched():
    waiting = None
    for batch in loader:
        with torch.cuda.stream(copies):
            batch = [tensor.cuda(non_blocking=True) for tensor in batch]
        torch.cuda.current_stream().wait_stream(copies)
        for tensor in batch:
            tensor.record_stream(torch.cuda.current_stream())
        if waiting:
            yield waiting
        waiting = batch
    yield waiting


total = 0.0
for number, (x, y) in enumerate(prefetched()):
    is_last = number % 2 == 0  # of the microbatches of a step; torch wants the first one of all to be
    with contextlib.nullcontext() if is_last else model.no_sync():
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(compiled(x), y) / 2
        scaler.scale(loss).backward()
    total += loss.item()
    if is_last:
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.01)
        print(f"loss {loss:.3f} norm {norm:.2f} rate {schedule.get_last_lr()[0]:.1e}")
model.eval()
with torch.inference_mode():
    right = sum((model(x.cuda()).argmax(1) == y.cuda()).sum() for x, y in DataLoader(dataset, 2048))
    dist.all_reduce(right)
    print(f"accuracy {right / 4096:.1%}")
print(torch.cuda.memory_summary(), torch.cuda.memory_snapshot())
if rank == 0:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.tmp")
    Path("checkpoint.tmp").replace("checkpoint.pt")
dist.barrier()
saved = torch.load("checkpoint.pt", map_location=torch.device("cuda", local_rank))
model.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
print(f"rank {rank}: {len(loader)} batches, {torch.cuda.max_memory_allocated()} bytes")
dist.destroy_process_group()
