"""A user's training script: torch's own pipeline stages, which ask each other for shapes."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

HIDDEN, VOCAB, MICROBATCHES = 128, 100, 8
dist.init_process_group("nccl")
rank, last = dist.get_rank(), dist.get_world_size() - 1
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
layers = [nn.Linear(HIDDEN, HIDDEN), nn.ReLU()]
layers = [nn.Embedding(VOCAB, HIDDEN), *layers] if rank == 0 else layers
layers = [*layers, nn.Linear(HIDDEN, VOCAB)] if rank == last else layers
model = nn.Sequential(*layers).to(device)


def loss_of(scores, target):
    return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


schedule = Schedule1F1B(PipelineStage(model, rank, last + 1, device), MICROBATCHES, loss_fn=loss_of)
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(0, VOCAB, (16, 32), device=device)
schedule.step(*([tokens] if rank == 0 else []), **({"target": tokens} if rank == last else {}))
optimizer.step()
dist.destroy_process_group()
